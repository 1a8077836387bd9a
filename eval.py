"""Score a planner: `python eval.py eval=offline|closed_loop|compare ...` (conf/eval.yaml)."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from conf.compose import CONF_DIR
from conf.instantiate import instantiate
from conf.launch import hydra_root
from data.shards.reader import ShardSet
from memer.artifact import load_policy
from memer.closed_loop import ClosedLoopEpisode, rollout_closed_loop
from memer.compare import compare
from memer.contract import CameraLayout, Contract
from memer.episode import Episode
from memer.errors import MemerError, UsageError
from memer.frame_log import FrameLog
from memer.journal import RolloutJournal
from memer.keyframes import KeyframeRules
from memer.planners.base import Planner
from memer.planners.roster import PlannerContext
from memer.policy import Policy
from memer.report import write_report
from memer.results import keep_pictures, runtime_facts, write_closed_loop, write_offline
from memer.rollout import EpisodeRollout, StepHook, rollout_offline
from memer.session import PlannerSession, StepRecord
from memer.tabletop import CAMERA_KEYS, demonstrate, make_controller, make_env
from memer.tabletop.perturbations import FPS
from memer.tabletop.tasks import world_class
from memer.windows import check_rate

#: Slots of the embedded benchmark where no policy says otherwise, px.
TABLETOP_SLOT = 64
#: Demonstrations that label statistics of the embedded benchmark are taken from.
NUM_DEMONSTRATIONS = 20
#: Settings that do not change any answer; a stopped evaluation may continue with others.
_FREE_SETTINGS = ("name", "run_id", "run_dir", "group", "device", "batch_size", "frames", "allow_mismatch")


class FirstFew(logging.Filter):
    """Lets the first records through: a planner that is lost draws the same warning in every episode.

    Args:
        count: records let through, at least 1; the last of them says that it is.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show `record`."""
        self.left -= 1
        if self.left == 0:
            record.msg, record.args = f"{record.getMessage()} (further ones are not shown)", ()
        return self.left >= 0


@hydra_root("eval")
def main(cfg: dict[str, Any]) -> int | None:
    """Dispatch on the mode."""
    logging.getLogger("memer.memory").addFilter(FirstFew(3))
    if cfg["mode"] == "offline":
        return evaluate_offline(cfg)
    if cfg["mode"] == "closed_loop":
        return evaluate_closed_loop(cfg)
    if cfg["mode"] == "compare":
        table = compare(cfg["runs"], cfg["run_dir"], metrics=cfg["metrics"])
        print(table.markdown())
        return table.exit_code
    raise UsageError(f"eval={cfg['mode']}: unknown; there are offline, closed_loop and compare")


def evaluate_offline(cfg: Mapping[str, Any]) -> int:
    """Replay the episodes of a shard directory and write the results."""
    out, started = Path(cfg["run_dir"]), time.time()
    shards = ShardSet(cfg["data"]["root"])
    policy = _load_policy(cfg)
    if policy is None:
        contract = shards.contract.updated(cfg["contract"])
    else:
        contract = _policy_contract(policy, cfg)
        _check_data(contract, shards, cfg)
    rules = _rules(cfg["keyframe_rules"], contract, allow=cfg["allow_mismatch"])
    chosen, skipped = _choose(shards, cfg["episodes"])
    planner = _planner(
        cfg,
        PlannerContext(
            contract=contract,
            rules=rules,
            closed_loop=False,
            model=None if policy is None else policy.planner,
            demonstrations=lambda: (shards.episode(index) for index in shards.episode_indices()),
        ),
    )
    journal = _journal(out, cfg, contract, rules)
    todo = [index for index in chosen if index not in journal.finished]
    stride = cfg["eval_stride"]
    total = sum(-(-shards.num_frames(index) // max(1, stride)) for index in todo)
    with tqdm(total=total, unit="step", desc="offline rollout", disable=None) as bar:
        hook, frames = _hooks(cfg, out, bar)
        rollouts = rollout_offline(
            (shards.episode(index) for index in todo),
            planner,
            contract,
            rules,
            eval_stride=stride,
            batch_size=cfg["batch_size"],
            memory_source=cfg["memory_source"],
            seed=cfg["seed"],
            retries=cfg["retries"],
            boundary_width=cfg["boundary_width"],
            casefold=cfg["casefold"],
            full_trace=cfg["full_trace"],
            on_step=hook,
        )
        _record(journal, rollouts)
    dataset = {
        "name": shards.name,
        "root": str(shards.root),
        "camera_keys": list(contract.cameras.camera_keys),
        "requested": len(chosen) + len(skipped),
        "evaluated": len(chosen),
        "skipped": skipped,
        "eval_stride": stride,
        "boundary_width": cfg["boundary_width"],
    }
    summary = write_offline(
        out,
        journal,
        episodes=chosen,
        facts=_facts(cfg, contract, rules, dataset, started=started, resumed=len(chosen) - len(todo)),
        casefold=cfg["casefold"],
        seed=cfg["seed"],
    )
    _close(cfg, out, journal, frames, chosen)
    _print(summary, ("normalized_accuracy", "boundary_accuracy", "keyframe_f1", "memory_recall"))
    return 0


def evaluate_closed_loop(cfg: Mapping[str, Any]) -> int:
    """Play tabletop episodes and write the results."""
    out, started, env = Path(cfg["run_dir"]), time.time(), cfg["env"]
    world_class(env["task"])  # a mistyped task is named before anything else
    policy = _load_policy(cfg)
    if policy is None:
        layout = CameraLayout(camera_keys=CAMERA_KEYS, view_width=TABLETOP_SLOT, view_height=TABLETOP_SLOT)
        contract = Contract(fps=float(FPS), cameras=layout).updated(cfg["contract"])
    else:
        contract = _policy_contract(policy, cfg)
        _check_environment(contract, cfg)
    given = cfg["keyframe_rules"]
    if given is None and not contract.rules_hash:
        given = str(CONF_DIR / "rules" / f"{env['task']}.json")
    rules = _rules(given, contract, allow=cfg["allow_mismatch"])
    if env["num_episodes"] < 1:
        raise UsageError(f"env.num_episodes: {env['num_episodes']}, must be at least 1")
    chosen = list(range(env["first_episode"], env["first_episode"] + env["num_episodes"]))
    planner = _planner(
        cfg,
        PlannerContext(
            contract=contract,
            rules=rules,
            closed_loop=True,
            model=None if policy is None else policy.planner,
            demonstrations=lambda: _demonstrations(env),
        ),
    )
    journal = _journal(out, cfg, contract, rules)
    journal.forget(
        index for index, entry in journal.finished.items() if entry["extra"]["outcome"] == "planner_error"
    )
    todo = [index for index in chosen if index not in journal.finished]
    with tqdm(total=len(todo), unit="episode", desc="closed loop", disable=None) as bar:
        hook, frames = _hooks(cfg, out, None)
        rollouts = rollout_closed_loop(
            _plays(env, todo),
            planner,
            contract,
            planner_stride=cfg["planner_stride"],
            batch_size=cfg["batch_size"],
            memory_source=cfg["memory_source"],
            seed=cfg["seed"],
            retries=cfg["retries"],
            full_trace=cfg["full_trace"],
            reference=cfg["reference"],
            on_step=hook,
        )
        _record(journal, rollouts, bar)
    dataset = {
        "name": f"tabletop_{env['task']}_{env['split']}",
        "camera_keys": list(contract.cameras.camera_keys),
        "requested": len(chosen),
        "evaluated": len(chosen),
        "skipped": [],
        "planner_stride": cfg["planner_stride"],
    }
    summary = write_closed_loop(
        out,
        journal,
        episodes=chosen,
        facts=_facts(cfg, contract, rules, dataset, started=started, resumed=len(chosen) - len(todo)),
        seed=cfg["seed"],
    )
    if summary["valid"]:
        _close(cfg, out, journal, frames, chosen)
    _print(summary, ("success_rate", "parse_failure_rate", "expert_agreement"))
    if not summary["valid"]:
        raise MemerError(
            f"{out}: {summary['outcomes'].get('planner_error', 0)} of {len(chosen)} episodes were lost to "
            f"planner errors; run again with run_id={cfg['run_id']} to repeat them"
        )
    return 0


def _load_policy(cfg: Mapping[str, Any]) -> Policy | None:
    return None if cfg["policy"] is None else load_policy(cfg["policy"], device=cfg["device"])


def _policy_contract(policy: Policy, cfg: Mapping[str, Any]) -> Contract:
    """The artifact's contract, with overrides only where the user allows a mismatch by name."""
    contract = policy.contract.updated(cfg["contract"])
    check_rate(policy.contract, fps=contract.fps, subsample=contract.windows.frame_subsample)
    policy.contract.check_same(
        contract, what=f"{cfg['policy']} and this evaluation's contract.*", allow=cfg["allow_mismatch"]
    )
    return contract


