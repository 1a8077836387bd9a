"""The files of a finished evaluation: summary.json, episodes.json, label_metrics.json, predictions.jsonl."""

import itertools
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from memer.closed_loop import COUNTED
from memer.folders import write_json
from memer.frame_log import FrameLog
from memer.intervals import bootstrap_interval, wilson_interval
from memer.journal import RolloutJournal
from memer.metrics import episode_row, label_table, latency_summary, summarize

#: A closed-loop run with a larger share of episodes lost to infrastructure is marked invalid.
MAX_ERROR_SHARE = 0.02


def write_offline(
    out: Path,
    journal: RolloutJournal,
    *,
    episodes: Sequence[int],
    facts: Mapping[str, Any],
    casefold: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Write the results of an offline rollout.

    Args:
        out: run folder.
        journal: holds every episode in `episodes`.
        episodes: evaluated episodes, in the order of the files.
        facts: config, contract, dataset, runtime: what the summary says besides its figures.
        casefold: as in the rollout.
        seed: of the bootstrap.

    Returns:
        The summary as written: the metrics lie under `metrics`, and flat at the top as well.
    """
    scores = [journal.score(index) for index in episodes]
    metrics, ci = summarize(scores, seed=seed)
    write_json(
        out / "episodes.json",
        [
            {
                **episode_row(score),
                "representatives": journal.finished[score.episode_index]["representatives"],
            }
            for score in scores
        ],
    )
    write_json(out / "label_metrics.json", label_table(scores, casefold=casefold))
    journal.write_predictions(out / "predictions.jsonl", order=episodes)
    return write_summary(
        out,
        "offline",
        journal,
        episodes=episodes,
        metrics=metrics,
        ci=ci,
        counts={"num_episodes": len(scores), "num_steps": sum(score.timesteps for score in scores)},
        facts=facts,
    )


def write_closed_loop(
    out: Path,
    journal: RolloutJournal,
    *,
    episodes: Sequence[int],
    facts: Mapping[str, Any],
    seed: int = 0,
) -> dict[str, Any]:
    """Write the results of a closed-loop rollout; arguments as `write_offline`.

    Success rate and the shares of yes-or-no measures carry Wilson intervals; counted measures are summed
    under their name, as papers print them, with the mean per episode and its bootstrap interval beside.
    """
    entries = [journal.finished[index]["extra"] for index in episodes]
    metrics, ci = outcome_figures(entries, seed=seed)
    failures = sum(entry["parse_failures"] for entry in entries)
    rows = asked = agreed = 0
    for row in all_rows(journal, episodes):
        rows += 1
        asked += row["target_subtask"] is not None
        agreed += bool(row["normalized_correct"])
    metrics["parse_failure_rate"] = failures / rows if rows else None
    metrics["expert_agreement"] = agreed / asked if asked else None
    write_json(
        out / "episodes.json",
        [
            {**row, "representatives": journal.finished[row["episode_index"]]["representatives"]}
            for row in played_episodes(journal, episodes)
        ],
    )
    journal.write_predictions(out / "predictions.jsonl", order=episodes)
    return write_summary(
        out,
        "closed_loop",
        journal,
        episodes=episodes,
        metrics=metrics,
        ci=ci,
        counts={"num_steps": rows, **counts_of(entries)},
        facts=facts,
    )


def write_summary(
    out: Path,
    kind: str,
    journal: RolloutJournal,
    *,
    episodes: Sequence[int],
    metrics: Mapping[str, Any],
    ci: Mapping[str, Any],
    counts: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Write summary.json, the same for every kind of evaluation; returns it."""
    summary = {
        "eval": kind,
        **metrics,
        **counts,
        "metrics": metrics,
        "ci": ci,
        "latency_ms": latency_summary(all_rows(journal, episodes)),
        **facts,
    }
    write_json(out / "summary.json", summary)
    return summary


def outcome_figures(
    entries: Sequence[Mapping[str, Any]], *, seed: int
) -> tuple[dict[str, Any], dict[str, list[float] | None]]:
    """(metrics, intervals) of played episodes: success rate, the task's measures, steps.

    Args:
        entries: `extra` of the finished episodes: outcome, steps, measures.
        seed: of the bootstrap.
    """
    counted = [entry for entry in entries if entry["outcome"] in COUNTED]
    successes = sum(entry["outcome"] == "success" for entry in counted)
    metrics: dict[str, Any] = {
        "success_rate": successes / len(counted) if counted else None,
        "successes": successes,
    }
    ci: dict[str, Any] = {"success_rate": _as_list(wilson_interval(successes, len(counted)))}
    names = list(dict.fromkeys(name for entry in counted for name in entry["measures"]))
    for name in names:
        values = [entry["measures"][name] for entry in counted]
        if name == "success":
            continue
        metrics[name] = sum(values)
        if all(isinstance(value, bool) for value in values):
            metrics[name + "_rate"] = sum(values) / len(values)
            ci[name + "_rate"] = _as_list(wilson_interval(sum(values), len(values)))
        else:
            metrics[name + "_mean"] = sum(values) / len(values)
            ci[name + "_mean"] = _as_list(bootstrap_interval(values, seed=seed))
    metrics["steps_mean"] = sum(entry["steps"] for entry in counted) / len(counted) if counted else None
    return metrics, ci


def counts_of(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many episodes count, how they ended, and whether few enough were lost to infrastructure."""
    outcomes = Counter(entry["outcome"] for entry in entries)
    counted = sum(outcomes[name] for name in COUNTED)
    return {
        "num_episodes": counted,
        "outcomes": dict(outcomes),
        "valid": len(entries) - counted <= MAX_ERROR_SHARE * len(entries),
    }


def played_episodes(journal: RolloutJournal, episodes: Sequence[int]) -> list[dict[str, Any]]:
    """One flat row per played episode: its number, what the rollout noted, the task's measures."""
    rows = []
    for index in episodes:
        entry = journal.finished[index]["extra"]
        noted = {key: value for key, value in entry.items() if key != "measures"}
        rows.append({"episode_index": index, **noted, **entry["measures"]})
    return rows


def worst_first(summary_episodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Episode numbers, the ones to look at first in front: failures, then low accuracy."""

    def key(row: Mapping[str, Any]) -> tuple[float, int]:
        quality = row.get("normalized_accuracy", float(row.get("outcome") == "success"))
        return (1.0 if quality is None else quality, row["episode_index"])

    return [row["episode_index"] for row in sorted(summary_episodes, key=key)]


def keep_pictures(frames: FrameLog, journal: RolloutJournal, *, episodes: Sequence[int], count: int) -> None:
    """Delete the pictures of all but the `count` worst and the `count` first episodes."""
    rows = []
    for index in episodes:
        entry = journal.finished[index]
        row: dict[str, Any] = {"episode_index": index, "outcome": entry["extra"].get("outcome")}
        if entry["score"] is not None:
            row.update(episode_row(journal.score(index)))
        rows.append(row)
    frames.keep({*worst_first(rows)[:count], *episodes[:count]})


def runtime_facts(started: float) -> dict[str, Any]:
    """When, how long, on what: for a summary. `started` is time.time() at the start."""
    ended = time.time()
    return {
        "start": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "end": datetime.fromtimestamp(ended, UTC).isoformat(timespec="seconds"),
        "seconds": round(ended - started, 3),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("torch", "numpy", "pillow")},
        "command": sys.argv,
    }


def all_rows(journal: RolloutJournal, episodes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of all these episodes, one after the other."""
    return itertools.chain.from_iterable(journal.rows(index) for index in episodes)


def _as_list(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)
