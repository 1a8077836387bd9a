"""What every evaluation keeps: the journal, pictures, facts, the report."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.instantiate import instantiate
from memer.contract import Contract
from memer.frame_log import FrameLog
from memer.journal import RolloutJournal
from memer.planners.base import Planner
from memer.planners.roster import PlannerContext
from memer.report import write_report
from memer.results import keep_pictures, runtime_facts
from memer.rollout import EpisodeRollout, StepHook
from memer.session import PlannerSession, StepRecord

#: Settings that do not change any answer; a stopped evaluation may continue with others.
FREE_SETTINGS = ("name", "run_id", "run_dir", "group", "device", "batch_size", "frames", "allow_mismatch")


def make_planner(cfg: Mapping[str, Any], context: PlannerContext) -> Planner:
    """The planner that the configuration names."""
    return instantiate(cfg["planner"], where="planner", context=context)  # type: ignore[no-any-return]


def open_journal(out: Path, cfg: Mapping[str, Any], contract: Contract, **settings: Any) -> RolloutJournal:
    """The journal of a run folder; `settings`: what decides the answers besides `cfg` and the contract."""
    asked = {key: value for key, value in cfg.items() if key not in FREE_SETTINGS}
    return RolloutJournal(out, settings={**asked, "contract": contract.to_dict(), **settings})


def step_hooks(cfg: Mapping[str, Any], out: Path, bar: Any) -> tuple[StepHook, FrameLog | None]:
    """(hook for the rollouts, log of small pictures or None where none are wanted)."""
    wanted = cfg["frames"]["episodes"] > 0
    frames = FrameLog(out / "frames", every=cfg["frames"]["every"]) if wanted else None

    def hook(episode_index: int, session: PlannerSession, record: StepRecord) -> None:
        if bar is not None:
            bar.update()
        if frames is not None:
            frames(episode_index, session, record)

    return hook, frames


def rollout_settings(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """What a planner's rollout is told, whether it replays or plays."""
    return {name: cfg[name] for name in ("batch_size", "memory_source", "seed", "retries", "full_trace")}


def record_episodes(journal: RolloutJournal, rollouts: Iterable[EpisodeRollout], bar: Any = None) -> None:
    """Write every finished episode into the journal; `bar` shows how many succeeded."""
    successes = done = 0
    for rollout in rollouts:
        journal.append(rollout)
        if bar is not None:
            done += 1
            successes += rollout.extra.get("outcome") == "success"
            bar.update()
            bar.set_postfix_str(f"success {successes}/{done}")


def run_facts(
    cfg: Mapping[str, Any],
    contract: Contract,
    dataset: Mapping[str, Any],
    *,
    started: float,
    resumed: int,
) -> dict[str, Any]:
    """What a summary says besides its figures, whatever was evaluated."""
    return {
        "name": cfg["name"],
        "run_id": cfg["run_id"],
        "group": cfg["group"],
        "config": {key: value for key, value in cfg.items() if key != "run_dir"},
        "contract": contract.to_dict(),
        "dataset": dict(dataset),
        "runtime": {
            **runtime_facts(started),
            "resumed_episodes": resumed,
            **{key: cfg[key] for key in ("device", "batch_size") if key in cfg},
        },
    }


def planner_facts(cfg: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
    """The same about a planner that is asked at every step."""
    return {
        "policy": cfg["policy"],
        "memory_form": contract.memory_form,
        "memory_source": cfg["memory_source"],
        "planner": cfg["planner"]["_target_"].rsplit(".", 1)[-1],
    }


def finish(
    cfg: Mapping[str, Any],
    out: Path,
    journal: RolloutJournal,
    frames: FrameLog | None,
    chosen: Sequence[int],
) -> None:
    """Keep the pictures that the report shows, drop what only a continuation needed, make the report."""
    if frames is not None:
        keep_pictures(frames, journal, episodes=chosen, count=cfg["frames"]["episodes"])
    journal.remove()
    print(f"report: {write_report(out)}")


def print_figures(summary: Mapping[str, Any], names: Sequence[str]) -> None:
    """Some figures with their intervals, one a line."""
    for name in names:
        value, interval = summary.get(name), summary["ci"].get(name)
        shown = "-" if value is None else f"{value:.4f}"
        if interval is not None:
            shown += f"  [{interval[0]:.4f}, {interval[1]:.4f}]"
        print(f"{name:24s} {shown}")