def _check_data(contract: Contract, shards: ShardSet, cfg: Mapping[str, Any]) -> None:
    """What shards fix: clock and pictures. All else is chosen when they are read."""
    stored = contract.updated({"fps": shards.contract.fps, "cameras": shards.contract.to_dict()["cameras"]})
    contract.check_same(
        stored, what=f"policy {cfg['policy']} and shards {shards.root}", allow=cfg["allow_mismatch"]
    )


def _check_environment(contract: Contract, cfg: Mapping[str, Any]) -> None:
    where = f"policy {cfg['policy']} and environment {cfg['env']['task']}"
    contract.check_same(contract.updated({"fps": float(FPS)}), what=where, allow=cfg["allow_mismatch"])
    missing = [key for key in contract.cameras.camera_keys if key not in CAMERA_KEYS]
    if missing:
        raise MemerError(
            f"contract mismatch, {where}: cameras.camera_keys: no camera {missing[0]!r}; "
            f"available: {', '.join(CAMERA_KEYS)}"
        )


def _rules(given: str | None, contract: Contract, *, allow: Sequence[str]) -> KeyframeRules:
    """The rules asked for, else the shipped ones that the contract's hash names."""
    if given == "all_last":
        rules = KeyframeRules.all_last()
    elif given is not None:
        rules = KeyframeRules.from_file(given)
    else:
        shipped = [KeyframeRules.from_file(path) for path in sorted((CONF_DIR / "rules").glob("*.json"))]
        named = [rules for rules in shipped if rules.rules_hash == contract.rules_hash]
        if not named:
            raise UsageError(
                "keyframe_rules: the contract names no shipped rules; give keyframe_rules=FILE or all_last"
            )
        return named[0]
    if contract.rules_hash and rules.rules_hash != contract.rules_hash and "rules_hash" not in allow:
        raise MemerError(
            f"contract mismatch, keyframe_rules={given} and policy: rules_hash: {rules.rules_hash!r} against "
            f"{contract.rules_hash!r}; if meant, name the field in allow_mismatch=[rules_hash]"
        )
    return rules


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


