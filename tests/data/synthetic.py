"""Demonstrations made in memory; every picture proves which frame it is (tests.fixtures.paint)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from memer.contract import CameraLayout
from memer.episode import Episode, InstructionSpan, Segment
from memer.errors import MemerError
from tests.fixtures.paint import paint_picture, read_identity

CAMERAS = ("base", "wrist")
LAYOUT = CameraLayout(camera_keys=CAMERAS, view_width=96, view_height=54)


@dataclass
class PaintFrames:
    """Painted when asked for; counts what was asked."""

    episode: int
    camera: int
    length: int
    ends_after: int | None = None
    prepared: bool = False
    asked: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return self.length

    def frames(self, indices: Sequence[int] | None = None) -> Iterator[np.ndarray]:
        for index in range(self.length) if indices is None else indices:
            if self.ends_after is not None and index >= self.ends_after:
                return
            self.asked.append(index)
            yield paint_picture(self.episode, index, self.camera)


@dataclass
class SyntheticSource:
    """Episodes with three subtasks; faults can be put into chosen ones.

    Attributes:
        lengths: episode number -> frames.
        unlabelled: episodes without segments.
        gaps: episodes whose second subtask has no label.
        short: episode -> frames after which camera `wrist` ends.
        stop_at: episode whose reading raises KeyboardInterrupt.
        shift: added to state and action.
    """

    lengths: Mapping[int, int]
    name: str = "synthetic"
    fps: float = 10.0
    camera_keys: tuple[str, ...] = CAMERAS
    unlabelled: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    short: Mapping[int, int] = field(default_factory=dict)
    stop_at: int | None = None
    shift: float = 0.0
    read: list[int] = field(default_factory=list)
    frames: dict[tuple[int, str], PaintFrames] = field(default_factory=dict)

    def indices(self) -> list[int]:
        return sorted(self.lengths)

    def report(self) -> dict[str, Any]:
        return {"episodes": len(self.lengths)}

    def episode(self, index: int) -> Episode:
        if index == self.stop_at:
            raise KeyboardInterrupt
        if index not in self.lengths:
            raise MemerError(f"no episode {index}")
        self.read.append(index)
        length = self.lengths[index]
        for number, key in enumerate(self.camera_keys):
            ends_after = self.short.get(index) if key == "wrist" else None
            self.frames[index, key] = PaintFrames(index, number, length, ends_after)
        steps = np.arange(length, dtype=np.float32)[:, None]
        return Episode(
            source=self.name,
            episode_index=index,
            fps=self.fps,
            cameras={key: self.frames[index, key] for key in self.camera_keys},
            state=np.concatenate([steps, steps * 0 + index, steps**2], axis=1) + np.float32(self.shift),
            action=np.concatenate([-steps, steps / 3], axis=1) + np.float32(self.shift),
            instructions=(InstructionSpan(0, "tidy up"), InstructionSpan(length // 2, "tidy up again")),
            segments=self._segments(index, length),
            metadata={"seed": index},
        )

    def _segments(self, index: int, length: int) -> tuple[Segment, ...]:
        if index in self.unlabelled:
            return ()
        cuts = [0, length // 3, 2 * length // 3, length]
        found = [Segment(a, b, f"subtask {k}") for k, (a, b) in enumerate(pairwise(cuts)) if a < b]
        return tuple(s for k, s in enumerate(found) if not (index in self.gaps and k == 1))

    def fresh(self, **changes: Any) -> "SyntheticSource":
        """A copy that has read nothing yet."""
        return replace(self, read=[], frames={}, **changes)


def identities(stacked: np.ndarray, layout: CameraLayout = LAYOUT) -> list[tuple[int, int, int]]:
    """(episode, frame, camera) of every view of a stacked picture."""
    height = layout.view_height
    return [read_identity(stacked[k * height : (k + 1) * height]) for k in range(len(layout.camera_keys))]
