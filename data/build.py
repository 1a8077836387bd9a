"""`python -m data.build source=... out=DIR`: any source to shards or to the public form (a root).

`python -m data.build stage=features root=SHARDS out=DIR` makes features of shards, `stage=plans` the plans
that a world model imagines for them; their configs are conf/features.yaml and conf/plans.yaml.
"""

import sys
from collections.abc import Mapping
from typing import Any

from conf.instantiate import instantiate
from conf.launch import hydra_root
from data.features import FeatureSettings, build_features, build_plans
from data.qwen_format import export_qwen
from data.shards import BuildSettings, ShardSet, build_shards
from data.sources import Source, json_hash
from data.views.base import FollowsPlans, PlanView
from data.views.planner import rules_from
from memer.artifact import Provenance
from memer.contract import Contract
from memer.episode import Segment
from memer.errors import UsageError
from memer.plan_parts import load_parts


@hydra_root("build", run_dir=False)
def main(cfg: dict[str, Any]) -> int:
    """Build what the config asks for and print what was made."""
    if cfg["stage"] != "shards":
        raise UsageError(f"stage: {cfg['stage']!r}, must be shards, features or plans")
    if cfg["format"] not in ("shards", "qwen"):
        raise UsageError(f"format: {cfg['format']!r}, must be shards or qwen")
    chosen = cfg["view"]["rules"]
    rules = None if chosen is None else rules_from(chosen)  # a typo must show before the long work
    layout = instantiate(cfg["cameras"], where="cameras")
    source: Source = instantiate(cfg["source"], where="source")
    labeler = instantiate(cfg["labels"], where="labels")
    stray = sorted(set(getattr(labeler, "episodes", ())) - set(source.indices()))
    if stray:
        print(f"warning: labels name {len(stray)} episodes that {source.name} lacks, first {stray[0]}")
    shared: dict[str, Any] = {
        "labeler": labeler,
        "episodes": cfg["episodes"],
        "num_workers": cfg["num_workers"],
        "inputs": {"source": cfg["source"], "labels": cfg["labels"]},
        "progress": cfg["progress"],
    }
    if cfg["format"] == "qwen":
        if rules is None:
            raise UsageError("view.rules: missing; a rule file or all_last decides the keyframe positions")
        view = instantiate(cfg["view"], where="view")
        repo_id = cfg["qwen"]["repo_id"]
        made = export_qwen(
            source, out=cfg["out"], cameras=layout, view=view, mode=cfg["mode"], repo_id=repo_id, **shared
        )
        print("\n".join(qwen_summary(made, out=cfg["out"])))
        return 0
    settings = BuildSettings(
        cameras=layout,
        mode=cfg["mode"],
        max_frames_per_part=cfg["max_frames_per_part"],
        max_shard_bytes=cfg["max_shard_mib"] * 1024**2,
    )
    manifest = build_shards(source, out=cfg["out"], settings=settings, labels=_label_name(labeler), **shared)
    print("\n".join(summary(manifest, out=cfg["out"])))
    if rules is not None:
        segments = [[Segment(*row) for row in episode["segments"]] for episode in manifest["episodes"]]
        print("\n".join(rules_summary(rules.report(segments))))
    return 0


@hydra_root("features", run_dir=False)
def features(cfg: dict[str, Any]) -> int:
    """Compute latents and text embeddings of shards and print what was made."""
    shards = ShardSet(cfg["root"])
    view = instantiate(cfg["view"], where="view").bind(shards.contract)
    if not isinstance(view, PlanView):
        raise UsageError("view: its samples hold no latents; choose view=visual_planner or view=executor")
    if isinstance(view, FollowsPlans) and view.plan_source != "real":
        raise UsageError("view.plan_source: features hold the latents of real plans; leave it at real")
    encoder = cfg["text_encoder"]
    settings = FeatureSettings(
        dtype=cfg["dtype"],
        batch_size=cfg["batch_size"],
        cache_bytes=cfg["cache_mib"] * 1024**2,
        device=cfg["device"],
    )
    manifest = build_features(
        shards,
        out=cfg["out"],
        view=view,
        codec=instantiate(cfg["codec"], where="codec", settings=view.plan.codec),
        text_encoder=None
        if encoder is None
        else instantiate(encoder, where="text_encoder", settings=view.plan.text),
        settings=settings,
        episodes=cfg["episodes"],
        progress=cfg["progress"],
    )
    clips = sum(len(keys) for row in manifest["episodes"] for keys in row["keys"].values())
    print(
        f"{cfg['out']}: {len(manifest['episodes'])} episodes, {clips} clips, "
        f"{sum(manifest['files'].values()) / 1e6:.1f} MB"
    )
    return 0


