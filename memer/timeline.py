"""One evaluated episode as a picture: what was true, what was said, what was nominated and remembered."""

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from memer.frame_log import frame_path
from memer.html import picture
from memer.svg import INK, MUTED, PALETTE, WRONG, Scale, Span, draw_line, draw_text, span_bar, svg
from memer.windows import even_indices

#: Colour of steps without an answer, and of unlabelled frames.
NOTHING = "#b0b0b0"
WIDTH, MARGIN = 1040, 110

Rows = Sequence[Mapping[str, Any]]


def label_colors(rows: Rows) -> dict[str, str]:
    """A colour per label, true ones first, in the order of appearance."""
    names = dict.fromkeys(row["target_subtask"] for row in rows if row["target_subtask"])
    names |= dict.fromkeys(row["predicted_subtask"] for row in rows if row["predicted_subtask"])
    return {name: PALETTE[k % len(PALETTE)] for k, name in enumerate(names)}


def label_spans(rows: Rows, field: str, colors: Mapping[str, str], *, end: float) -> list[Span]:
    """Runs of one label over the evaluated steps; the last step reaches to `end`."""
    spans: list[Span] = []
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        label = row[field]
        stop = end if following is None else following["timestep"]
        shown = label or ("no answer" if field == "predicted_subtask" else "unlabelled")
        if spans and spans[-1].label == shown and spans[-1].end == row["timestep"]:
            spans[-1] = spans[-1]._replace(end=stop)
        else:
            spans.append(Span(row["timestep"], stop, shown, colors.get(label, NOTHING) if label else NOTHING))
    return spans


def shown_steps(rows: Rows, folder: Path, *, count: int = 4) -> list[Mapping[str, Any]]:
    """Steps worth a look: pictures exist, each with another memory, spread over the episode."""
    seen: list[Mapping[str, Any]] = []
    for row in rows:
        frames = [*row["memory_indices_before"], row["timestep"]]
        if not all(frame_path(folder, row["episode_index"], k).exists() for k in frames):
            continue
        if seen and seen[-1]["memory_indices_before"] == row["memory_indices_before"]:
            seen[-1] = row
        else:
            seen.append(row)
    return [seen[k] for k in even_indices(len(seen), count)] if len(seen) > count else seen


def episode_picture(
    rows: Rows,
    *,
    colors: Mapping[str, str],
    marked: Rows = (),
    representatives: Sequence[int] = (),
    fps: float | None = None,
) -> str:
    """The time line of one episode as SVG.

    Args:
        rows: of predictions.jsonl, one episode, in time order.
        colors: label -> colour.
        marked: steps to mark with letters.
        representatives: frames that stand for the clusters of votes at the end.
        fps: frames per second, for a second axis.
    """
    stride = min((b["timestep"] - a["timestep"] for a, b in itertools.pairwise(rows)), default=1)
    end = rows[-1]["timestep"] + max(1, stride)
    scale = Scale(0, end, MARGIN, WIDTH - 30)
    parts: list[str] = []
    y = 18
    for name, field in (("true", "target_subtask"), ("planner", "predicted_subtask")):
        parts.append(draw_text(MARGIN - 8, y + 15, name, anchor="end", color=MUTED))
        parts += span_bar(label_spans(rows, field, colors, end=end), scale=scale, y=y, height=22)
        y += 25
    parts.append(draw_text(MARGIN - 8, y + 7, "wrong", anchor="end", color=MUTED))
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        if row["normalized_correct"] is False:
            stop = end if following is None else following["timestep"]
            x, w = scale(row["timestep"]), scale(stop) - scale(row["timestep"])
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{max(0.6, w):.1f}" height="7" fill="{WRONG}"/>')
    y += 14
    parts.append(draw_text(MARGIN - 8, y + 14, "nominated", anchor="end", color=MUTED))
    parts.append(draw_line(scale(0), y + 18, scale(end), y + 18, "#dddddd"))
    for frame, votes in sorted(_votes(rows).items()):
        height = min(16, 4 + 2 * votes)
        parts.append(
            f'<rect x="{scale(frame) - 1:.1f}" y="{y + 18 - height}" width="2" height="{height}" '
            f'fill="{INK}"><title>frame {frame}: {votes} votes</title></rect>'
        )
    for frame in representatives:
        x = scale(frame)
        parts.append(
            f'<path d="M{x:.1f} {y + 19}l4 7h-8z" fill="{PALETTE[5]}">'
            f"<title>kept: frame {frame}</title></path>"
        )
    y += 32
    most = max(1, *(len(row["memory_indices_before"]) for row in rows))
    parts.append(draw_text(MARGIN - 8, y + 14, f"memory (max {most})", anchor="end", color=MUTED))
    points = []
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        level = y + 18 - 16 * len(row["memory_indices_before"]) / most
        stop = end if following is None else following["timestep"]
        points += [f"{scale(row['timestep']):.1f},{level:.1f}", f"{scale(stop):.1f},{level:.1f}"]
    parts.append(
        f'<polygon points="{scale(0):.1f},{y + 18} {" ".join(points)} {scale(end):.1f},{y + 18}" '
        f'fill="#9ec5e8"/>'
    )
    y += 24
    for k, row in enumerate(marked):
        x = scale(row["timestep"])
        parts.append(
            f'<line x1="{x:.1f}" y1="14" x2="{x:.1f}" y2="{y}" stroke="{INK}" stroke-dasharray="3 3"/>'
        )
        parts.append(draw_text(x, 11, letter(k), anchor="middle", weight=700))
    for value in _marks(end):
        text = f"{value}" if fps is None else f"{value} ({value / fps:.0f} s)"
        parts.append(draw_text(scale(value), y + 12, text, anchor="middle", color=MUTED))
    return svg(parts, width=WIDTH, height=y + 18, label=f"episode {rows[0]['episode_index']}")


def episode_pictures(marked: Rows, folder: Path) -> str:
    """Below the time line: for every marked step its memory and its current frame."""
    parts = []
    for k, row in enumerate(marked):
        episode = row["episode_index"]
        said = row["predicted_subtask"] or f"no answer ({row['parse_error'] or row.get('status', '')})"
        line = f"<b>{letter(k)}</b> frame {row['timestep']}: planner says <b>{escape(said)}</b>"
        if row["normalized_correct"] is False:
            line += f', <span class="bad">true is {escape(str(row["target_subtask"]))}</span>'
        if row["mapped_keyframe_indices"]:
            line += f"; nominates frame {', '.join(map(str, row['mapped_keyframe_indices']))}"
        pictures = [
            picture(frame_path(folder, episode, frame), caption=f"memory {frame}")
            for frame in row["memory_indices_before"]
        ]
        now = frame_path(folder, episode, row["timestep"])
        pictures.append(picture(now, caption=f"now {row['timestep']}", current=True))
        parts.append(f'<div class="step"><p>{line}</p><div class="thumbs">{"".join(pictures)}</div></div>')
    return f'<div class="steps">{"".join(parts)}</div>'


def letter(index: int) -> str:
    """Name of a marked step.

    >>> letter(0), letter(27)
    ('a', 'b1')
    """
    return chr(ord("a") + index % 26) + (str(index // 26) if index >= 26 else "")


def _votes(rows: Rows) -> dict[int, int]:
    counts: dict[int, int] = {}
    for row in rows:
        for frame in row["mapped_keyframe_indices"]:
            counts[frame] = counts.get(frame, 0) + 1
    return counts


def _marks(end: int) -> list[int]:
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 10**9) if end / s <= 10)
    return list(range(0, end, step))
