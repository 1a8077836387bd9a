"""Planners without a model: the floor of every comparison."""

from collections import Counter
from collections.abc import Iterable, Sequence

from memer.episode import Episode
from memer.errors import MemerError
from memer.planners.base import PlannerRequest, PlannerResult


class ConstantPlanner:
    """Names the same subtask at every step and nominates nothing.

    Args:
        subtask: what to say.
        positions: 1-indexed positions to nominate at every step.
    """

    def __init__(self, subtask: str, *, positions: Sequence[int] = ()) -> None:
        self.subtask = subtask
        self._positions = tuple(positions)

    def start_episode(self, session: str, *, instruction: str, seed: int | None = None) -> None:
        """Nothing to prepare."""

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        """The same for all."""
        return [PlannerResult(status="ok", subtask=self.subtask, positions=self._positions) for _ in requests]

    def end_episode(self, session: str) -> None:
        """Nothing to free."""


def majority_planner(episodes: Iterable[Episode]) -> ConstantPlanner:
    """A constant planner with the label that covers most frames; the smallest text wins a tie.

    Raises:
        MemerError: no labelled frame in any episode.
    """
    frames: Counter[str] = Counter()
    for episode in episodes:
        for segment in episode.segments:
            frames[segment.label] += segment.end - segment.start
    if not frames:
        raise MemerError("planner majority: the episodes have no labels")
    most = max(frames.values())
    return ConstantPlanner(min(label for label, count in frames.items() if count == most))