@hydra_root("plans", run_dir=False)
def plans(cfg: dict[str, Any]) -> int:
    """Let a world model imagine the segments of shards and print what was made."""
    shards, folder = ShardSet(cfg["root"]), cfg["visual"]
    if not isinstance(folder, str):
        raise UsageError(f"visual: {folder!r}, must be the folder of an exported world model")
    (planner,) = load_parts({"visual": folder}, device=cfg["device"], steps=cfg["steps"]).values()
    manifest = build_plans(
        shards,
        out=cfg["out"],
        planner=planner,
        name=f"{json_hash(Provenance.load(folder).files)[:16]}, {planner.steps} steps",
        contract=Contract.load(folder),
        episodes=cfg["episodes"],
        progress=cfg["progress"],
    )
    print(
        f"{cfg['out']}: plans of {len(manifest['episodes'])} episodes, "
        f"{sum(manifest['files'].values()) / 1e6:.1f} MB"
    )
    return 0


def _label_name(labeler: object) -> str:
    return type(labeler).__name__.removesuffix("Labels").lower()


def summary(manifest: Mapping[str, Any], *, out: str) -> list[str]:
    """What was made, in a few lines."""
    size_mb = sum(shard["bytes"] for shard in manifest["shards"]) / 1e6
    unlabelled = manifest["num_frames"] - manifest["num_labelled_frames"]
    lines = [
        f"{out}: {manifest['num_episodes']} episodes, {manifest['num_frames']} frames "
        f"({unlabelled} unlabelled), {manifest['num_images']} images, {len(manifest['shards'])} shards, "
        f"{size_mb:.1f} MB"
    ]
    lines += [f"left out: episode {index}: {reason}" for index, reason in manifest["skipped"].items()]
    lines += [finding_line(finding) for finding in manifest["source_report"].get("findings", [])]
    return lines


def finding_line(finding: Mapping[str, Any]) -> str:
    """One kind of finding of a source: how often, the first one's words, and where."""
    first = finding["first"][0]
    times = f" ({finding['count']} times)" if finding["count"] > 1 else ""
    place = f", first in episode {first['episode']}" if first["episode"] is not None else ""
    return f"{finding['severity']}: {first['value']}{place}{times}; {first['advice']}"


def qwen_summary(manifest: Mapping[str, Any], *, out: str) -> list[str]:
    """What was exported, with the histograms to look at before training."""
    histograms = manifest["histograms"]
    lines = [
        f"{out}: {manifest['num_records']} records, {manifest['num_pictures']} pictures "
        f"({manifest['num_decoded']} decoded now), {histograms['skipped_unlabelled']} steps without a label, "
        f"{histograms['dropped_keyframes']} keyframes before the window's grid"
    ]
    lines += [f"left out: episode {index}: {reason}" for index, reason in manifest["skipped"].items()]
    lines += [finding_line(finding) for finding in manifest["source_report"].get("findings", [])]
    for name in ("labels", "positions", "memory_images"):
        counts = ", ".join(f"{key}: {count}" for key, count in histograms[name].items())
        lines.append(f"{name.replace('_', ' ')}: {counts}")
    return lines


def rules_summary(report: Mapping[str, Any]) -> list[str]:
    """The keyframe report as a table."""
    width = max([len(label) for label in report["labels"]] + [5])
    lines = [f"{'label':{width}}  segments  keyframes  rule"]
    for label, row in report["labels"].items():
        rule = row["rule"] or f"no rule, default {row['select']}"
        lines.append(f"{label:{width}}  {row['segments']:8d}  {row['selected']:9d}  {rule}")
    if report["unused"]:
        lines.append("rules that matched nothing: " + "; ".join(report["unused"]))
    return lines


if __name__ == "__main__":
    # Each stage has a config: two need neither source nor cameras, which shards cannot do without.
    stages = {"stage=features": features, "stage=plans": plans}
    next((stages[word] for word in sys.argv[1:] if word in stages), main)()
