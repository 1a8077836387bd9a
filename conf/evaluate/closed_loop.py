"""`eval=closed_loop`: tabletop episodes; a planner above the scripted low level."""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from conf.compose import CONF_DIR
from conf.evaluate.handover import chosen_rules, load_artifact, policy_contract
from conf.evaluate.record import (
    finish,
    make_planner,
    open_journal,
    planner_facts,
    print_figures,
    record_episodes,
    rollout_settings,
    run_facts,
    step_hooks,
)
from conf.evaluate.tabletop import check_environment, chosen_episodes, demonstrations, play, played_dataset
from memer.closed_loop import ClosedLoopEpisode, rollout_closed_loop
from memer.contract import CameraLayout, Contract
from memer.errors import MemerError
from memer.planners.roster import PlannerContext
from memer.results import write_closed_loop
from memer.tabletop import CAMERA_KEYS, make_controller
from memer.tabletop.perturbations import FPS
from memer.tabletop.tasks import world_class

#: Slots of the embedded benchmark where no policy says otherwise, px.
TABLETOP_SLOT = 64
#: Demonstrations that label statistics of the embedded benchmark are taken from.
NUM_DEMONSTRATIONS = 20


def evaluate_closed_loop(cfg: Mapping[str, Any]) -> int:
    """Play tabletop episodes and write the results."""
    out, started, env = Path(cfg["run_dir"]), time.time(), cfg["env"]
    world_class(env["task"])  # a mistyped task is named before anything else
    policy = load_artifact(cfg)
    if policy is None:
        layout = CameraLayout(camera_keys=CAMERA_KEYS, view_width=TABLETOP_SLOT, view_height=TABLETOP_SLOT)
        contract = Contract(fps=float(FPS), cameras=layout).updated(cfg["contract"])
    else:
        contract = policy_contract(policy, cfg)
        check_environment(contract, cfg, what=f"policy {cfg['policy']}")
    given = cfg["keyframe_rules"]
    if given is None and not contract.rules_hash:
        given = str(CONF_DIR / "rules" / f"{env['task']}.json")
    rules = chosen_rules(given, contract, allow=cfg["allow_mismatch"])
    chosen = chosen_episodes(env)
    planner = make_planner(
        cfg,
        PlannerContext(
            contract=contract,
            rules=rules,
            closed_loop=True,
            model=None if policy is None else policy.planner,
            demonstrations=lambda: demonstrations(env, NUM_DEMONSTRATIONS),
        ),
    )
    journal = open_journal(out, cfg, contract, rules_hash=rules.rules_hash)
    journal.forget(
        index for index, entry in journal.finished.items() if entry["extra"]["outcome"] == "planner_error"
    )
    todo = [index for index in chosen if index not in journal.finished]
    with tqdm(total=len(todo), unit="episode", desc="closed loop", disable=None) as bar:
        hook, frames = step_hooks(cfg, out, None)
        rollouts = rollout_closed_loop(
            _plays(env, todo),
            planner,
            contract,
            planner_stride=cfg["planner_stride"],
            reference=cfg["reference"],
            on_step=hook,
            **rollout_settings(cfg),
        )
        record_episodes(journal, rollouts, bar)
    dataset = {
        **played_dataset(env, contract, chosen),
        "planner_stride": cfg["planner_stride"],
        "rules_hash": rules.rules_hash,
    }
    facts = run_facts(cfg, contract, dataset, started=started, resumed=len(chosen) - len(todo))
    summary = write_closed_loop(
        out,
        journal,
        episodes=chosen,
        facts={**facts, **planner_facts(cfg, contract)},
        seed=cfg["seed"],
    )
    if summary["valid"]:
        finish(cfg, out, journal, frames, chosen)
    print_figures(summary, ("success_rate", "parse_failure_rate", "expert_agreement"))
    if not summary["valid"]:
        raise MemerError(
            f"{out}: {summary['outcomes'].get('planner_error', 0)} of {len(chosen)} episodes were lost to "
            f"planner errors; run again with run_id={cfg['run_id']} to repeat them"
        )
    return 0


def _plays(env: Mapping[str, Any], indices: Iterable[int]) -> Iterator[ClosedLoopEpisode]:
    for index in indices:
        yield ClosedLoopEpisode(index, play(env, index), make_controller(env["task"]))
