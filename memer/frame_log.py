"""Small pictures of a rollout, for its report: the current frame and the memory shown, at some steps."""

import re
import shutil
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from memer.session import PlannerSession, StepRecord

#: Longest edge of a picture, px.
MAX_EDGE = 192


def frame_path(folder: Path, episode_index: int, step: int) -> Path:
    """Where the picture of one raw frame lies: frames/episode_000012/frame_000345.jpg."""
    return folder / f"episode_{episode_index:06d}" / f"frame_{step:06d}.jpg"


class FrameLog:
    """Writes pictures while a rollout runs.

    Args:
        folder: `frames/` of the run.
        every: inferences between two logged steps of an episode.
        steps: raw frames to log besides.
    """

    def __init__(self, folder: Path | str, *, every: int = 10, steps: Collection[int] = ()) -> None:
        self.folder = Path(folder)
        self._every = every
        self._steps = frozenset(steps)
        self._count: dict[int, int] = {}

    def __call__(self, episode_index: int, session: PlannerSession, record: StepRecord) -> None:
        """A step hook of the rollouts."""
        count = self._count[episode_index] = self._count.get(episode_index, -1) + 1
        if count % self._every and record.timestep not in self._steps:
            return
        for step in (*record.memory_indices_before, record.timestep):
            path = frame_path(self.folder, episode_index, step)
            frame = session.frame(step)
            if frame is not None and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _save(frame, path)

    def keep(self, episodes: Collection[int]) -> None:
        """Delete the pictures of all other episodes."""
        for folder in self.folder.glob("episode_*"):
            number = re.fullmatch(r"episode_(\d+)", folder.name)
            if number and int(number[1]) not in episodes:
                shutil.rmtree(folder)


def _save(frame: NDArray[np.uint8], path: Path) -> None:
    image = Image.fromarray(frame)
    image.thumbnail((MAX_EDGE, MAX_EDGE))
    image.save(path, format="JPEG", quality=85)
