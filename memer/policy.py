"""The policy that a robot calls: one session and one planner."""

from collections.abc import Iterable
from typing import Any

from memer.contract import Contract
from memer.errors import UsageError
from memer.observations import Observation
from memer.planners.base import Planner
from memer.session import MemorySource, PlannerSession, StepRecord, plan_step

__all__ = ["PlannerSession", "Policy", "StepRecord", "plan_step"]


class Policy:
    """A planner that remembers: observe frames, ask for the subtask to execute now.

    Every observed frame enters the store; the caller feeds frames at the contract's rate
    (`memer.observations.resample` helps other cameras). The store is bounded: the window's reach, the frames
    of open votes, the last M memories.

    Args:
        planner: answers the questions.
        contract: what planner and observations agree on.
        instruction: text in force; may be given later.
        seed: passed to the planner at every reset.
        memory_source: see PlannerSession.
        retries: repeated calls after an answer that could not be parsed.
        name: names this stream of frames to the planner; policies that share a planner need different names.
    """

    def __init__(
        self,
        planner: Planner,
        contract: Contract,
        instruction: str | None = None,
        *,
        seed: int | None = None,
        memory_source: MemorySource = "predicted",
        retries: int = 0,
        name: str = "policy",
    ) -> None:
        if memory_source == "gt":
            raise UsageError("memory_source: 'gt' needs a labelled episode; use eval=offline")
        self.planner = planner
        self.contract = contract
        self.retries = retries
        self._seed = seed
        self._epoch = 0
        self.session = PlannerSession(
            contract,
            name=name,
            source=name,
            instruction=instruction,
            memory_source=memory_source,
            seed=seed or 0,
        )
        self._started = False

    def reset(self, instruction: str | None = None, seed: int | None = None) -> None:
        """Start a new episode; nothing of the last one remains. None keeps the instruction, and the seed."""
        if self._started:
            self.planner.end_episode(self.session.name)
        self._seed = self._seed if seed is None else seed
        self._epoch += 1
        self.session.reset(
            episode=self._epoch,
            instruction=self.session.instruction if instruction is None else instruction,
            seed=self._seed or 0,
        )
        self._started = False

    def observe(self, obs: Observation, step: int | None = None, *, prepared: bool = False) -> int:
        """Record a frame without running the planner; returns its number (see PlannerSession.observe)."""
        return self.session.observe(obs, step=step, prepared=prepared)

    def infer(self) -> StepRecord:
        """Ask the planner once, at the newest frame.

        Raises:
            MemerError: no frame or no instruction yet.
        """
        if not self._started:
            self.planner.start_episode(
                self.session.name, instruction=self.session.instruction or "", seed=self._seed
            )
            self._started = True
        return plan_step(self.planner, [self.session], retries=self.retries)[0]

    def step(self, *obs: Observation, instruction: str | None = None, prepared: bool = False) -> StepRecord:
        """Observe all, infer once at the last; an instruction holds from now on."""
        if instruction is not None:
            self.session.instruction = instruction
        for one in obs:
            self.observe(one, prepared=prepared)
        return self.infer()

    def predict_from_history(
        self, obs: Iterable[Observation], reset: bool = True, *, prepared: bool = False
    ) -> list[StepRecord]:
        """Infer at every observation, in order; `reset` starts a new episode first."""
        if reset:
            self.reset()
        return [self.step(one, prepared=prepared) for one in obs]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue the episode in another process."""
        return {"session": self.session.state_dict(), "seed": self._seed, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the episode that `state_dict` was taken from; the planner's caches are built anew."""
        if self._started:
            self.planner.end_episode(self.session.name)
            self._started = False
        self.session.load_state_dict(state["session"])
        self._seed, self._epoch = state["seed"], state["epoch"]
