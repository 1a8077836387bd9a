"""The files of a played evaluation of a plan-following policy: summary.json, episodes.json, chunks.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from memer.folders import write_json
from memer.intervals import bootstrap_interval
from memer.journal import RolloutJournal
from memer.results import all_rows, counts_of, outcome_figures, played_episodes, write_summary

CHUNKS_FILE = "chunks.jsonl"


def write_map_wam(
    out: Path,
    journal: RolloutJournal,
    *,
    episodes: Sequence[int],
    facts: Mapping[str, Any],
    seed: int = 0,
) -> dict[str, Any]:
    """Write the results of `rollout_map_wam`.

    Args:
        out: run folder.
        journal: holds every episode in `episodes`.
        episodes: played episodes, in the order of the files.
        facts: config, contract, dataset, runtime: what the summary says besides its figures.
        seed: of the bootstrap.

    Returns:
        The summary as written: success rate and measures as for every closed loop; segments, gate delays in
        steps and misses besides.
    """
    entries = [journal.finished[index]["extra"] for index in episodes]
    metrics, ci = outcome_figures(entries, seed=seed)
    for name in ("segments", "replans"):
        values = [entry[name] for entry in entries]
        metrics[name + "_mean"] = mean(values)
        interval = bootstrap_interval(values, seed=seed)
        ci[name + "_mean"] = None if interval is None else list(interval)
    delays = [delay for entry in entries for delay in entry["gate_delays"]]
    missed = sum(entry["missed_gates"] for entry in entries)
    passed = missed + len(delays)
    metrics["gate_delay_mean"] = mean(delays) if delays else None
    metrics["gate_miss_rate"] = missed / passed if passed else None
    metrics["forced_segments"] = sum(entry["forced"] for entry in entries)
    write_json(out / "episodes.json", played_episodes(journal, episodes))
    journal.write_predictions(out / CHUNKS_FILE, order=episodes)
    return write_summary(
        out,
        "map_wam",
        journal,
        episodes=episodes,
        metrics=metrics,
        ci=ci,
        counts={"num_chunks": sum(1 for _ in all_rows(journal, episodes)), **counts_of(entries)},
        facts=facts,
    )
