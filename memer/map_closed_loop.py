"""Closed loop of a plan-following policy on the tabletop: it gives every action, the world decides.

Episodes are played one after the other; every row of the result is one action chunk.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from memer.closed_loop import Outcome
from memer.executors.oracles import KnowsWorld
from memer.plan_policy import ChunkLog, MapWamPolicy, SegmentLog
from memer.rollout import EpisodeRollout, episode_seed
from memer.tabletop.env import TabletopEnv

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


def rollout_map_wam(
    episodes: Iterable[PlayedEpisode],
    policy: MapWamPolicy,
    *,
    seed: int = 0,
    on_episode: EpisodeHook | None = None,
) -> Iterator[EpisodeRollout]:
    """Play episodes up to their time limit.

    Args:
        episodes: taken one after the other.
        policy: reset before every episode.
        seed: of the policy's noise, combined with the episode's number.
        on_episode: called after every episode, e.g. to keep pictures.

    Yields:
        Finished episodes; `extra` holds outcome, steps, measures, segments and gate delays.
    """
    for episode in episodes:
        env = episode.env
        observation, info = env.reset(seed=episode.index)
        parts: tuple[object, ...] = (policy.language, policy.visual, policy.executor)
        for part in parts:
            if isinstance(part, KnowsWorld):
                part.bind_world(env.world)
        policy.reset(info["instruction"], seed=episode_seed(seed, episode.index))
        switches: list[int] = []  # steps at which the expert would have turned to its next segment
        expert = env.world.expert_segment()
        outcome: Outcome | None = None
        while outcome is None:
            observation, _, terminated, truncated, info = env.step(policy.step(observation))
            policy.instruction = info["instruction"]
            if (now := env.world.expert_segment()) != expert:
                switches.append(env.world.step_count)
                expert = now
            if terminated or truncated:
                success = bool(env.measures()["success"])
                outcome = "success" if success else ("failure" if terminated else "timeout")
        if on_episode is not None:
            on_episode(episode.index, policy)
        yield EpisodeRollout(
            episode_index=episode.index,
            rows=[_row(episode.index, chunk, policy.segments) for chunk in policy.chunks],
            representatives=[],
            extra={
                "outcome": outcome,
                "steps": env.world.step_count,
                "measures": env.measures(),
                "segments": len(policy.segments),
                "replans": len(policy.records),
                "forced": sum(segment.ended_by == "limit" for segment in policy.segments),
                "plan": [_segment(segment) for segment in policy.segments],
                **_gate_delays(policy.segments, switches),
            },
        )
        env.close()


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
