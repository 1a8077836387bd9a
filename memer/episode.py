"""The one episode schema: what every source is read into and everything downstream reads.

Identity of a frame is the pair (episode_index, frame_index); the clock is frame_index / fps, in seconds from
the start of the episode. Segments are half-open frame ranges; a frame outside every segment is unlabelled.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memer.errors import MemerError


class FrameSource(Protocol):
    """The frames of one camera in one episode, decoded when asked for.

    `prepared` is True where the frames already have their slot's size and went through the contract's JPEG
    coding (frames read from shards); such frames are only stacked, never resized or coded again.
    """

    @property
    def prepared(self) -> bool:
        """Whether the frames are already in the form the contract asks for."""
        ...

    def __len__(self) -> int:
        """Number of frames, equal to the number of steps of the episode."""
        ...

    def frames(self, indices: Sequence[int] | None = None) -> Iterator[NDArray[np.uint8]]:
        """Yield uint8[H, W, 3] RGB for strictly ascending `indices` (None: all), in one forward pass."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayFrames:
    """Frames that already lie in memory.

    Args:
        array: uint8[T, H, W, 3], RGB.
        prepared: see FrameSource.
    """

    array: NDArray[np.uint8]
    prepared: bool = False

    def __len__(self) -> int:
        return len(self.array)

    def frames(self, indices: Sequence[int] | None = None) -> Iterator[NDArray[np.uint8]]:
        """Yield the frames named by `indices` (None: all)."""
        for index in range(len(self.array)) if indices is None else indices:
            yield self.array[index]


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One subtask span: frames start <= k < end carry `label`."""

    start: int
    end: int
    label: str

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"segment {self.label!r}: [{self.start}, {self.end}) is empty or negative")


@dataclass(frozen=True, slots=True, order=True)
class InstructionSpan:
    """The instruction in force from frame `start` until the next span."""

    start: int
    text: str


def normalize_label(text: str) -> str:
    """Collapse runs of whitespace to one space and trim; case and characters are kept."""
    return " ".join(text.split())


def label_key(text: str) -> str:
    """What two labels are compared by: whitespace normalised, Unicode NFC; case is kept.

    The original text is what gets stored and shown; only comparisons use the key.

    >>> label_key("cafe\u0301 ") == label_key("caf\u00e9")
    True
    """
    return unicodedata.normalize("NFC", normalize_label(text))


def segments_from_labels(
    labels: Sequence[str | None], segment_ids: Sequence[int] | None = None
) -> tuple[Segment, ...]:
    """Runs of equal labels as segments; None is unlabelled and ends the running segment.

    Labels are compared by `label_key`; a segment carries the text of its first frame.

    Args:
        labels: one label or None per frame.
        segment_ids: optional id per frame that also splits runs of equal labels.

    >>> segments_from_labels(["a", "a", None, "a"])
    (Segment(start=0, end=2, label='a'), Segment(start=3, end=4, label='a'))
    """
    segments: list[Segment] = []
    keys = {text: label_key(text) for text in set(labels) if text is not None}
    start = 0
    for k in range(1, len(labels) + 1):
        same = (
            k < len(labels)
            and _same_label(labels[k], labels[start], keys)
            and (segment_ids is None or segment_ids[k] == segment_ids[start])
        )
        if not same:
            label = labels[start]
            if label is not None:
                segments.append(Segment(start, k, label))
            start = k
    return tuple(segments)


def _same_label(one: str | None, other: str | None, keys: Mapping[str, str]) -> bool:
    if one is None or other is None:
        return one is other
    return keys[one] == keys[other]


@dataclass(frozen=True, slots=True)
class Episode:
    """One demonstration.

    Attributes:
        source: name of the data set.
        episode_index: the source's own number; numbers need not start at 0 nor be contiguous.
        fps: frames per second of the clock frame_index / fps.
        cameras: camera key -> frames, each `num_frames` long.
        state: float32[T, S], proprioception in the source's units.
        action: float32[T, A].
        instructions: spans in order, the first at frame 0.
        segments: in order, not overlapping; gaps are unlabelled.
        metadata: plain JSON values that travel along (seed, source clock deviation, ...).
    """

    source: str
    episode_index: int
    fps: float
    cameras: Mapping[str, FrameSource]
    state: NDArray[np.float32]
    action: NDArray[np.float32]
    instructions: tuple[InstructionSpan, ...]
    segments: tuple[Segment, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"episode {self.episode_index} of {self.source}"
        if self.num_frames == 0:
            raise MemerError(f"{where}: no frames")
        if len(self.action) != self.num_frames:
            raise MemerError(f"{where}: {len(self.action)} actions for {self.num_frames} states")
        for key, frames in self.cameras.items():
            if len(frames) != self.num_frames:
                raise MemerError(
                    f"{where}: camera {key} has {len(frames)} frames, the table {self.num_frames}"
                )
        if not self.instructions or self.instructions[0].start != 0:
            raise MemerError(f"{where}: no instruction at frame 0; give one with source.instruction=TEXT")
        previous_end = 0
        for segment in self.segments:
            if segment.start < previous_end or segment.end > self.num_frames:
                raise MemerError(
                    f"{where}: segment {segment.label!r} [{segment.start}, {segment.end}) overlaps its "
                    f"predecessor or leaves the {self.num_frames} frames"
                )
            previous_end = segment.end

    @property
    def num_frames(self) -> int:
        """Number of steps T."""
        return len(self.state)

    def labels(self) -> list[str | None]:
        """One label per frame, None where unlabelled."""
        return labels_from_segments(self.segments, self.num_frames)

    def instruction_at(self, step: int) -> str:
        """The instruction in force at `step`."""
        return instruction_at(self.instructions, step)


def labels_from_segments(segments: Iterable[Segment], num_frames: int) -> list[str | None]:
    """One label per frame, None where no segment covers the frame."""
    labels: list[str | None] = [None] * num_frames
    for segment in segments:
        labels[segment.start : segment.end] = [segment.label] * (segment.end - segment.start)
    return labels


def instruction_at(instructions: Sequence[InstructionSpan], step: int) -> str:
    """The text of the last span that starts at or before `step`."""
    current = instructions[0].text
    for span in instructions:
        if span.start > step:
            break
        current = span.text
    return current
