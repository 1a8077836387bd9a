"""Labelled frame ranges as people and tools write them, made into segments by a stated policy.

Policy: ranges are half-open; empty ranges are dropped, parts outside the episode are cut off, a one-frame
range is kept; a frame in two ranges belongs to the one that starts later (`overlap="later"`) or earlier
(`"earlier"`), or is an error (`"error"`); a frame in no range stays unlabelled. The order in which ranges are
given does not matter, and neighbouring ranges with equal text stay two segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memer.episode import Segment, segments_from_labels
from memer.errors import MemerError

OverlapPolicy = Literal["later", "earlier", "error"]


@dataclass(frozen=True, slots=True)
class Span:
    """A labelled range as given: frames start <= k < end; nothing is checked yet."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSpans:
    """Segments, and what the policy had to settle.

    Attributes:
        segments: in order, without overlap.
        empty: ranges without a frame (dropped).
        clipped: ranges that left the episode (cut off).
        one_frame: segments of one frame (kept).
        gap_frames: frames in no range.
        overlap_frames: frames in more than one range.
    """

    segments: tuple[Segment, ...]
    empty: int
    clipped: int
    one_frame: int
    gap_frames: tuple[int, ...]
    overlap_frames: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Counts and frame lists as plain JSON values."""
        return {
            "segments": len(self.segments),
            "empty": self.empty,
            "clipped": self.clipped,
            "one_frame": self.one_frame,
            "gap_frames": list(self.gap_frames),
            "overlap_frames": list(self.overlap_frames),
        }


def resolve_spans(
    spans: Sequence[Span], *, num_frames: int, overlap: OverlapPolicy = "later", where: str = "spans"
) -> ResolvedSpans:
    """Make every frame carry exactly one label or none.

    Args:
        spans: ranges in any order.
        num_frames: length of the episode.
        overlap: who owns a frame in two ranges; see the module's policy.
        where: names the source in messages.

    Raises:
        MemerError: two ranges overlap and `overlap` is `error`.

    >>> resolve_spans([Span(0, 3, "a"), Span(2, 4, "b")], num_frames=5).segments
    (Segment(start=0, end=2, label='a'), Segment(start=2, end=4, label='b'))
    """
    if overlap not in ("later", "earlier", "error"):
        raise ValueError(f"overlap={overlap!r}, must be later, earlier or error")
    ordered = sorted(spans, key=lambda span: (span.start, span.end))
    owners = [-1] * num_frames
    doubled: set[int] = set()
    empty = clipped = 0
    for number, span in enumerate(ordered):
        start, end = max(0, span.start), min(num_frames, span.end)
        if span.end <= span.start:
            empty += 1
            continue
        clipped += (start, end) != (span.start, span.end)
        for k in range(start, end):
            if owners[k] >= 0:
                doubled.add(k)
                if overlap == "error":
                    other = ordered[owners[k]]
                    raise MemerError(
                        f"{where}: frame {k} lies in [{other.start}, {other.end}) {other.label!r} and in "
                        f"[{span.start}, {span.end}) {span.label!r}; correct them or allow overlap=later"
                    )
                if overlap == "earlier":
                    continue
            owners[k] = number
    labels = [ordered[owner].label if owner >= 0 else None for owner in owners]
    segments = segments_from_labels(labels, owners)
    return ResolvedSpans(
        segments=segments,
        empty=empty,
        clipped=clipped,
        one_frame=sum(segment.end - segment.start == 1 for segment in segments),
        gap_frames=tuple(k for k, owner in enumerate(owners) if owner < 0),
        overlap_frames=tuple(sorted(doubled)),
    )
