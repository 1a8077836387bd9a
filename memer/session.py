"""One episode of a planner: the frames it may still need, its votes and memory, its accepted answers.

Rollout and policy share this object, so a robot and an evaluation cannot disagree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.memory import EpisodicMemory, freeze_bound, map_positions
from memer.observations import Observation, stacked_observation
from memer.planners.base import Planner, PlannerRequest, PlannerResult
from memer.windows import build_question, recent_indices, split_keyframes, subtask_history

MemorySource = Literal["predicted", "gt", "none", "shuffled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one inference did.

    Attributes:
        timestep: raw frame t the planner was asked at.
        instruction: text in force.
        current_subtask: what to execute now; the last good one after a failure, None before the first.
        predicted_subtask: this step's own answer, None when it failed.
        status: the planner's status.
        parse_ok: whether the answer counts.
        parse_error: one line, None when ok.
        predicted_keyframe_positions: 1-indexed, as answered.
        mapped_keyframe_indices: raw frames voted for by this answer.
        invalid_keyframe_positions: answered positions outside the window.
        context_indices: the window.
        memory_indices_before: memory images shown.
        memory_indices_after: memory visible to the same window after the votes.
        all_candidate_indices: open votes after this step, ascending, repeated as often as cast.
        raw_text: the model's text.
        stale: whether this attempt failed.
        stale_steps: age_steps while stale, else 0.
        age_steps: raw frames since the observation behind the last accepted answer; since frame 0 without
            one.
        age_s: the same in seconds of the contract's clock.
        prompt_version: number of accepted subtasks that differed from their predecessor.
        num_votes: votes of the episode so far.
        latency_ms: of the planner's call.
        timings_ms: its parts.
        contract_version: version of the contract's form.
    """

    timestep: int
    instruction: str
    current_subtask: str | None
    predicted_subtask: str | None
    status: str
    parse_ok: bool
    parse_error: str | None
    predicted_keyframe_positions: tuple[int, ...]
    mapped_keyframe_indices: tuple[int, ...]
    invalid_keyframe_positions: tuple[int, ...]
    context_indices: tuple[int, ...]
    memory_indices_before: tuple[int, ...]
    memory_indices_after: tuple[int, ...]
    all_candidate_indices: tuple[int, ...] = field(repr=False)
    raw_text: str
    stale: bool
    stale_steps: int
    age_steps: int
    age_s: float
    prompt_version: int
    num_votes: int
    latency_ms: float
    timings_ms: dict[str, float]
    contract_version: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the names above; tuples become lists."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


