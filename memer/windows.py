"""Which frames a step sees: recent window, keyframe split, targets, sparse selections.

Every index is a raw frame number within one episode (0-based) unless it is called a position: positions are
1-indexed places in the recent window. Training views and rollout call the same functions, so what a model is
trained on and what it meets at use cannot drift apart.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from memer.contract import Contract, WindowSettings
from memer.errors import UsageError
from memer.sample import FrameKey, PlannerQuestion


def recent_indices(t: int, *, subsample: int, length: int) -> list[int]:
    """The recent window: the last `length` members of t mod s, t mod s + s, ..., t.

    The window slides with t and always ends at t; early windows are shorter, never padded, never wrapped.

    Args:
        t: current raw frame, >= 0.
        subsample: s, raw frames between members, >= 1.
        length: N, members at most, >= 1.

    Raises:
        ValueError: an argument is below its bound.

    >>> recent_indices(7, subsample=5, length=8)
    [2, 7]
    >>> recent_indices(130, subsample=5, length=8)
    [95, 100, 105, 110, 115, 120, 125, 130]
    """
    _at_least(t, 0, "t")
    _at_least(subsample, 1, "subsample")
    _at_least(length, 1, "length")
    first = max(t % subsample, t - (length - 1) * subsample)
    return list(range(first, t + 1, subsample))


def align(k: int, *, anchor: int, subsample: int) -> int:
    """Move frame k down to the grid `anchor + i * s`; always to the earlier frame, at most s - 1 frames.

    >>> align(60, anchor=2, subsample=5)
    57
    """
    _at_least(subsample, 1, "subsample")
    return anchor + subsample * ((k - anchor) // subsample)


def split_keyframes(
    keyframes: Iterable[int], t: int, *, subsample: int, length: int, memory_length: int
) -> tuple[list[int], list[int]]:
    """Split the keyframes known at t into memory images and positions to nominate.

    A keyframe inside the window is an output (a position), one that left it is an input (a memory image);
    both are aligned down to the grid of t, and keyframes of one cell collapse. Keyframes after t and those
    before the grid's first frame (see `count_dropped`) take no part.

    Args:
        keyframes: raw frames in any order.
        t: current raw frame.
        subsample: s, raw frames.
        length: N, window members at most.
        memory_length: M, memory images at most; 0 shows none.

    Returns:
        (memory_indices ascending, positions ascending and 1-indexed).

    >>> split_keyframes([30, 60, 95, 140], 122, subsample=5, length=8, memory_length=8)
    ([27, 57], [2])
    """
    _at_least(memory_length, 0, "memory_length")
    context = recent_indices(t, subsample=subsample, length=length)
    offset, start = t % subsample, context[0]
    positions: set[int] = set()
    memory: set[int] = set()
    for k in keyframes:
        if start <= k <= t:
            positions.add(1 + (k - start) // subsample)
        elif offset <= k < start:
            memory.add(align(k, anchor=offset, subsample=subsample))
    kept = sorted(memory)[-memory_length:] if memory_length else []
    return kept, sorted(positions)


def count_dropped(keyframes: Iterable[int], t: int, *, subsample: int) -> int:
    """Keyframes that step t can show nowhere: they lie before the grid's first frame, t mod s.

    >>> count_dropped([0, 2], 63, subsample=5), count_dropped([0, 2], 62, subsample=5)
    (2, 1)
    """
    _at_least(t, 0, "t")
    _at_least(subsample, 1, "subsample")
    return sum(1 for k in set(keyframes) if 0 <= k < t % subsample)


def target_index(t: int, num_frames: int, *, settings: WindowSettings) -> int:
    """Frame whose label is the answer at t: h * s frames ahead, held at the last frame.

    >>> target_index(7, 200, settings=WindowSettings()), target_index(195, 200, settings=WindowSettings())
    (17, 199)
    """
    if not 0 <= t < num_frames:
        raise ValueError(f"t: {t}, must lie in the {num_frames} frames of the episode")
    return min(t + settings.horizon_frames, num_frames - 1)


def even_indices(n: int, count: int) -> list[int]:
    """`count` of n frames, evenly spaced, oldest and newest included; all of them when n <= count.

    Integers only: j * (n - 1) // (count - 1). One frame is the newest one.

    Raises:
        ValueError: `count` is no integer >= 1, or n no integer >= 0.

    >>> even_indices(16, 3), even_indices(16, 1), even_indices(2, 5), even_indices(0, 3)
    ([0, 7, 15], [15], [0, 1], [])
    """
    if not _is_int(count) or count < 1:
        raise ValueError(f"count: {count!r}, must be an integer >= 1")
    if not _is_int(n) or n < 0:
        raise ValueError(f"n: {n!r}, must be an integer >= 0")
    if n <= count:
        return list(range(n))
    if count == 1:
        return [n - 1]
    return [j * (n - 1) // (count - 1) for j in range(count)]


def bucket_last_indices(start: int, end: int, buckets: int = 8) -> list[int]:
    """The last frame of each of `buckets` equal time buckets of the segment [start, end).

    Non-decreasing, never below `start`, ends at end - 1; frames repeat when the segment is shorter than the
    number of buckets. Source: MaP-WAM's sparse visual context of a finished segment.

    Raises:
        ValueError: the segment is empty or negative, or `buckets` is below 1.

    >>> bucket_last_indices(0, 10), bucket_last_indices(20, 23)
    ([1, 2, 3, 4, 6, 7, 8, 9], [20, 20, 21, 21, 21, 22, 22, 22])
    """
    if not 0 <= start < end:
        raise ValueError(f"[{start}, {end}): must be a segment of at least one frame")
    _at_least(buckets, 1, "buckets")
    length = end - start
    return [start + -(-(b + 1) * length // buckets) - 1 for b in range(buckets)]


def subtask_history(labels: Iterable[str | None], *, running: str | None, length: int) -> tuple[str, ...]:
    """Text memory: the earlier subtasks, oldest first, each run once, without the running one.

    Training passes the target labels of the earlier steps and the label of the step before t as `running`;
    the rollout passes its own accepted answers and the last of them. Passing the answer of step t itself as
    `running` would tell the model that a change is due.

    Args:
        labels: one label per earlier step; None (no label, or a failed answer) says nothing.
        running: the subtask being executed; a last run that equals it is left out.
        length: entries at most, the last ones; 0 gives none.

    >>> subtask_history(["a", "a", "b", "a", "c"], running="c", length=2)
    ('b', 'a')
    """
    _at_least(length, 0, "length")
    runs: list[str] = []
    for label in labels:
        if label is not None and (not runs or runs[-1] != label):
            runs.append(label)
    if runs and runs[-1] == running:
        runs.pop()
    return tuple(runs[-length:]) if length else ()


def build_question(
    t: int,
    *,
    contract: Contract,
    memory_indices: Sequence[int],
    frame: Callable[[int], NDArray[np.uint8]],
    source: str,
    episode_index: int,
    instruction: str,
    history: Sequence[str] = (),
) -> PlannerQuestion:
    """Everything a planner is shown at t; the one place for training views and rollout.

    Args:
        t: current raw frame.
        contract: decides window, number of memory images and whether the history belongs to the input.
        memory_indices: raw frames to remember, ascending; from `split_keyframes` or `EpisodicMemory.visible`.
        frame: raw frame number -> uint8[H, W, 3], stacked; called once per distinct image.
        source: name of the data set or of the session, first part of the frame keys.
        episode_index: second part of the frame keys.
        instruction: text in force at t.
        history: from `subtask_history`; left out unless the memory form shows it.

    Raises:
        ValueError: the memory is not ascending, holds frames that are not before t, or exceeds the contract.
    """
    windows = contract.shown_windows
    context = recent_indices(t, subsample=windows.frame_subsample, length=windows.recent_frames_length)
    memory = list(memory_indices)
    ascending = all(a < b for a, b in pairwise(memory))
    if (
        not ascending
        or len(memory) > windows.keyframes_length
        or (memory and not 0 <= memory[0] <= memory[-1] < t)
    ):
        raise ValueError(
            f"memory_indices: {memory}, must be at most {windows.keyframes_length} ascending frames "
            f"before {t}"
        )
    memory_keys: tuple[FrameKey, ...] = tuple((source, episode_index, k) for k in memory)
    recent_keys: tuple[FrameKey, ...] = tuple((source, episode_index, k) for k in context)
    return PlannerQuestion(
        instruction=instruction,
        memory_keys=memory_keys,
        recent_keys=recent_keys,
        frames={key: frame(key[2]) for key in dict.fromkeys(memory_keys + recent_keys)},
        history=tuple(history[-contract.history_length :])
        if contract.shows_history and contract.history_length
        else (),
    )


def subsample_for_rate(fps: float, *, target_hz: float) -> int:
    """Raw frames between window members for about `target_hz` images per second: round(fps / target_hz).

    Raises:
        UsageError: a rate is not positive, or the target lies above the camera's rate.

    >>> subsample_for_rate(15.0, target_hz=3.0), subsample_for_rate(10.0, target_hz=2.0)
    (5, 5)
    """
    if not fps > 0 or not target_hz > 0:
        raise UsageError(f"fps {fps}, target_hz {target_hz}: both must be positive")
    if target_hz > fps:
        raise UsageError(f"target_hz {target_hz} lies above the {fps} frames per second of the cameras")
    return max(1, round(fps / target_hz))


def check_rate(contract: Contract, *, fps: float, subsample: int | None = None) -> float:
    """Compare the window's rate at use with the contract's; warn when they differ by more than 20 %.

    Args:
        contract: of the training.
        fps: frames per second at use.
        subsample: raw frames between window members at use; the contract's when None.

    Returns:
        Rate at use / rate in training.
    """
    step = contract.windows.frame_subsample if subsample is None else subsample
    trained_hz, used_hz = contract.fps / contract.windows.frame_subsample, fps / step
    if abs(used_hz - trained_hz) > 0.2 * trained_hz:
        warnings.warn(
            f"the window samples {used_hz:.3g} frames per second, training sampled {trained_hz:.3g}; "
            f"feed frames at {contract.fps:g} fps or choose another frame_subsample",
            stacklevel=2,
        )
    return used_hz / trained_hz


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least(value: int, least: int, name: str) -> None:
    if value < least:
        raise ValueError(f"{name}: {value!r}, must be an integer >= {least}")