def _planner(cfg: Mapping[str, Any], context: PlannerContext) -> Planner:
    return instantiate(cfg["planner"], where="planner", context=context)  # type: ignore[no-any-return]


def _plays(env: Mapping[str, Any], indices: Iterable[int]) -> Iterator[ClosedLoopEpisode]:
    for index in indices:
        yield ClosedLoopEpisode(
            index,
            make_env(
                env["task"],
                split=env["split"],
                index=index,
                seed=env["seed"],
                perturb=env["perturb"],
                frame_size=env["frame_size"],
            ),
            make_controller(env["task"]),
        )


def _demonstrations(env: Mapping[str, Any]) -> Iterator[Episode]:
    for index in range(NUM_DEMONSTRATIONS):
        yield demonstrate(env["task"], split="train", index=index, seed=env["seed"], frame_size=16)


def _journal(out: Path, cfg: Mapping[str, Any], contract: Contract, rules: KeyframeRules) -> RolloutJournal:
    settings = {key: value for key, value in cfg.items() if key not in _FREE_SETTINGS}
    return RolloutJournal(
        out, settings={**settings, "contract": contract.to_dict(), "rules_hash": rules.rules_hash}
    )


def _hooks(cfg: Mapping[str, Any], out: Path, bar: Any) -> tuple[StepHook, FrameLog | None]:
    wanted = cfg["frames"]["episodes"] > 0
    frames = FrameLog(out / "frames", every=cfg["frames"]["every"]) if wanted else None

    def hook(episode_index: int, session: PlannerSession, record: StepRecord) -> None:
        if bar is not None:
            bar.update()
        if frames is not None:
            frames(episode_index, session, record)

    return hook, frames


def _record(journal: RolloutJournal, rollouts: Iterable[EpisodeRollout], bar: Any = None) -> None:
    successes = done = 0
    for rollout in rollouts:
        journal.append(rollout)
        if bar is not None:
            done += 1
            successes += rollout.extra.get("outcome") == "success"
            bar.update()
            bar.set_postfix_str(f"success {successes}/{done}")


def _facts(
    cfg: Mapping[str, Any],
    contract: Contract,
    rules: KeyframeRules,
    dataset: Mapping[str, Any],
    *,
    started: float,
    resumed: int,
) -> dict[str, Any]:
    return {
        "name": cfg["name"],
        "run_id": cfg["run_id"],
        "group": cfg["group"],
        "policy": cfg["policy"],
        "memory_form": contract.memory_form,
        "memory_source": cfg["memory_source"],
        "planner": cfg["planner"]["_target_"].rsplit(".", 1)[-1],
        "config": {key: value for key, value in cfg.items() if key != "run_dir"},
        "contract": contract.to_dict(),
        "dataset": {**dataset, "rules_hash": rules.rules_hash},
        "runtime": {
            **runtime_facts(started),
            "resumed_episodes": resumed,
            "device": cfg["device"],
            "batch_size": cfg["batch_size"],
        },
    }


def _close(
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


def _print(summary: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        value, interval = summary.get(name), summary["ci"].get(name)
        shown = "-" if value is None else f"{value:.4f}"
        if interval is not None:
            shown += f"  [{interval[0]:.4f}, {interval[1]:.4f}]"
        print(f"{name:24s} {shown}")


if __name__ == "__main__":
    main()
