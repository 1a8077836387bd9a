"""What a plan-following policy remembers of its segments, and notes about segments and chunks."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from memer.executors.base import Pixels

SegmentEnd = Literal["gate", "classified", "limit"]


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """The record of a finished segment: what planners see of it later.

    Attributes:
        text: language plan.
        frames: uint8[8, H, W, 3], real canvases by `bucket_last_indices`.
        head: uint8[h, w, 3], head view at the end.
    """

    text: str
    frames: Pixels
    head: Pixels


@dataclass(slots=True)
class SegmentLog:
    """What one segment was planned and how it went.

    Attributes:
        index: 1 for the first segment.
        text: language plan.
        start: control step of its first observation.
        plan: uint8[8, H, W, 3] plan frames, None without a visual plan.
        end: control step of its last observation, None while it runs.
        ended_by: what ended it, None while it runs.
        kept: control steps of the frames that became its record.
        frames: the record's frames, None while it runs.
        language_ms, visual_ms, prefill_ms: time of the language plan, of the visual plan, of caching it.
    """

    index: int
    text: str
    start: int
    plan: Pixels | None
    language_ms: float
    visual_ms: float
    prefill_ms: float
    end: int | None = None
    ended_by: SegmentEnd | None = None
    kept: list[int] = field(default_factory=list)
    frames: Pixels | None = None


@dataclass(slots=True)
class ChunkLog:
    """One action chunk.

    Attributes:
        segment: index of its segment, 1 for the first.
        text: language plan in force.
        step: control step of the observation it was predicted from.
        progress_before: progress carried over from the executed actions.
        progress: the same after alignment with the plan; the executor's condition.
        executed: actions of it that were carried out.
        predicted: their raw predicted progress.
        score: the gate's last mean, or the last probability that the segment is finished; None before either.
        act_ms: time of the prediction.
    """

    segment: int
    text: str
    step: int
    progress_before: float
    progress: float
    act_ms: float
    executed: int = 0
    predicted: list[float] = field(default_factory=list)
    score: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the names above."""
        return asdict(self)
