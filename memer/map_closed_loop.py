"""Closed loop of a plan-following policy on the tabletop: it gives every action, the world decides.

Every row of the result is one action chunk.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memer.closed_loop import Outcome, outcome_of
from memer.executors.base import ActsTogether, ChunkRequest
from memer.executors.oracles import KnowsWorld
from memer.plan_policy import MapWamPolicy
from memer.plan_records import ChunkLog, SegmentLog
from memer.rollout import EpisodeRollout, episode_seed
from memer.settings import check_count
from memer.tabletop.env import Observation, TabletopEnv

#: Called with the episode's number and the policy once an episode is over, before the policy is reset.
EpisodeHook = Callable[[int, MapWamPolicy], None]


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """One episode to play.

    Attributes:
        index: number of the episode within its split; paired between policies.
        env: not yet reset.
    """

    index: int
    env: TabletopEnv


@dataclass(slots=True)
class _Lane:
    """One running episode.

    Attributes:
        episode: what is played.
        policy: its own stream.
        observation: the newest one that the policy has not seen.
        expert: segment that the expert would be in.
        switches: steps at which the expert would have turned to its next segment.
        outcome: how it ended, None while it runs.
    """

    episode: PlayedEpisode
    policy: MapWamPolicy
    observation: Observation
    expert: tuple[int, str]
    switches: list[int] = field(default_factory=list)
    outcome: Outcome | None = None

    def advance(self) -> ChunkRequest | None:
        """Act until the policy needs another chunk, or the episode is over (None)."""
        while self.outcome is None:
            request = self.policy.observe(self.observation)
            if request is not None:
                return request
            self.act()
        return None

    def act(self) -> None:
        """Execute the next action of the chunk in force."""
        env = self.episode.env
        self.observation, _, terminated, truncated, info = env.step(self.policy.next_action())
        self.policy.instruction = info["instruction"]
        if (now := env.world.expert_segment()) != self.expert:
            self.switches.append(env.world.step_count)
            self.expert = now
        if terminated or truncated:
            self.outcome = outcome_of(env, terminated=terminated)


def rollout_map_wam(
    episodes: Iterable[PlayedEpisode],
    policy: MapWamPolicy,
    *,
    batch_size: int = 16,
    seed: int = 0,
    on_episode: EpisodeHook | None = None,
) -> Iterator[EpisodeRollout]:
    """Play episodes up to their time limit.

    Args:
        episodes: taken one after the other as lanes become free.
        policy: every lane gets a fork of it.
        batch_size: episodes in lockstep: all lanes act until they need a chunk, then the executor answers in
            one call if it can. Each has its own noise, so the episodes do not depend on it but for rounding.
        seed: of the policy's noise, combined with the episode's number.
        on_episode: called after every episode, e.g. to keep pictures.

    Yields:
        Finished episodes; `extra` holds outcome, steps, measures, segments and gate delays.

    Raises:
        UsageError: a batch size below 1.
    """
    check_count("batch_size", batch_size, least=1)
    waiting, free = iter(episodes), [policy.fork() for _ in range(batch_size)]
    lanes: list[_Lane] = []
    while True:
        while free and (episode := next(waiting, None)) is not None:
            lanes.append(_open_lane(episode, free.pop(), seed=seed))
        if not lanes:
            return
        requests = [(lane, request) for lane in lanes if (request := lane.advance()) is not None]
        _answer(requests)
        for lane, _ in requests:
            lane.act()
        for lane in lanes:
            if lane.outcome is not None:
                if on_episode is not None:
                    on_episode(lane.episode.index, lane.policy)
                yield _finish(lane)
                free.append(lane.policy)
        lanes = [lane for lane in lanes if lane.outcome is None]


def _open_lane(episode: PlayedEpisode, policy: MapWamPolicy, *, seed: int) -> _Lane:
    env = episode.env
    observation, info = env.reset(seed=episode.index)
    parts: tuple[object, ...] = (policy.language, policy.visual, policy.executor)
    for part in parts:
        if isinstance(part, KnowsWorld):
            part.bind_world(env.world)
    policy.reset(info["instruction"], seed=episode_seed(seed, episode.index))
    return _Lane(episode, policy, observation, env.world.expert_segment())


def _answer(requests: Sequence[tuple[_Lane, ChunkRequest]]) -> None:
    """Give every lane its chunk; the time of a shared call counts for each of them."""
    together: object = requests[0][0].policy.executor if requests else None
    started = time.perf_counter()
    if isinstance(together, ActsTogether):
        chunks = together.act_many([lane.policy.executor for lane, _ in requests], [r for _, r in requests])
        act_ms = 1e3 * (time.perf_counter() - started)
        for (lane, _), chunk in zip(requests, chunks, strict=True):
            lane.policy.take(chunk, act_ms=act_ms)
        return
    for lane, request in requests:
        started = time.perf_counter()
        chunk = lane.policy.executor.act(request.canvas, request.state, request.progress)
        lane.policy.take(chunk, act_ms=1e3 * (time.perf_counter() - started))


def _finish(lane: _Lane) -> EpisodeRollout:
    policy, env = lane.policy, lane.episode.env
    rollout = EpisodeRollout(
        episode_index=lane.episode.index,
        rows=[_row(lane.episode.index, chunk, policy.segments) for chunk in policy.chunks],
        representatives=[],
        extra={
            "outcome": lane.outcome,
            "steps": env.world.step_count,
            "measures": env.measures(),
            "segments": len(policy.segments),
            "replans": len(policy.records),
            "forced": sum(segment.ended_by == "limit" for segment in policy.segments),
            "plan": [_segment(segment) for segment in policy.segments],
            **_gate_delays(policy.segments, lane.switches),
        },
    )
    env.close()
    return rollout


def _row(episode_index: int, chunk: ChunkLog, segments: list[SegmentLog]) -> dict[str, Any]:
    """One line of chunks.jsonl; the first chunk of a segment carries the time of its plans."""
    segment = segments[chunk.segment - 1]
    timings = {"act": chunk.act_ms}
    if chunk.step == segment.start:
        timings |= {
            "language": segment.language_ms,
            "visual": segment.visual_ms,
            "prefill": segment.prefill_ms,
        }
    row = chunk.to_dict()
    del row["act_ms"]
    row["predicted"] = [round(value, 5) for value in chunk.predicted]
    return {
        "episode_index": episode_index,
        "timestep": row.pop("step"),
        **row,
        "latency_ms": sum(timings.values()),
        "timings_ms": timings,
    }


def _segment(segment: SegmentLog) -> dict[str, Any]:
    return {
        "text": segment.text,
        "start": segment.start,
        "end": segment.end,
        "ended_by": segment.ended_by,
        "kept": segment.kept,
    }


def _gate_delays(segments: list[SegmentLog], switches: list[int]) -> dict[str, Any]:
    """Steps between the last frame of the expert's k-th segment and the end of the policy's k-th one.

    Negative: left early. A segment whose end the policy ran over without ending its own is missed.
    """
    ends = [segment.end for segment in segments if segment.end is not None]
    delays = [end - (switch - 1) for end, switch in zip(ends, switches, strict=False)]
    return {
        "gate_delays": delays,
        "gate_delay_mean": float(np.mean(delays)) if delays else None,
        "missed_gates": max(0, len(switches) - len(ends)),
    }
