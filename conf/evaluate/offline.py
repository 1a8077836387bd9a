"""`eval=offline`: replay labelled episodes of a shard directory."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

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
from data.shards.reader import ShardSet
from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.planners.roster import PlannerContext
from memer.results import write_offline
from memer.rollout import rollout_offline


def evaluate_offline(cfg: Mapping[str, Any]) -> int:
    """Replay the episodes of a shard directory and write the results."""
    out, started = Path(cfg["run_dir"]), time.time()
    shards = ShardSet(cfg["data"]["root"])
    policy = load_artifact(cfg)
    if policy is None:
        contract = shards.contract.updated(cfg["contract"])
    else:
        contract = policy_contract(policy, cfg)
        _check_data(contract, shards, cfg)
    rules = chosen_rules(cfg["keyframe_rules"], contract, allow=cfg["allow_mismatch"])
    chosen, skipped = _choose(shards, cfg["episodes"])
    planner = make_planner(
        cfg,
        PlannerContext(
            contract=contract,
            rules=rules,
            closed_loop=False,
            model=None if policy is None else policy.planner,
            demonstrations=lambda: (shards.episode(index) for index in shards.episode_indices()),
        ),
    )
    journal = open_journal(out, cfg, contract, rules_hash=rules.rules_hash)
    todo = [index for index in chosen if index not in journal.finished]
    stride = cfg["eval_stride"]
    total = sum(-(-shards.num_frames(index) // max(1, stride)) for index in todo)
    with tqdm(total=total, unit="step", desc="offline rollout", disable=None) as bar:
        hook, frames = step_hooks(cfg, out, bar)
        rollouts = rollout_offline(
            (shards.episode(index) for index in todo),
            planner,
            contract,
            rules,
            eval_stride=stride,
            boundary_width=cfg["boundary_width"],
            casefold=cfg["casefold"],
            on_step=hook,
            **rollout_settings(cfg),
        )
        record_episodes(journal, rollouts)
    dataset = {
        "name": shards.name,
        "root": str(shards.root),
        "camera_keys": list(contract.cameras.camera_keys),
        "requested": len(chosen) + len(skipped),
        "evaluated": len(chosen),
        "skipped": skipped,
        "eval_stride": stride,
        "boundary_width": cfg["boundary_width"],
        "rules_hash": rules.rules_hash,
    }
    facts = run_facts(cfg, contract, dataset, started=started, resumed=len(chosen) - len(todo))
    summary = write_offline(
        out,
        journal,
        episodes=chosen,
        facts={**facts, **planner_facts(cfg, contract)},
        casefold=cfg["casefold"],
        seed=cfg["seed"],
    )
    finish(cfg, out, journal, frames, chosen)
    print_figures(summary, ("normalized_accuracy", "boundary_accuracy", "keyframe_f1", "memory_recall"))
    return 0


def _check_data(contract: Contract, shards: ShardSet, cfg: Mapping[str, Any]) -> None:
    """What shards fix: clock and pictures. All else is chosen when they are read."""
    stored = contract.updated({"fps": shards.contract.fps, "cameras": shards.contract.to_dict()["cameras"]})
    contract.check_same(
        stored, what=f"policy {cfg['policy']} and shards {shards.root}", allow=cfg["allow_mismatch"]
    )


def _choose(shards: ShardSet, asked: Sequence[int] | None) -> tuple[list[int], list[dict[str, Any]]]:
    """Episodes to evaluate, and those left out with the reason."""
    present = shards.episode_indices()
    for index in asked or ():
        if index not in present:
            raise UsageError(f"episodes: {index} is not in {shards.root}; there are {_ranges(present)}")
    wanted = present if asked is None else list(dict.fromkeys(asked))
    labelled = [index for index in wanted if shards.segments(index)]
    skipped = [{"episode_index": i, "reason": "no labels"} for i in wanted if i not in set(labelled)]
    if not labelled:
        raise MemerError(f"{shards.root}: none of the {len(wanted)} episodes has labels")
    return labelled, skipped


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as `0..4, 7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in parts) or "none"
