"""Which frames a plan, a chunk and a question about the next subtask show, in training and at run time.

Training passes the frames of an annotated episode, the run time the frames it recorded; both call the same
functions, so what a model is trained on and what it meets at use cannot drift apart. Every index is a raw
frame of one episode; a segment [start, end) is half-open. Source: MaP-WAM specification, sections 3, 6 and 8.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memer.contract import CameraLayout, Contract
from memer.episode import Segment
from memer.errors import UsageError
from memer.sample import FrameKey, PlannerQuestion
from memer.windows import bucket_last_indices

#: Answer of a language planner that was trained to say so once every subtask is finished.
DONE_TEXT = "done"


def head_layout(contract: Contract) -> CameraLayout:
    """The camera layout of the language planner's pictures: the head view alone.

    Raises:
        UsageError: the contract has no plan settings.
    """
    if contract.plan is None:
        raise UsageError("contract.plan: missing; it names the head camera")
    return replace(contract.cameras, camera_keys=(contract.plan.head_camera,))


def segment_plan_indices(start: int, end: int, *, plan_frames: int = 8) -> list[int]:
    """The references of one segment: its first frame, then the last frame of each time bucket.

    >>> segment_plan_indices(20, 28)
    [20, 20, 21, 22, 23, 24, 25, 26, 27]
    """
    return [start, *bucket_last_indices(start, end, buckets=plan_frames)]


def episode_plan_indices(segments: Iterable[Segment], *, plan_frames: int = 8) -> list[int]:
    """The visual memory of an episode, [G_0, G_1 .. G_K]: frame 0, then the plan frames of each segment.

    >>> episode_plan_indices([Segment(0, 4, "a"), Segment(4, 12, "b")], plan_frames=4)
    [0, 0, 1, 2, 3, 5, 7, 9, 11]
    """
    return [
        0,
        *(k for s in segments for k in bucket_last_indices(s.start, s.end, buckets=plan_frames)),
    ]


def clip_indices(t: int, *, last: int, horizon: int, stride: int) -> list[int]:
    """Frames t, t + stride, ..., t + horizon of an executor's clip, held at `last`.

    >>> clip_indices(5, last=15, horizon=16, stride=4)
    [5, 9, 13, 15, 15]
    """
    if t > last:
        raise ValueError(f"t: {t}, must not lie behind the last frame {last}")
    return [min(k, last) for k in range(t, t + horizon + 1, stride)]


def finished_indices(segments: Sequence[Segment], count: int) -> list[int]:
    """Pictures of the question about subtask count + 1: frame 0 and the last of each finished segment.

    >>> finished_indices([Segment(0, 4, "a"), Segment(4, 9, "b"), Segment(9, 12, "a")], 2)
    [0, 3, 8]
    """
    if not 0 <= count <= len(segments):
        raise ValueError(f"count: {count}, must be a number of the {len(segments)} segments")
    return [0, *(segment.end - 1 for segment in segments[:count])]


def next_subtask_question(
    *,
    instruction: str,
    done: Sequence[str],
    images: Sequence[NDArray[np.uint8]],
    source: str,
    episode_index: int,
    numbers: Sequence[int] | None = None,
) -> PlannerQuestion:
    """The question "what is subtask k?" with k = len(done) + 1; the one place for view and run time.

    Args:
        instruction: of the whole task.
        done: texts of the finished subtasks in order, duplicates kept: in a counting task they are the state.
        images: uint8[H, W, 3] views of the head camera: the initial one, then the last one of every finished
            segment.
        source: name of the data set or of the session, first part of the frame keys.
        episode_index: second part of the frame keys.
        numbers: third part of the frame keys, non-decreasing: frame numbers of the images; 0, 1, ... when
            None.

    Returns:
        A question without a recent window; `history` holds all of `done`.

    Raises:
        ValueError: the number of images is not one more than that of the finished subtasks.
    """
    if len(images) != len(done) + 1:
        raise ValueError(
            f"images: {len(images)}, must be {len(done) + 1}: the initial one and one per finished subtask"
        )
    named = range(len(images)) if numbers is None else numbers
    keys: list[FrameKey] = [(source, episode_index, number) for number in named]
    return PlannerQuestion(
        instruction=instruction,
        memory_keys=tuple(keys),
        recent_keys=(),
        frames=dict(zip(keys, images, strict=True)),
        history=tuple(done),
    )
