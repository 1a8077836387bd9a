"""A contact sheet of a demonstration: both views of evenly spaced frames, with the subtask in force.

python -m memer.tabletop.sheet object_search --index 3 --out sheet.png
"""

import argparse
import sys
import textwrap
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from memer.episode import Episode
from memer.errors import run_command
from memer.tabletop.expert import demonstrate
from memer.tabletop.tasks import SPLITS, TASKS

MAX_LINES = 4
TEXT_HEIGHT = 12 * MAX_LINES + 4
CHARACTERS_PER_LINE = 46


def contact_sheet(episode: Episode, *, every: int = 8, columns: int = 6) -> Image.Image:
    """Every `every`-th frame, all cameras side by side; below it step, subtask and instruction."""
    steps = list(range(0, episode.num_frames, every))
    rows = [
        np.concatenate(views, axis=1)
        for views in zip(*(source.frames(steps) for source in episode.cameras.values()), strict=True)
    ]
    height, width = rows[0].shape[:2]
    cell_width, cell_height = width + 8, height + TEXT_HEIGHT
    sheet = Image.new("RGB", (columns * cell_width, -(-len(steps) // columns) * cell_height), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    labels = episode.labels()
    for number, (step, picture) in enumerate(zip(steps, rows, strict=True)):
        left, top = number % columns * cell_width, number // columns * cell_height
        sheet.paste(Image.fromarray(picture), (left, top))
        lines = textwrap.wrap(f"{step}: {labels[step]}", CHARACTERS_PER_LINE)
        words = textwrap.wrap(episode.instruction_at(step), CHARACTERS_PER_LINE)
        for line_number, line in enumerate((lines + words)[:MAX_LINES]):
            color = (0, 0, 0) if line_number < len(lines) else (20, 60, 160)
            draw.text((left + 2, top + height + 1 + 12 * line_number), line, fill=color)
    return sheet


def main() -> int:
    """Write the sheet named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--perturb", type=float, default=0.0)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("sheet.png"))
    args = parser.parse_args()
    episode = demonstrate(
        args.task, split=args.split, index=args.index, perturb=args.perturb, frame_size=args.size
    )
    contact_sheet(episode, every=args.every).save(args.out)
    print(f"{args.out}: {episode.num_frames} frames, {episode.metadata['measures']}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
