"""Scores of a rollout: counted per episode, then summed, so that memory stays bounded and intervals are
cheap.

Every share is a pair (numerator, denominator) per episode (`RATIOS`): the micro value is sum over sum, the
macro value the mean over the episodes whose denominator is not 0, and the interval resamples episodes.
"""

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from memer.episode import normalize_label
from memer.intervals import bootstrap_interval, percentiles, wilson_interval
from memer.memory import EpisodicMemory
from memer.truth import Truth

__all__ = [
    "EpisodeScore",
    "Truth",
    "bootstrap_interval",
    "label_table",
    "percentiles",
    "score_episode",
    "summarize",
    "wilson_interval",
]

#: Steps at the start of a run whose latency is not counted (warm-up).
WARMUP_STEPS = 3


@dataclass(slots=True)
class EpisodeScore:
    """Counts of one episode; plain JSON values."""

    episode_index: int
    timesteps: int = 0
    unlabelled: int = 0
    parse_failures: int = 0
    raw_correct: int = 0
    normalized_correct: int = 0
    boundary_steps: int = 0
    boundary_correct: int = 0
    switch_delays: list[int] = field(default_factory=list)
    missed_switches: int = 0
    positions_predicted: int = 0
    positions_distinct: int = 0
    positions_invalid: int = 0
    positions_target: int = 0
    positions_hit: int = 0
    positions_hit_tol1: int = 0
    representatives: int = 0
    events: int = 0
    events_hit: int = 0
    events_hit_tol: int = 0
    never_nominated: int = 0
    memory_steps: int = 0
    memory_precision_steps: int = 0
    memory_recall_sum: float = 0.0
    memory_precision_sum: float = 0.0
    memory_recall_tol_sum: float = 0.0
    memory_precision_tol_sum: float = 0.0
    oracle_precision_steps: int = 0
    oracle_recall_sum: float = 0.0
    oracle_precision_sum: float = 0.0
    #: target label -> {predicted label or "": steps}; whitespace-normalised
    confusion: dict[str, dict[str, int]] = field(default_factory=dict)
    #: target label -> steps that are equal character by character
    raw_by_label: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @property
    def labelled(self) -> int:
        """Evaluated steps that have a target."""
        return self.timesteps - self.unlabelled


Ratio = Callable[[EpisodeScore], tuple[float, float]]

RATIOS: dict[str, Ratio] = {
    "raw_accuracy": lambda e: (e.raw_correct, e.labelled),
    "normalized_accuracy": lambda e: (e.normalized_correct, e.labelled),
    "boundary_accuracy": lambda e: (e.boundary_correct, e.boundary_steps),
    "parse_failure_rate": lambda e: (e.parse_failures, e.timesteps),
    "invalid_position_rate": lambda e: (e.positions_invalid, e.positions_predicted),
    "position_precision": lambda e: (e.positions_hit, e.positions_distinct),
    "position_recall": lambda e: (e.positions_hit, e.positions_target),
    "position_f1": lambda e: (2 * e.positions_hit, e.positions_distinct + e.positions_target),
    "position_precision_tol1": lambda e: (e.positions_hit_tol1, e.positions_distinct),
    "position_recall_tol1": lambda e: (e.positions_hit_tol1, e.positions_target),
    "position_f1_tol1": lambda e: (2 * e.positions_hit_tol1, e.positions_distinct + e.positions_target),
    "keyframe_precision": lambda e: (e.events_hit, e.representatives),
    "keyframe_recall": lambda e: (e.events_hit, e.events),
    "keyframe_f1": lambda e: (2 * e.events_hit, e.representatives + e.events),
    "keyframe_precision_tol": lambda e: (e.events_hit_tol, e.representatives),
    "keyframe_recall_tol": lambda e: (e.events_hit_tol, e.events),
    "keyframe_f1_tol": lambda e: (2 * e.events_hit_tol, e.representatives + e.events),
    "memory_recall": lambda e: (e.memory_recall_sum, e.memory_steps),
    "memory_precision": lambda e: (e.memory_precision_sum, e.memory_precision_steps),
    "memory_recall_tol": lambda e: (e.memory_recall_tol_sum, e.memory_steps),
    "memory_precision_tol": lambda e: (e.memory_precision_tol_sum, e.memory_precision_steps),
    "memory_recall_oracle": lambda e: (e.oracle_recall_sum, e.memory_steps),
    "memory_precision_oracle": lambda e: (e.oracle_precision_sum, e.oracle_precision_steps),
}


