"""Another planner with one thing taken away, so that a comparison changes nothing else."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memer.episode import Episode
from memer.planners.base import Planner, PlannerRequest, PlannerResult
from memer.planners.oracle import Expert, KnowsEpisode, KnowsWorld


class Wrapper:
    """Passes everything through to the planner it wraps."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def bind_episode(self, session: str, episode: Episode) -> None:
        """Passed on where the inner planner wants it."""
        if isinstance(self.planner, KnowsEpisode):
            self.planner.bind_episode(session, episode)

    def bind_expert(self, session: str, expert: Expert) -> None:
        """Passed on where the inner planner wants it."""
        if isinstance(self.planner, KnowsWorld):
            self.planner.bind_expert(session, expert)

    def start_episode(self, session: str, *, instruction: str, seed: int | None = None) -> None:
        """Passed on."""
        self.planner.start_episode(session, instruction=instruction, seed=seed)

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        """Passed on."""
        return self.planner.plan(requests)

    def end_episode(self, session: str) -> None:
        """Passed on."""
        self.planner.end_episode(session)


class NoPositions(Wrapper):
    """Takes the nominations away: the subtask stays, memory stays empty."""

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        """The inner planner's answers without positions."""
        return [replace(result, positions=()) for result in self.planner.plan(requests)]


class NoMemory(Wrapper):
    """Takes the memory images and the history out of every question: the same weights without memory."""

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        """Answers to the questions without memory."""
        return self.planner.plan([self._forget(request) for request in requests])

    @staticmethod
    def _forget(request: PlannerRequest) -> PlannerRequest:
        question = request.question
        return replace(
            request,
            question=replace(
                question,
                memory_keys=(),
                frames={key: question.frames[key] for key in question.recent_keys},
                history=(),
            ),
        )


class NoisyPlanner(Wrapper):
    """Another planner's answers with seeded faults.

    Every fault is drawn from (seed, start_episode's seed, step), so neither batch nor order matters.

    Args:
        planner: gives the answers, usually an oracle.
        labels: replacements for a wrong label.
        wrong_label: share of answers whose label is replaced by another one.
        missed_position: share of positions that are dropped.
        false_position: share of answers with one additional random position.
        parse_failure: share of answers that cannot be parsed.
        seed: of the faults.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        labels: Sequence[str] = (),
        wrong_label: float = 0.1,
        missed_position: float = 0.1,
        false_position: float = 0.05,
        parse_failure: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(planner)
        self._labels = sorted(set(labels))
        self._wrong_label = wrong_label
        self._missed = missed_position
        self._false = false_position
        self._parse_failure = parse_failure
        self._seed = seed
        self._episode_seeds: dict[str, int] = {}

    def start_episode(self, session: str, *, instruction: str, seed: int | None = None) -> None:
        """Remember the episode's seed."""
        self._episode_seeds[session] = seed or 0
        super().start_episode(session, instruction=instruction, seed=seed)

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        """The inner planner's answers, some of them spoiled."""
        results = self.planner.plan(requests)
        return [self._spoil(request, result) for request, result in zip(requests, results, strict=True)]

    def end_episode(self, session: str) -> None:
        """Forget the session."""
        self._episode_seeds.pop(session, None)
        super().end_episode(session)

    def _spoil(self, request: PlannerRequest, result: PlannerResult) -> PlannerResult:
        draw = np.random.default_rng([self._seed, self._episode_seeds[request.session], request.step])
        chance = draw.random(3)
        if result.status != "ok":
            return result
        if chance[0] < self._parse_failure:
            return PlannerResult(status="parse_error", error="seeded fault", latency_ms=result.latency_ms)
        subtask = result.subtask
        others = [label for label in self._labels if label != subtask]
        if others and chance[1] < self._wrong_label:
            subtask = others[int(draw.integers(len(others)))]
        kept = {p for p in result.positions if draw.random() >= self._missed}
        if chance[2] < self._false:
            kept.add(1 + int(draw.integers(len(request.question.recent_keys))))
        return replace(result, subtask=subtask, positions=tuple(sorted(kept)))
