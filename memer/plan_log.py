"""Pictures of plans beside what happened, for the report of a played evaluation."""

from pathlib import Path

import numpy as np
from PIL import Image

from memer.executors.base import Pixels
from memer.plan_policy import MapWamPolicy
from memer.plan_records import SegmentLog

#: Space between pictures, px, and its grey level.
GAP, GREY = 2, 255


def strip_path(folder: Path, episode_index: int, segment: int) -> Path:
    """Where the strip of one segment lies: frames/episode_000012/segment_003.png."""
    return folder / f"episode_{episode_index:06d}" / f"segment_{segment:03d}.png"


def strip(segment: SegmentLog) -> Pixels | None:
    """Plan frames above the real frames of the same segment, uint8[H', W', 3].

    Without a plan the real frames alone, of a segment that did not end the plan alone; None without both.
    """
    rows = [frames for frames in (segment.plan, segment.frames) if frames is not None]
    if not rows:
        return None
    return np.concatenate([_row(frames) for frames in rows])


def _row(frames: Pixels) -> Pixels:
    spaced = np.pad(frames, ((0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=GREY)
    row: Pixels = np.concatenate(list(spaced), axis=1)
    return row


class PlanLog:
    """Writes the strips of an episode once it is over.

    Args:
        folder: `frames/` of the run.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def __call__(self, episode_index: int, policy: MapWamPolicy) -> None:
        """A hook of `rollout_map_wam`."""
        for segment in policy.segments:
            pixels = strip(segment)
            if pixels is None:
                continue
            path = strip_path(self.folder, episode_index, segment.index)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