def score_episode(
    rows: Sequence[Mapping[str, Any]],
    truth: Truth,
    *,
    episode_index: int,
    representatives: Sequence[int],
    boundary_width: int = 4,
    casefold: bool = False,
) -> EpisodeScore:
    """Count one episode.

    Args:
        rows: one per evaluated step in time order, with the names of predictions.jsonl.
        truth: labels, keyframes, windows and stride of the episode.
        episode_index: the source's number.
        representatives: final cluster representatives of the planner's votes, raw frames.
        boundary_width: subsampled steps on either side of a target change that count as its boundary.
        casefold: ignore case in the normalised comparison.
    """
    windows = truth.windows
    score = EpisodeScore(episode_index, timesteps=len(rows))

    def normal(text: str | None) -> str | None:
        if text is None:
            return None
        return normalize_label(text).casefold() if casefold else normalize_label(text)

    changes = truth.changes()
    reach = boundary_width * windows.frame_subsample
    oracle = EpisodicMemory(
        merge_distance=windows.merge_frames, memory_length=windows.keyframes_length, mode="strict"
    )
    slack = windows.frame_subsample - 1
    steps: list[int] = []
    predictions: list[str | None] = []
    for row in rows:
        t = row["timestep"]
        target, predicted = truth.target(t), row["predicted_subtask"]
        steps.append(t)
        predictions.append(normal(predicted))
        if not row["parse_ok"]:
            score.parse_failures += 1
        if target is None:
            score.unlabelled += 1
        else:
            same = normal(predicted) == normal(target)
            score.raw_correct += predicted == target
            score.normalized_correct += same
            at = bisect_right(changes, t + reach) - 1
            near = at >= 0 and changes[at] - reach <= t < changes[at] + reach
            score.boundary_steps += near
            score.boundary_correct += near and same
            line = score.confusion.setdefault(target, {})
            heard = normalize_label(predicted) if predicted is not None else ""
            line[heard] = line.get(heard, 0) + 1
            score.raw_by_label[target] = score.raw_by_label.get(target, 0) + int(predicted == target)

        memory, wanted = truth.split(t)
        answered = sorted(set(row["predicted_keyframe_positions"]))
        score.positions_predicted += len(row["predicted_keyframe_positions"])
        score.positions_invalid += len(row["invalid_keyframe_positions"])
        score.positions_distinct += len(answered)
        score.positions_target += len(wanted)
        score.positions_hit += len(set(answered) & set(wanted))
        score.positions_hit_tol1 += _match([(p - 1, p + 1) for p in wanted], answered)

        ideal = oracle.visible(truth.context(t))
        if memory:
            shown = row["memory_indices_before"]
            score.memory_steps += 1
            score.memory_recall_sum += _covered(memory, shown, slack)
            score.memory_recall_tol_sum += _covered(memory, shown, slack + windows.merge_frames)
            score.oracle_recall_sum += _covered(memory, ideal, slack)
            if shown:
                score.memory_precision_steps += 1
                score.memory_precision_sum += _covered(shown, memory, slack)
                score.memory_precision_tol_sum += _covered(shown, memory, slack + windows.merge_frames)
            if ideal:
                score.oracle_precision_steps += 1
                score.oracle_precision_sum += _covered(ideal, memory, slack)
        oracle.add([vote for vote, _ in truth.nominations(t)])

    _count_switches(score, truth, changes, steps, predictions, normal)
    events, score.never_nominated = truth.events()
    score.events, score.representatives = len(events), len(representatives)
    ordered, far = sorted(representatives), windows.merge_frames
    score.events_hit = _match([(a - slack, b) for a, b in events], ordered)
    score.events_hit_tol = _match([(a - slack - far, b + far) for a, b in events], ordered)
    return score


def _covered(wanted: Sequence[int], offered: Sequence[int], distance: int) -> float:
    """Share of `wanted` frames with an `offered` frame at most `distance` frames away."""
    return sum(any(abs(a - b) <= distance for b in offered) for a in wanted) / len(wanted)


def _match(spans: Sequence[tuple[int, int]], points: Sequence[int]) -> int:
    """Spans and points paired one to one in order; both ascending.

    >>> _match([(0, 4), (3, 9)], [4, 5])
    2
    """
    pairs = i = j = 0
    while i < len(spans) and j < len(points):
        low, high = spans[i]
        if points[j] < low:
            j += 1
        elif points[j] > high:
            i += 1
        else:
            pairs, i, j = pairs + 1, i + 1, j + 1
    return pairs


