"""What a view gives and a model takes: one question with its pictures, and for training its answer."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

#: (source, episode_index, frame_index): names one stacked frame everywhere, also across samples of a batch.
FrameKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerQuestion:
    """The input of a planner at one step.

    Attributes:
        instruction: text in force.
        memory_keys: memory images, ascending, all before the window.
        recent_keys: window images, ascending; the last is the current frame.
        frames: uint8[H, W, 3] stacked RGB image for every key above.
        history: earlier subtasks, oldest first (text memory), empty otherwise.
    """

    instruction: str
    memory_keys: tuple[FrameKey, ...]
    recent_keys: tuple[FrameKey, ...]
    frames: dict[FrameKey, NDArray[np.uint8]] = field(repr=False)
    history: tuple[str, ...] = ()

    @property
    def image_keys(self) -> tuple[FrameKey, ...]:
        """Images in prompt order: memory first, then the window."""
        return self.memory_keys + self.recent_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSample:
    """A question with the answer to learn.

    Attributes:
        sample_id: `episode_%06d_t%06d`, unique within a source.
        source: name of the data set.
        episode_index: the source's number.
        step: raw frame t.
        question: the input.
        subtask: label at min(t + h*s, T-1).
        positions: 1-indexed window positions to keep.
    """

    sample_id: str
    source: str
    episode_index: int
    step: int
    question: PlannerQuestion
    subtask: str
    positions: tuple[int, ...]
