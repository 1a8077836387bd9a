"""`eval=map_wam`: a plan-following policy plays tabletop episodes."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from conf.evaluate.record import finish, open_journal, print_figures, record_episodes, run_facts
from conf.evaluate.tabletop import check_environment, chosen_episodes, demonstrations, play, played_dataset
from memer.contract import CameraLayout, Contract, plan_of
from memer.episode import Episode
from memer.errors import MemerError, UsageError
from memer.executors.base import Executor, LanguagePlanner, VisualPlanner
from memer.executors.oracles import ExecutorOracle, LanguageOracle, VisualOracle
from memer.executors.table import TablePlanner
from memer.frame_log import FrameLog
from memer.map_closed_loop import PlayedEpisode, rollout_map_wam
from memer.map_results import write_map_wam
from memer.plan_log import PlanLog
from memer.plan_parts import (
    joint_contract,
    load_parts,
    possible_calibration,
    similarity_of,
    without_visual,
)
from memer.plan_policy import MapWamPolicy
from memer.progress import gate_window
from memer.settings import check_count
from memer.tabletop.perturbations import FPS
from memer.tabletop.tasks import world_class

#: The gate averages so many executed actions at most.
LARGEST_WINDOW = 8
#: The parts of a policy.
ROLES = ("language", "visual", "executor")


def evaluate_map_wam(cfg: Mapping[str, Any]) -> int:
    """Play tabletop episodes and write the results."""
    out, started, env = Path(cfg["run_dir"]), time.time(), cfg["env"]
    world_class(env["task"])  # a mistyped task is named before anything else
    if cfg["policy"] is not None:
        raise UsageError(f"policy: {cfg['policy']!r}, this policy has parts: language=, visual=, executor=")
    chosen = chosen_episodes(env)
    for name, least in (("seed", 0), ("batch_size", 1), ("steps", 1)):
        if cfg[name] is not None:  # null: what the exports bring
            check_count(name, cfg[name], least=least)
    policy, window = _policy(cfg)
    journal = open_journal(out, cfg, policy.contract, window=window)
    todo = [index for index in chosen if index not in journal.finished]
    frames = FrameLog(out / "frames") if cfg["frames"]["episodes"] > 0 else None
    with tqdm(total=len(todo), unit="episode", desc="closed loop", disable=None) as bar:
        rollouts = rollout_map_wam(
            _plays(env, todo),
            policy,
            batch_size=cfg["batch_size"],
            seed=cfg["seed"],
            on_episode=None if frames is None else PlanLog(frames.folder),
        )
        record_episodes(journal, rollouts, bar)
    dataset = played_dataset(env, policy.contract, chosen)
    facts = run_facts(cfg, policy.contract, dataset, started=started, resumed=len(chosen) - len(todo))
    parts = {name: cfg[name] for name in ROLES}
    settings = {"tau": cfg["tau"], "window": window, "calibration": policy.calibration}
    summary = write_map_wam(
        out, journal, episodes=chosen, facts={**facts, **parts, **settings}, seed=cfg["seed"]
    )
    finish(cfg, out, journal, frames, chosen)
    print_figures(summary, ("success_rate", "segments_mean", "gate_delay_mean", "gate_miss_rate"))
    return 0


def _policy(cfg: Mapping[str, Any]) -> tuple[MapWamPolicy, int]:
    """The policy of three parts, and the gate's window."""
    for name in ROLES:
        if not isinstance(cfg[name], str):
            raise UsageError(f"{name}: {cfg[name]!r}, must be oracle or the folder of an exported part")
    folders = {name: cfg[name] for name in ROLES if cfg[name] not in ("oracle", "table", "none")}
    parts = load_parts(folders, device=cfg["device"], steps=cfg["steps"], temperature=cfg["temperature"])
    contract = _contract(cfg, folders)
    check_environment(contract, cfg, what="policy")
    calibration = cfg["calibration"]

    @functools.cache  # table and window both look at them, and drawing them takes seconds
    def shown() -> tuple[Episode, ...]:
        return tuple(demonstrations(cfg["env"], cfg["num_demonstrations"]))

    window = _window(cfg, shown)
    policy = MapWamPolicy(
        _language(cfg, parts, contract, shown),
        _visual(cfg, parts, contract),
        _executor(cfg, parts, contract),
        contract,
        replan=cfg["replan"],
        tau=cfg["tau"],
        window=window,
        calibration=possible_calibration(plan_of(contract)) if calibration == "auto" else calibration,
        similarity=similarity_of(cfg["similarity"], parts),
        update_rule=cfg["update_rule"],
        max_segment_steps=cfg["max_segment_steps"],
        check_every=cfg["check_every"],
    )
    return policy, window