def _count_switches(
    score: EpisodeScore,
    truth: Truth,
    changes: Sequence[int],
    steps: Sequence[int],
    predictions: Sequence[str | None],
    normal: Callable[[str | None], str | None],
) -> None:
    """Raw frames from the first evaluated step after each target change to the first matching prediction.

    Negative when the planner had switched earlier and stayed; a run of matching predictions is followed back
    at most to the previous change. A change whose label is never named before the next change is missed.
    """
    for number, change in enumerate(changes):
        first = bisect_left(steps, change)
        floor = bisect_left(steps, changes[number - 1]) if number else 0
        end = bisect_left(steps, changes[number + 1]) if number + 1 < len(changes) else len(steps)
        if first >= end:
            continue  # the stride jumps over this target
        wanted = normal(truth.target(change))
        at = next((i for i in range(first, end) if predictions[i] == wanted), None)
        if at is None:
            score.missed_switches += 1
            continue
        if at == first:
            while at > floor and predictions[at - 1] == wanted:
                at -= 1
        score.switch_delays.append(steps[at] - steps[first])


def summarize(
    scores: Sequence[EpisodeScore], *, resamples: int = 2000, seed: int = 0
) -> tuple[dict[str, float | None], dict[str, list[float] | None]]:
    """Metrics over all episodes and their 95 % intervals.

    Returns:
        (metrics, ci): micro values under their name, macro values under `<name>_macro`; None where nothing
        was counted. Intervals are None for fewer than two episodes.
    """
    metrics: dict[str, float | None] = {}
    ci: dict[str, list[float] | None] = {}
    for name, ratio in RATIOS.items():
        pairs = [ratio(score) for score in scores]
        top, bottom = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        own = [a / b for a, b in pairs if b]
        metrics[name] = sum(top) / sum(bottom) if sum(bottom) else None
        metrics[name + "_macro"] = sum(own) / len(own) if own else None
        for key, low_high in (
            (name, bootstrap_interval(top, bottom, resamples=resamples, seed=seed)),
            (name + "_macro", bootstrap_interval(own, resamples=resamples, seed=seed)),
        ):
            ci[key] = None if low_high is None else list(low_high)
    delays = [delay for score in scores for delay in score.switch_delays]
    metrics["switch_delay"] = float(statistics.median(delays)) if delays else None
    metrics["missed_switches"] = sum(score.missed_switches for score in scores)
    metrics["never_nominated"] = sum(score.never_nominated for score in scores)
    metrics["unlabelled_steps"] = sum(score.unlabelled for score in scores)
    return metrics, ci


def label_table(scores: Iterable[EpisodeScore], *, casefold: bool = False) -> dict[str, Any]:
    """Per target label: support, raw and normalised accuracy; and the confusion table.

    Returns:
        {"labels": {label: {support, raw_accuracy, normalized_accuracy}}, "confusion": {target: {predicted:
        n}}}; the empty predicted label stands for a parse failure.
    """
    confusion: dict[str, Counter[str]] = {}
    raw: Counter[str] = Counter()
    for score in scores:
        raw.update(score.raw_by_label)
        for target, line in score.confusion.items():
            confusion.setdefault(target, Counter()).update(line)

    def same(a: str, b: str) -> bool:
        a, b = normalize_label(a), normalize_label(b)
        return a.casefold() == b.casefold() if casefold else a == b

    labels = {}
    for target, line in sorted(confusion.items()):
        support = sum(line.values())
        labels[target] = {
            "support": support,
            "raw_accuracy": raw[target] / support,
            "normalized_accuracy": sum(n for text, n in line.items() if same(text, target)) / support,
        }
    return {"labels": labels, "confusion": {t: dict(sorted(c.items())) for t, c in sorted(confusion.items())}}


def episode_row(score: EpisodeScore) -> dict[str, Any]:
    """The row of episodes.json: every ratio of the episode beside its counts."""
    row: dict[str, Any] = {
        "episode_index": score.episode_index,
        "timesteps": score.timesteps,
        "parse_failures": score.parse_failures,
    }
    for name, ratio in RATIOS.items():
        top, bottom = ratio(score)
        row[name] = top / bottom if bottom else None
    row["switch_delay"] = float(statistics.median(score.switch_delays)) if score.switch_delays else None
    row["unlabelled_steps"] = score.unlabelled
    row["never_nominated"] = score.never_nominated
    return row


def latency_summary(rows: Iterable[Mapping[str, Any]], *, warmup: int = WARMUP_STEPS) -> dict[str, Any]:
    """Percentiles of preprocess, generate and total time in ms; the first `warmup` rows are left out."""
    parts: dict[str, list[float]] = {}
    for number, row in enumerate(rows):
        if number < warmup:
            continue
        parts.setdefault("total", []).append(row["latency_ms"])
        for name, value in (row.get("timings_ms") or {}).items():
            parts.setdefault(name, []).append(value)
    return {name: percentiles(values) for name, values in parts.items()}
