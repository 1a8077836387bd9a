"""The planner protocol: requests in, results out, never an exception for a model's fault."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from memer.sample import PlannerQuestion

PlannerStatus = Literal["ok", "parse_error", "api_error", "timeout", "budget", "stuck", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRequest:
    """One question to a planner.

    Attributes:
        session: names the stream of frames; features may be cached per session.
        request_id: strictly increasing within a session.
        step: id of the newest observation, first frame of the episode = 0.
        question: instruction, memory images, recent window.
        current_subtask: last accepted subtask, None before the first.
    """

    session: str
    request_id: int
    step: int
    question: PlannerQuestion
    current_subtask: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """What a planner answered.

    Attributes:
        status: `ok` or the kind of fault; anything else than `ok` leaves memory untouched.
        subtask: the named subtask; None unless ok.
        positions: 1-indexed positions in the recent window, as answered (range unchecked).
        raw_text: the model's text, empty for planners without one.
        error: one line, None when ok.
        latency_ms: time of this request, divided by nothing: the whole batch's time for a batched call.
        timings_ms: parts of the latency, e.g. preprocess and generate.
    """

    status: PlannerStatus
    subtask: str | None = None
    positions: tuple[int, ...] = ()
    raw_text: str = ""
    error: str | None = None
    latency_ms: float = 0.0
    timings_ms: dict[str, float] = field(default_factory=dict)


class Planner(Protocol):
    """Names the next subtask and nominates keyframes."""

    def start_episode(self, session: str, *, instruction: str, seed: int | None = None) -> None:
        """Forget everything about `session`; called before its first request."""
        ...

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        """Answer requests of different sessions in lockstep; same results as one by one."""
        ...

    def end_episode(self, session: str) -> None:
        """Free what is kept for `session`."""
        ...
