"""Rollouts over recorded episodes: memory feeds back, lanes run in lockstep, one open episode per lane.

Static, teacher-forced scoring is not enough: an early wrong nomination spoils every later step.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memer.cameras import stacked_frames
from memer.contract import Contract
from memer.episode import Episode, normalize_label
from memer.keyframes import KeyframeRules
from memer.metrics import EpisodeScore, Truth, score_episode
from memer.planners.base import Planner
from memer.planners.oracle import KnowsEpisode
from memer.session import MemorySource, PlannerSession, StepRecord, plan_step
from memer.settings import check_count

#: Called after every step of a session: for progress, thumbnails, traces.
StepHook = Callable[[int, PlannerSession, StepRecord], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRollout:
    """One finished episode.

    Attributes:
        episode_index: the source's number.
        rows: one per evaluated step, with the names of predictions.jsonl.
        representatives: final cluster representatives, raw frames.
        score: counts; None in closed loop.
        extra: closed loop: outcome, measures, seed.
    """

    episode_index: int
    rows: list[dict[str, Any]]
    representatives: list[int]
    score: EpisodeScore | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def prediction_row(
    record: StepRecord,
    *,
    episode_index: int,
    target_step: int | None,
    target: str | None,
    target_positions: Iterable[int] | None,
    casefold: bool = False,
    full_trace: bool = False,
) -> dict[str, Any]:
    """One row of predictions.jsonl; public names first.

    Args:
        record: of the step.
        episode_index: the source's number.
        target_step: raw frame of the target label.
        target: label to name, None where unlabelled: correctness is null then.
        target_positions: positions that training would ask for, None where unknown.
        casefold: ignore case in the normalised comparison.
        full_trace: add the open votes; O(open votes) per row.
    """
    predicted = record.predicted_subtask
    row: dict[str, Any] = {
        "episode_index": episode_index,
        "timestep": record.timestep,
        "target_timestep": target_step,
        "instruction": record.instruction,
        "predicted_subtask": predicted,
        "target_subtask": target,
        "raw_correct": None if target is None else predicted == target,
        "normalized_correct": None if target is None else same_label(predicted, target, casefold=casefold),
        "parse_ok": record.parse_ok,
        "parse_error": record.parse_error,
        "predicted_keyframe_positions": list(record.predicted_keyframe_positions),
        "target_keyframe_positions": None if target_positions is None else list(target_positions),
        "mapped_keyframe_indices": list(record.mapped_keyframe_indices),
        "invalid_keyframe_positions": list(record.invalid_keyframe_positions),
        "context_indices": list(record.context_indices),
        "memory_indices_before": list(record.memory_indices_before),
        "memory_indices_after": list(record.memory_indices_after),
        "num_votes": record.num_votes,
        "latency_ms": record.latency_ms,
        "timings_ms": record.timings_ms,
        "status": record.status,
        "current_subtask": record.current_subtask,
        "stale": record.stale,
        "stale_steps": record.stale_steps,
        "raw_text": record.raw_text,
    }
    if full_trace:
        row["all_candidate_indices"] = list(record.all_candidate_indices)
    return row


def same_label(predicted: str | None, target: str, *, casefold: bool = False) -> bool:
    """Equality after whitespace normalisation, optionally without case; None equals nothing."""
    if predicted is None:
        return False
    a, b = normalize_label(predicted), normalize_label(target)
    return a.casefold() == b.casefold() if casefold else a == b


@dataclass(slots=True)
class _Lane:
    """One running episode."""

    episode: Episode
    session: PlannerSession
    truth: Truth
    frames: Iterator[tuple[int, NDArray[np.uint8]]]
    steps: Iterator[int]
    pending: tuple[int, NDArray[np.uint8]] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def advance(self) -> bool:
        """Observe up to the next evaluated step; False after the last."""
        t = next(self.steps, None)
        if t is None:
            return False
        self.session.instruction = self.episode.instruction_at(t)
        while True:
            if self.pending is None:
                self.pending = next(self.frames, None)
            if self.pending is None or self.pending[0] > t:
                return True
            step, frame = self.pending
            self.session.observe(frame, step=step, prepared=True)
            self.pending = None


def needed_frames(truth: Truth, *, with_memory: bool) -> list[int]:
    """Raw frames that some evaluated step shows: all windows, and the true memory where that is shown."""
    frames: set[int] = set()
    for t in truth.steps:
        frames.update(truth.context(t))
        if with_memory:
            frames.update(truth.split(t)[0])
    return sorted(frames)


def rollout_offline(
    episodes: Iterable[Episode],
    planner: Planner,
    contract: Contract,
    rules: KeyframeRules,
    *,
    eval_stride: int = 1,
    batch_size: int = 1,
    memory_source: MemorySource = "predicted",
    seed: int = 0,
    retries: int = 0,
    boundary_width: int = 4,
    casefold: bool = False,
    full_trace: bool = False,
    on_step: StepHook | None = None,
) -> Iterator[EpisodeRollout]:
    """Replay labelled episodes through a planner whose votes become its memory.

    Args:
        episodes: read one after the other as lanes become free; frames are decoded in one forward pass.
        planner: answers all lanes in one call.
        contract: windows, layout, memory form.
        rules: keyframes of the labels, for targets and metrics; the planner never sees them.
        eval_stride: raw frames between evaluated steps; 1 is the public setting, fps the deployed 1 Hz.
        batch_size: episodes in lockstep; the answers do not depend on it.
        memory_source: see PlannerSession; changes the memory images and nothing else.
        seed: of planner and shuffled memory; every episode gets its own from it and its number.
        retries: repeated calls after an answer that could not be parsed.
        boundary_width: subsampled steps around a target change.
        casefold: ignore case in the normalised comparison.
        full_trace: add the open votes to every row.
        on_step: called after every step with episode number, session and record.

    Yields:
        Finished episodes, in the order in which they finish.

    Raises:
        UsageError: a stride or batch size below 1.
    """
    check_count("eval_stride", eval_stride, least=1)
    check_count("batch_size", batch_size, least=1)

    def open_lane(episode: Episode) -> _Lane:
        keyframes = rules.select_segments(episode.segments)
        truth = Truth.of(episode, keyframes, windows=contract.shown_windows, eval_stride=eval_stride)
        session = PlannerSession(
            contract,
            name=f"{episode.source}/{episode.episode_index}",
            source=episode.source,
            episode=episode.episode_index,
            instruction=episode.instruction_at(0),
            memory_source=memory_source,
            keyframes=keyframes,
            seed=episode_seed(seed, episode.episode_index),
        )
        if isinstance(planner, KnowsEpisode):
            planner.bind_episode(session.name, episode)
        planner.start_episode(
            session.name,
            instruction=episode.instruction_at(0),
            seed=episode_seed(seed, episode.episode_index),
        )
        wanted = needed_frames(truth, with_memory=memory_source == "gt")
        frames = zip(wanted, stacked_frames(episode, contract.cameras, wanted), strict=True)
        return _Lane(episode, session, truth, frames, iter(truth.steps))

    waiting = iter(episodes)
    lanes: list[_Lane] = []
    while True:
        lanes.extend(open_lane(episode) for episode in itertools.islice(waiting, batch_size - len(lanes)))
        if not lanes:
            return
        running = []
        for lane in lanes:
            if lane.advance():
                running.append(lane)
                continue
            planner.end_episode(lane.session.name)
            representatives = lane.session.memory.representatives()
            score = score_episode(
                lane.rows,
                lane.truth,
                episode_index=lane.episode.episode_index,
                representatives=representatives,
                boundary_width=boundary_width,
                casefold=casefold,
            )
            yield EpisodeRollout(
                episode_index=lane.episode.episode_index,
                rows=lane.rows,
                representatives=representatives,
                score=score,
            )
        lanes = running
        records = plan_step(planner, [lane.session for lane in lanes], retries=retries) if lanes else []
        for lane, record in zip(lanes, records, strict=True):
            truth, t = lane.truth, record.timestep
            lane.rows.append(
                prediction_row(
                    record,
                    episode_index=lane.episode.episode_index,
                    target_step=truth.target_step(t),
                    target=truth.target(t),
                    target_positions=truth.split(t)[1],
                    casefold=casefold,
                    full_trace=full_trace,
                )
            )
            if on_step is not None:
                on_step(lane.episode.episode_index, lane.session, record)


def episode_seed(seed: int, episode_index: int) -> int:
    """The seed of one episode: depends on nothing but the run's seed and the episode's number."""
    return int(np.random.SeedSequence([seed, episode_index]).generate_state(1)[0])
