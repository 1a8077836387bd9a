"""Closed loop on the tabletop: the planner names subtasks, the scripted low level obeys, the world decides.

Episodes run in lockstep: every environment advances by `planner_stride` frames, then one call plans for all.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from memer.contract import Contract
from memer.errors import UsageError
from memer.planners.base import Planner
from memer.planners.oracle import KnowsWorld
from memer.rollout import EpisodeRollout, StepHook, episode_seed, prediction_row
from memer.session import MemorySource, PlannerSession, plan_step
from memer.settings import check_count
from memer.tabletop.controller import SubtaskController
from memer.tabletop.env import TabletopEnv

#: How an episode ended; only the first three count towards success rates.
Outcome = Literal["success", "failure", "timeout", "planner_error"]
COUNTED: tuple[Outcome, ...] = ("success", "failure", "timeout")
#: Infrastructure faults in a row that end an episode; an answer that cannot be parsed is the model's own
#: fault.
INFRASTRUCTURE_FAULTS = ("api_error", "timeout", "budget")
MAX_CONSECUTIVE_FAULTS = 3


@dataclass(frozen=True, slots=True)
class ClosedLoopEpisode:
    """One episode to play.

    Attributes:
        index: number of the episode within its split; paired between planners.
        env: not yet reset.
        controller: obeys subtask texts in this environment's task.
    """

    index: int
    env: TabletopEnv
    controller: SubtaskController


@dataclass(slots=True)
class _Lane:
    episode: ClosedLoopEpisode
    session: PlannerSession
    rows: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    faults: int = 0
    outcome: Outcome | None = None

    def advance(self, frames: int, phases: frozenset[int], stride: int) -> None:
        """Obey the current subtask for `frames` steps; observe the frames that some window will show."""
        env, controller = self.episode.env, self.episode.controller
        for _ in range(frames):
            action = controller.act(env.world, self.session.subtask)
            observation, _, terminated, truncated, info = env.step(action)
            self.step += 1
            self.session.instruction = info["instruction"]
            if terminated or truncated:
                self.outcome = outcome_of(env, terminated=terminated)
                return
            if self.step % stride in phases:
                self.session.observe(observation["images"], step=self.step)


def outcome_of(env: TabletopEnv, *, terminated: bool) -> Outcome:
    """How an episode that is over ended: the world's state decides, not the way it ended."""
    if env.measures()["success"]:
        return "success"
    return "failure" if terminated else "timeout"


def window_phases(contract: Contract, stride: int) -> frozenset[int]:
    """Frame numbers modulo `stride` that windows ending at multiples of `stride` hold.

    With a stride of s only every s-th frame is ever shown, so the others need no preparation.
    """
    windows = contract.shown_windows
    return frozenset(-j * windows.frame_subsample % stride for j in range(windows.recent_frames_length))


def rollout_closed_loop(
    episodes: Iterable[ClosedLoopEpisode],
    planner: Planner,
    contract: Contract,
    *,
    planner_stride: int = 5,
    batch_size: int = 50,
    memory_source: MemorySource = "predicted",
    seed: int = 0,
    retries: int = 0,
    full_trace: bool = False,
    reference: bool = True,
    on_step: StepHook | None = None,
) -> Iterator[EpisodeRollout]:
    """Play episodes with a planner above the scripted low level.

    Args:
        episodes: taken one after the other as lanes become free.
        planner: answers all lanes in one call.
        contract: windows, layout, memory form; its cameras must be the environment's.
        planner_stride: frames between two questions (5 at 15 Hz: three questions per second).
        batch_size: episodes in lockstep.
        memory_source: see PlannerSession; `gt` does not exist here.
        seed: of planner and shuffled memory, combined with the episode's number.
        retries: repeated calls after an answer that could not be parsed.
        full_trace: add the open votes to every row.
        reference: note what the expert would name at the target step; null otherwise.
        on_step: called after every step with episode number, session and record.

    Yields:
        Finished episodes; `extra` holds outcome, success, steps and the task's measures.

    Raises:
        UsageError: a number below 1, or `memory_source=gt`.
    """
    check_count("planner_stride", planner_stride, least=1)
    check_count("batch_size", batch_size, least=1)
    if memory_source == "gt":
        raise UsageError("memory_source: 'gt' needs labelled episodes; use eval=offline")
    phases = window_phases(contract, planner_stride)
    horizon = contract.windows.horizon_frames

    def open_lane(episode: ClosedLoopEpisode) -> _Lane:
        observation, info = episode.env.reset(seed=episode.index)
        session = PlannerSession(
            contract,
            name=f"{episode.env.task}/{episode.env.split}/{episode.index}",
            source=f"{episode.env.task}/{episode.env.split}",
            episode=episode.index,
            instruction=info["instruction"],
            memory_source=memory_source,
            seed=episode_seed(seed, episode.index),
        )
        if isinstance(planner, KnowsWorld):
            planner.bind_expert(session.name, episode.env.expert_subtask)
        planner.start_episode(
            session.name, instruction=info["instruction"], seed=episode_seed(seed, episode.index)
        )
        session.observe(observation["images"], step=0)
        return _Lane(episode, session)

    waiting = iter(episodes)
    lanes: list[_Lane] = []
    while True:
        lanes.extend(open_lane(episode) for episode in itertools.islice(waiting, batch_size - len(lanes)))
        if not lanes:
            return
        targets = [
            lane.episode.env.expert_subtask(lookahead=horizon) if reference else None for lane in lanes
        ]
        records = plan_step(planner, [lane.session for lane in lanes], retries=retries)
        for lane, record, target in zip(lanes, records, targets, strict=True):
            lane.rows.append(
                prediction_row(
                    record,
                    episode_index=lane.episode.index,
                    target_step=record.timestep + horizon,
                    target=target,
                    target_positions=None,
                    full_trace=full_trace,
                )
            )
            if on_step is not None:
                on_step(lane.episode.index, lane.session, record)
            lane.faults = lane.faults + 1 if record.status in INFRASTRUCTURE_FAULTS else 0
            if lane.faults >= MAX_CONSECUTIVE_FAULTS:
                lane.outcome = "planner_error"
            else:
                lane.advance(planner_stride, phases, planner_stride)
        for lane in lanes:
            if lane.outcome is not None:
                yield _finish(lane, planner)
        lanes = [lane for lane in lanes if lane.outcome is None]


def _finish(lane: _Lane, planner: Planner) -> EpisodeRollout:
    planner.end_episode(lane.session.name)
    measures = lane.episode.env.measures()
    lane.episode.env.close()
    return EpisodeRollout(
        episode_index=lane.episode.index,
        rows=lane.rows,
        representatives=lane.session.memory.representatives(),
        extra={
            "outcome": lane.outcome,
            "steps": lane.step,
            "parse_failures": sum(not row["parse_ok"] for row in lane.rows),
            "measures": measures,
        },
    )