class PlannerSession:
    """State machine of one episode.

    Observe every frame (or every frame a window will ask for), then alternate `request` and `apply`.

    Args:
        contract: windows, memory form, camera layout, clock.
        name: names the stream of frames to the planner.
        source: first part of the frame keys.
        episode: second part of the frame keys.
        instruction: text in force; may be set later, before the first request.
        memory_source: what the memory images are. `predicted`: the planner's own votes. `gt`: what training
            would show. `none`: nothing. `shuffled`: as many as `predicted`, but drawn at random from what
            left the window.
        keyframes: raw frames for `gt`.
        seed: for `shuffled`.

    Raises:
        UsageError: unknown memory source.
    """

    def __init__(
        self,
        contract: Contract,
        *,
        name: str = "policy",
        source: str = "policy",
        episode: int = 0,
        instruction: str | None = None,
        memory_source: MemorySource = "predicted",
        keyframes: Iterable[int] = (),
        seed: int = 0,
    ) -> None:
        if memory_source not in get_args(MemorySource):
            raise UsageError(
                f"memory_source: {memory_source!r}, must be one of {', '.join(get_args(MemorySource))}"
            )
        self.contract = contract
        self.name = name
        self.memory_source = memory_source
        self._windows = contract.shown_windows
        self._source = source
        self._keyframes = tuple(sorted(set(keyframes)))
        self.memory = EpisodicMemory.for_contract(contract)
        self.reset(episode=episode, instruction=instruction, seed=seed)

    def reset(self, *, episode: int, instruction: str | None = None, seed: int = 0) -> None:
        """Forget everything; the next observation is frame 0."""
        self.episode = episode
        self.instruction = instruction
        self.newest = -1
        self.subtask: str | None = None
        self.memory.reset()
        self._frames: dict[int, NDArray[np.uint8]] = {}
        self._requests = 0
        self._pending: tuple[int, tuple[int, ...], str] | None = None
        self._accepted_step: int | None = None
        self._prompt_version = 0
        self._history: tuple[str, ...] = ()
        self._pool: list[int] = []  # reservoir of frames that left the window, for `shuffled`
        self._pool_seen = 0
        self._random = np.random.default_rng([seed, 0x6D656D])

    @property
    def stored_frames(self) -> list[int]:
        """Raw frames whose images are kept, ascending."""
        return sorted(self._frames)

    def frame(self, step: int) -> NDArray[np.uint8] | None:
        """The kept picture of a raw frame, None where it is not kept (any more)."""
        return self._frames.get(step)

    def observe(self, observation: Observation, *, step: int | None = None, prepared: bool = False) -> int:
        """Record a frame; no model runs.

        Args:
            observation: views by camera key, or one array, picture or encoded image (see
                `memer.observations`).
            step: raw frame number; None: the next one. Frames that no window will ask for may be left out.
            prepared: the observation is a stacked uint8[H, W, 3] frame in the contract's layout already.

        Returns:
            The raw frame number.

        Raises:
            MemerError: `step` does not grow, or the observation does not fit the layout.
        """
        if step is None:
            step = self.newest + 1
        if step <= self.newest:
            raise MemerError(
                f"session {self.name}: observation {step} after {self.newest}; steps must grow, "
                "reset() starts over"
            )
        self._frames[step] = stacked_observation(observation, self.contract.cameras, prepared=prepared)
        self.newest = step
        self._prune()
        return step

    def request(self) -> PlannerRequest:
        """The question at the newest frame.

        Raises:
            MemerError: nothing observed, no instruction, or a frame of the window was never observed.
        """
        if self.newest < 0:
            raise MemerError(f"session {self.name}: no frame observed; call observe() before infer()")
        if self.instruction is None:
            raise MemerError(f"session {self.name}: no instruction; give one to reset(instruction=...)")
        t = self.newest
        context = self._context(t)
        memory = self._shown_memory(context)
        question = build_question(
            t,
            contract=self.contract,
            memory_indices=memory,
            frame=self._frame,
            source=self._source,
            episode_index=self.episode,
            instruction=self.instruction,
            history=subtask_history(self._history, running=self.subtask, length=self.contract.history_length),
        )
        self._requests += 1
        self._pending = (t, tuple(memory), self.instruction)
        return PlannerRequest(
            session=self.name,
            request_id=self._requests,
            step=t,
            question=question,
            current_subtask=self.subtask,
        )

    def apply(self, result: PlannerResult) -> StepRecord:
        """Take the answer to the last request; a failed one leaves memory and subtask as they are.

        Raises:
            MemerError: no request is waiting for an answer.
        """
        if self._pending is None:
            raise MemerError(f"session {self.name}: apply() without a request()")
        t, shown, instruction = self._pending
        self._pending = None
        context = self._context(t)
        votes: list[int] = []
        invalid: list[int] = []
        accepted = result.status == "ok" and result.subtask is not None
        if accepted:
            strict = self.contract.memory_mode == "strict"
            votes, invalid = map_positions(result.positions, context, unique_votes=strict)
            self.memory.add(votes, t=t)
            self._accept(result.subtask, t)
        self._draw_from(context)
        after = self._shown_memory(context)
        self.memory.freeze(
            freeze_bound(
                t, subsample=self._windows.frame_subsample, length=self._windows.recent_frames_length
            )
        )
        self._prune()
        age = self.newest - (self._accepted_step or 0)
        return StepRecord(
            timestep=t,
            instruction=instruction,
            current_subtask=self.subtask,
            predicted_subtask=result.subtask if accepted else None,
            status=result.status,
            parse_ok=accepted,
            parse_error=None if accepted else (result.error or result.status),
            predicted_keyframe_positions=tuple(result.positions) if accepted else (),
            mapped_keyframe_indices=tuple(votes),
            invalid_keyframe_positions=tuple(invalid),
            context_indices=tuple(context),
            memory_indices_before=shown,
            memory_indices_after=tuple(after),
            all_candidate_indices=tuple(self.memory.open_votes()),
            raw_text=result.raw_text,
            stale=not accepted,
            stale_steps=0 if accepted else age,
            age_steps=age,
            age_s=age / self.contract.fps,
            prompt_version=self._prompt_version,
            num_votes=self.memory.num_votes,
            latency_ms=result.latency_ms,
            timings_ms=dict(result.timings_ms),
            contract_version=self.contract.version,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after a restart; arrays and plain values."""
        return {
            "contract": self.contract.to_dict(),
            "name": self.name,
            "episode": self.episode,
            "instruction": self.instruction,
            "newest": self.newest,
            "subtask": self.subtask,
            "memory": self.memory.state_dict(),
            "frames": {step: frame.copy() for step, frame in self._frames.items()},
            "requests": self._requests,
            "accepted_step": self._accepted_step,
            "prompt_version": self._prompt_version,
            "history": list(self._history),
            "pool": list(self._pool),
            "pool_seen": self._pool_seen,
            "random": self._random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; an unanswered request is forgotten.

        Raises:
            MemerError: the state belongs to another contract.
        """
        theirs = Contract.from_dict(state["contract"], where="session state")
        self.contract.check_same(theirs, what="session and its saved state")
        self.reset(episode=state["episode"], instruction=state["instruction"])
        self.name = state["name"]
        self.newest = state["newest"]
        self.subtask = state["subtask"]
        self.memory.load_state_dict(state["memory"])
        self._frames = {int(step): frame.copy() for step, frame in state["frames"].items()}
        self._requests = state["requests"]
        self._accepted_step = state["accepted_step"]
        self._prompt_version = state["prompt_version"]
        self._history = tuple(state["history"])
        self._pool = list(state["pool"])
        self._pool_seen = state["pool_seen"]
        self._random.bit_generator.state = state["random"]

    def _context(self, t: int) -> list[int]:
        return recent_indices(
            t, subsample=self._windows.frame_subsample, length=self._windows.recent_frames_length
        )

    def _frame(self, step: int) -> NDArray[np.uint8]:
        if step not in self._frames:
            raise MemerError(
                f"session {self.name}: frame {step} is needed at {self.newest} but was not observed; "
                f"feed every frame at {self.contract.fps:g} fps"
            )
        return self._frames[step]

    def _shown_memory(self, context: Sequence[int]) -> list[int]:
        if self.memory_source == "none" or self._windows.keyframes_length == 0:
            return []
        if self.memory_source == "gt":
            memory, _ = split_keyframes(
                self._keyframes,
                context[-1],
                subsample=self._windows.frame_subsample,
                length=self._windows.recent_frames_length,
                memory_length=self._windows.keyframes_length,
            )
            return memory
        visible = self.memory.visible(context)
        if self.memory_source == "shuffled":
            outside = [step for step in self._pool if step < context[0]]
            return sorted(outside[: len(visible)])
        return visible

    def _accept(self, subtask: str | None, t: int) -> None:
        if subtask != self.subtask:
            self._prompt_version += 1
        self.subtask = subtask
        self._accepted_step = t
        if subtask is not None and (not self._history or self._history[-1] != subtask):
            # One more than is shown: the running subtask is the last entry and is left out of the question.
            self._history = (self._history + (subtask,))[-(self.contract.history_length + 1) :]

    def _draw_from(self, context: Sequence[int]) -> None:
        """Offer the window's oldest frame to a reservoir of M uniform draws (Vitter's algorithm R)."""
        if self.memory_source != "shuffled" or context[0] in self._pool:
            return
        self._pool_seen += 1
        if len(self._pool) < self._windows.keyframes_length:
            self._pool.append(context[0])
            return
        slot = int(self._random.integers(self._pool_seen))
        if slot < len(self._pool):
            self._pool[slot] = context[0]

    def _prune(self) -> None:
        """Keep the newest window's reach, what memory can still show, and nothing else."""
        # An unanswered request may still vote for its own window.
        base = self.newest if self._pending is None else self._pending[0]
        oldest = base - self._windows.span_frames
        needed: set[int] = set()
        if self._windows.keyframes_length:
            if self.memory_source == "predicted":
                needed.update(self.memory.needed_frames())
            elif self.memory_source == "shuffled":
                needed.update(self._pool)
            elif self.memory_source == "gt":
                s = self._windows.frame_subsample
                needed.update(step for k in self._keyframes for step in range(k - s + 1, k + 1))
        for step in [step for step in self._frames if step < oldest and step not in needed]:
            del self._frames[step]


def plan_step(planner: Planner, sessions: Sequence[PlannerSession], *, retries: int = 0) -> list[StepRecord]:
    """One lockstep round: ask every session's question in one call, apply every answer.

    Args:
        planner: answers all requests together.
        sessions: of different names.
        retries: repeated calls for the sessions whose answer could not be parsed.
    """
    requests = [session.request() for session in sessions]
    results = list(planner.plan(requests))
    if len(results) != len(requests):
        raise RuntimeError(f"planner gave {len(results)} results for {len(requests)} requests")
    for _ in range(retries):
        failed = [i for i, result in enumerate(results) if result.status == "parse_error"]
        if not failed:
            break
        for i, result in zip(failed, planner.plan([requests[i] for i in failed]), strict=True):
            results[i] = result
    return [session.apply(result) for session, result in zip(sessions, results, strict=True)]