def _contract(cfg: Mapping[str, Any], folders: Mapping[str, str]) -> Contract:
    if folders:
        made = joint_contract(folders, allow=cfg["allow_mismatch"])
        contract = made.updated(cfg["contract"])
        made.check_same(
            contract, what="exports and this evaluation's contract.*", allow=cfg["allow_mismatch"]
        )
    else:
        contract = _oracle_contract(cfg)
    return without_visual(contract, trained="executor" in folders) if cfg["visual"] == "none" else contract


def _oracle_contract(cfg: Mapping[str, Any]) -> Contract:
    """The benchmark's own contract, for a policy of oracles alone."""
    values = cfg["oracle_contract"]
    cameras = tuple(region["camera"] for region in values["plan"]["canvas"]["regions"])
    size = cfg["env"]["frame_size"]
    layout = CameraLayout(camera_keys=cameras, view_width=size, view_height=size)
    return Contract(fps=float(FPS), cameras=layout).updated(values).updated(cfg["contract"])


def _language(
    cfg: Mapping[str, Any],
    loaded: Mapping[str, Any],
    contract: Contract,
    shown: Callable[[], Iterable[Episode]],
) -> LanguagePlanner:
    if "language" in loaded:
        _check_vocabulary(loaded["language"], cfg)
        return loaded["language"]  # type: ignore[no-any-return]
    if cfg["language"] == "table":
        return TablePlanner.from_episodes(shown())
    if cfg["language"] == "none":
        raise UsageError("language: 'none', must be oracle, table or the folder of an exported planner")
    return LanguageOracle(contract)


def _check_vocabulary(planner: Any, cfg: Mapping[str, Any]) -> None:
    """Refuse a planner that learned none of the subtasks of this task.

    Raises:
        MemerError: naming what it knows and what the task has.
    """
    known = planner.contract.subtasks
    first = next(demonstrations(cfg["env"], 1))
    asked = {segment.label for segment in first.segments}
    if known and not asked & set(known):
        raise MemerError(
            f"language={cfg['language']}: its {len(known)} subtasks (first {known[0]!r}) are none of task "
            f"{cfg['env']['task']} (first {first.segments[0].label!r}); give a planner trained on this task"
        )


def _visual(cfg: Mapping[str, Any], loaded: Mapping[str, Any], contract: Contract) -> VisualPlanner | None:
    if cfg["visual"] == "none":
        return None
    if cfg["visual"] == "table":
        raise UsageError("visual: 'table', must be oracle, none or the folder of an exported world model")
    if "visual" in loaded:
        return loaded["visual"]  # type: ignore[no-any-return]
    return VisualOracle(contract, frame_size=cfg["env"]["frame_size"])


def _executor(cfg: Mapping[str, Any], loaded: Mapping[str, Any], contract: Contract) -> Executor:
    if "executor" in loaded:
        return loaded["executor"]  # type: ignore[no-any-return]
    if cfg["executor"] != "oracle":
        raise UsageError(
            f"executor: {cfg['executor']!r}, must be oracle or the folder of an exported executor"
        )
    return ExecutorOracle(contract)


def _window(cfg: Mapping[str, Any], shown: Callable[[], Iterable[Episode]]) -> int:
    if cfg["window"] != "auto":
        if type(cfg["window"]) is not int or cfg["window"] < 1:
            raise UsageError(f"window: {cfg['window']!r}, must be auto or a number of actions, at least 1")
        return cfg["window"]
    shortest = min(segment.end - segment.start for episode in shown() for segment in episode.segments)
    return gate_window(shortest, cfg["tau"], largest=LARGEST_WINDOW)


def _plays(env: Mapping[str, Any], indices: Iterable[int]) -> Iterator[PlayedEpisode]:
    for index in indices:
        yield PlayedEpisode(index, play(env, index))
