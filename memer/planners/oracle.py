"""Planners that know the answer: the ceiling of every comparison and the self-test of the metrics."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from memer.contract import Contract
from memer.episode import Episode
from memer.keyframes import KeyframeRules
from memer.planners.base import PlannerRequest, PlannerResult
from memer.windows import align, recent_indices, split_keyframes, target_index


class Expert(Protocol):
    """Names what a scripted expert would do."""

    def __call__(self, *, lookahead: int = 0) -> str:
        """The subtask `lookahead` frames from now."""
        ...


@runtime_checkable
class KnowsEpisode(Protocol):
    """A planner that is told which labelled episode a session replays (offline rollouts call it)."""

    def bind_episode(self, session: str, episode: Episode) -> None:
        """Called before `start_episode`."""
        ...


@runtime_checkable
class KnowsWorld(Protocol):
    """A planner that may ask the environment's expert (closed-loop rollouts call it)."""

    def bind_expert(self, session: str, expert: Expert) -> None:
        """Called before `start_episode`; `expert(lookahead=k)` names the subtask k frames ahead."""
        ...


class OraclePlanner:
    """Answers with the target label and the positions that training would ask for.

    Args:
        contract: windows and horizon.
        rules: keyframes of an episode.
    """

    def __init__(self, contract: Contract, rules: KeyframeRules) -> None:
        self._windows = contract.shown_windows
        self._rules = rules
        self._episodes: dict[str, tuple[list[str | None], list[int]]] = {}

    def bind_episode(self, session: str, episode: Episode) -> None:
        """Tell which episode a session replays."""
        self._episodes[session] = (episode.labels(), self._rules.select_segments(episode.segments))

    def start_episode(self, session: str, *, instruction: str, seed: int | None = None) -> None:
        """Nothing to prepare."""

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        """The truth; without a label at the target, the last label before it (or the first after it)."""
        return [self._answer(request) for request in requests]

    def end_episode(self, session: str) -> None:
        """Forget the session's episode."""
        self._episodes.pop(session, None)

    def _answer(self, request: PlannerRequest) -> PlannerResult:
        labels, keyframes = self._episodes[request.session]
        target = target_index(request.step, len(labels), settings=self._windows)
        before = (label for label in reversed(labels[: target + 1]) if label is not None)
        after = (label for label in labels[target:] if label is not None)
        subtask = next(before, None) or next(after, None)
        if subtask is None:
            return PlannerResult(status="parse_error", error="the episode has no labels")
        _, positions = split_keyframes(
            keyframes,
            request.step,
            subsample=self._windows.frame_subsample,
            length=self._windows.recent_frames_length,
            memory_length=self._windows.keyframes_length,
        )
        return PlannerResult(status="ok", subtask=subtask, positions=tuple(positions))


class ExpertPlanner:
    """Closed-loop oracle: names the expert's subtask ahead and nominates keyframes by the rules.

    Whether a frame is the last of its segment is known once the segment has ended; it is nominated from then
    on while it lies in the window.

    Args:
        contract: windows and horizon.
        rules: keyframes; None nominates nothing.
        lookahead: frames that the named subtask lies ahead; None: the contract's horizon, as in training.
    """

    def __init__(
        self, contract: Contract, rules: KeyframeRules | None = None, *, lookahead: int | None = None
    ) -> None:
        self._windows = contract.shown_windows
        self._rules = rules
        self._lookahead = self._windows.horizon_frames if lookahead is None else lookahead
        self._experts: dict[str, Expert] = {}
        self._heard: dict[str, list[str | None]] = {}

    def bind_expert(self, session: str, expert: Expert) -> None:
        """Tell whom to ask for a session."""
        self._experts[session] = expert

    def start_episode(self, session: str, *, instruction: str, seed: int | None = None) -> None:
        """Forget what was heard."""
        self._heard[session] = []

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        """What the expert would do now."""
        return [self._answer(request) for request in requests]

    def end_episode(self, session: str) -> None:
        """Forget the session."""
        self._experts.pop(session, None)
        self._heard.pop(session, None)

    def _answer(self, request: PlannerRequest) -> PlannerResult:
        expert = self._experts[request.session]
        subtask, running = expert(lookahead=self._lookahead), expert(lookahead=0)
        heard = self._heard[request.session]
        # Between two questions the running subtask goes on.
        heard.extend([heard[-1] if heard else running] * (request.step - len(heard)))
        heard[request.step :] = [running]
        positions: tuple[int, ...] = ()
        if self._rules is not None:
            context = recent_indices(
                request.step,
                subsample=self._windows.frame_subsample,
                length=self._windows.recent_frames_length,
            )
            ended = [k for k in self._rules.select(heard) if context[0] <= k < request.step]
            cells = {align(k, anchor=context[0], subsample=self._windows.frame_subsample) for k in ended}
            positions = tuple(1 + context.index(cell) for cell in sorted(cells))
        return PlannerResult(status="ok", subtask=subtask, positions=positions)
