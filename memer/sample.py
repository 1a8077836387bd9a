"""What a view gives and a model takes: a question and its answer, the plans of an episode, a chunk."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualPlannerSample:
    """The sparse visual memory of one episode, from which a visual planner learns every next plan.

    Frames or, where features were computed ahead, their latents; then `frames` has no rows.

    Attributes:
        sample_id: `episode_%06d`, or `episode_%06d_k%03d` for one segment alone; unique within a source.
        source: name of the data set.
        episode_index: the source's number.
        frames: uint8[1 + N * K, H, W, 3], the canvases [G_0, G_1 .. G_K]: the first frame, then N of each
            segment.
        texts: the subtask of each of the K segments.
        instruction: text in force at the first frame.
        latents: float32[C, 1 + K * N / 4, h, w] of all frames encoded as one clip.
        text_features: float32[K, M, T], embeddings of `texts`.
        instruction_features: float32[M, T].
    """

    sample_id: str
    source: str
    episode_index: int
    frames: NDArray[np.uint8] = field(repr=False)
    texts: tuple[str, ...]
    instruction: str
    latents: NDArray[np.float32] | None = field(default=None, repr=False)
    text_features: NDArray[np.float32] | None = field(default=None, repr=False)
    instruction_features: NDArray[np.float32] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSample:
    """One action chunk of a segment: where it starts, what to follow, what to do.

    The segment is [i, j], both included; t is the step, h the horizon.

    Attributes:
        sample_id: `episode_%06d_t%06d`, unique within a source.
        source: name of the data set.
        episode_index: the source's number.
        step: t, raw frame.
        plan_frames: uint8[1 + N, H, W, 3], frame i and the N plan frames; no rows without a visual plan.
        clip_frames: uint8[1 + h / stride, H, W, 3], frames t, t + stride, ..., held at the last one.
        text: the subtask of the segment.
        instruction: text in force at t.
        state: float32[S] at t, raw.
        progress: true progress at t, 0..1.
        actions: float32[h, A] raw; row n - 1 is the command that leads to frame t + n, padded behind the end.
        action_valid: bool[h], True = the command belongs to the demonstration.
        progress_target: float32[h] in 0..1; row n - 1 is the progress of frame t + n.
        latent_valid: bool[h / (4 * stride)], True = at least one of the latent's 4 frames exists.
        finished: whether the segment counts as finished at t (label of the classification).
        progress_valid: bool[h], True = supervised; None: where action_valid is.
        plan_latents: float32[C, 1 + N / 4, h, w] of plan_frames as one clip; then `plan_frames` has no rows.
        clip_latents: float32[C, 1 + h / (4 * stride), h, w] of clip_frames as one clip; the same.
        text_features: float32[M, T], embedding of `text`.
        instruction_features: float32[M, T].
    """

    sample_id: str
    source: str
    episode_index: int
    step: int
    plan_frames: NDArray[np.uint8] = field(repr=False)
    clip_frames: NDArray[np.uint8] = field(repr=False)
    text: str
    instruction: str
    state: NDArray[np.float32] = field(repr=False)
    progress: float
    actions: NDArray[np.float32] = field(repr=False)
    action_valid: NDArray[np.bool_] = field(repr=False)
    progress_target: NDArray[np.float32] = field(repr=False)
    latent_valid: NDArray[np.bool_] = field(repr=False)
    finished: bool
    progress_valid: NDArray[np.bool_] | None = field(default=None, repr=False)
    plan_latents: NDArray[np.float32] | None = field(default=None, repr=False)
    clip_latents: NDArray[np.float32] | None = field(default=None, repr=False)
    text_features: NDArray[np.float32] | None = field(default=None, repr=False)
    instruction_features: NDArray[np.float32] | None = field(default=None, repr=False)
