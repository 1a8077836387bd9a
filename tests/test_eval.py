import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import eval as evaluation
from conf.compose import compose
from conf.evaluate.handover import check_allowed
from data.shards import BuildSettings, build_shards
from data.tabletop import TabletopSource
from memer.artifact import load_policy, seal_artifact
from memer.contract import CameraLayout, Contract
from memer.errors import MemerError, SourceUnavailableError
from memer.journal import RolloutJournal
from memer.keyframes import KeyframeRules
from memer.policy import Policy
from models.tiny import make_tiny_base, planner_corpus

ROOT = Path(__file__).parents[1]
RULES = ROOT / "conf" / "rules" / "object_search.json"
LAYOUT = CameraLayout(camera_keys=("base", "wrist"), view_width=32, view_height=32)
NUM_EPISODES = 3

#: Names that the specification fixes for a row of predictions.jsonl.
ROW_FIELDS = {
    "episode_index",
    "timestep",
    "target_timestep",
    "instruction",
    "predicted_subtask",
    "target_subtask",
    "raw_correct",
    "normalized_correct",
    "parse_ok",
    "parse_error",
    "predicted_keyframe_positions",
    "target_keyframe_positions",
    "mapped_keyframe_indices",
    "invalid_keyframe_positions",
    "context_indices",
    "memory_indices_before",
    "memory_indices_after",
    "num_votes",
    "latency_ms",
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("eval") / "shards"
    source = TabletopSource(task="object_search", split="val", num_episodes=NUM_EPISODES, frame_size=32)
    build_shards(source, out=out, settings=BuildSettings(cameras=LAYOUT), num_workers=0, progress=False)
    return out


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    """An untrained model, exported: it answers nothing that parses, which is an answer too."""
    contract = Contract(
        fps=15.0,
        cameras=LAYOUT,
        min_pixels=1_024,
        max_pixels=4_096,
        rules_hash=KeyframeRules.from_file(RULES).rules_hash,
        model_family="qwen3_vl",
    )
    out = tmp_path_factory.mktemp("eval") / "artifact"
    make_tiny_base(
        out, corpus=planner_corpus(subtasks=["look"], instructions=["find"], prompt=contract.prompt)
    )
    seal_artifact(out, contract=contract, base_name="tiny", base_hash="", alpha=1.0, step=0)
    return out


def run(run_dir: Path, *overrides: str) -> dict[str, object]:
    """Run the command's function in this process and return its summary."""
    cfg = compose("eval", [*overrides, "run_id=test"])
    run_dir.mkdir(exist_ok=True)
    evaluation.main({**cfg, "run_dir": str(run_dir)})
    return json.loads((run_dir / "summary.json").read_text())


def rows_of(run_dir: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (run_dir / "predictions.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("latency_ms", "timings_ms")} for row in rows]


def offline(shards: Path, *overrides: str) -> list[str]:
    return ["eval=offline", f"data.root={shards}", "eval_stride=5", *overrides]


def test_oracle_scores_one_on_shards(tmp_path, shards):
    summary = run(tmp_path, *offline(shards, "planner=oracle", f"keyframe_rules={RULES}"))
    for name in ("raw_accuracy", "boundary_accuracy", "position_f1", "keyframe_f1", "keyframe_f1_tol"):
        assert summary[name] == summary["metrics"][name] == 1.0, name
        assert summary["ci"][name] == [1.0, 1.0]
    assert summary["memory_recall"] == summary["memory_recall_oracle"]
    assert summary["dataset"]["evaluated"] == summary["num_episodes"] == NUM_EPISODES
    assert summary["contract"]["cameras"]["view_width"] == 32
    rows = rows_of(tmp_path)
    assert set(rows[0]) | {"latency_ms"} >= ROW_FIELDS
    assert len(rows) == summary["num_steps"]
    episodes = json.loads((tmp_path / "episodes.json").read_text())
    assert [row["episode_index"] for row in episodes] == [0, 1, 2]
    assert sum(row["timesteps"] for row in episodes) == len(rows)
    labels = json.loads((tmp_path / "label_metrics.json").read_text())
    assert sum(row["support"] for row in labels["labels"].values()) == len(rows)
    for target, line in labels["confusion"].items():
        assert line == {target: labels["labels"][target]["support"]}
    assert (tmp_path / "report.html").stat().st_size > 10_000
    shown = {path.parent.name for path in (tmp_path / "frames").rglob("frame_*.jpg")}
    assert shown == {f"episode_{index:06d}" for index in range(NUM_EPISODES)}
    assert not (tmp_path / "partial").exists()


def test_baselines_rank_below_the_oracle(tmp_path, shards):
    rules = f"keyframe_rules={RULES}"
    majority = run(tmp_path / "majority", *offline(shards, "planner=majority", rules))
    noisy = run(tmp_path / "noisy", *offline(shards, "planner=noisy_oracle", rules))
    constant = run(tmp_path / "c", *offline(shards, "planner=constant", "planner.subtask=rest", rules))
    assert constant["raw_accuracy"] == 0.0
    assert 0.0 < majority["raw_accuracy"] < noisy["raw_accuracy"] < 1.0
    assert majority["keyframe_recall"] == 0.0
    bare = run(tmp_path / "bare", *offline(shards, "planner=no_positions", "planner.of=oracle", rules))
    assert (bare["raw_accuracy"], bare["position_recall"]) == (1.0, 0.0)


def test_artifact_runs_offline_and_equals_its_policy(tmp_path, shards, artifact):
    summary = run(
        tmp_path, *offline(shards, f"policy={artifact}", "episodes=[2]", "eval_stride=100", "batch_size=4")
    )
    assert summary["planner"] == "artifact"
    assert summary["dataset"]["rules_hash"] == KeyframeRules.from_file(RULES).rules_hash
    rows = rows_of(tmp_path)
    policy = load_policy(artifact)
    assert isinstance(policy, Policy)
    source = TabletopSource(task="object_search", split="val", num_episodes=NUM_EPISODES, frame_size=32)
    episode = source.episode(2)
    views = {key: list(frames.frames()) for key, frames in episode.cameras.items()}
    policy.reset(seed=0)
    for t in range(episode.num_frames):
        policy.session.instruction = episode.instruction_at(t)
        policy.observe({key: frames[t] for key, frames in views.items()})
        if t % 100 == 0:
            assert policy.infer().raw_text == rows[t // 100]["raw_text"] != ""


def test_closed_loop_of_the_oracle(tmp_path):
    summary = run(tmp_path, "eval=closed_loop", "planner=oracle", "env.num_episodes=2", "env.split=val")
    assert summary["success_rate"] == 1.0
    low, high = summary["ci"]["success_rate"]
    assert low == pytest.approx(1 / (1 + 1.96**2 / 2), abs=1e-3)  # Wilson, all of 2
    assert high == 1.0
    assert summary["retrieved"] == summary["optimal_path"] == summary["num_targets"] == 6
    assert summary["outcomes"] == {"success": 2}
    episodes = json.loads((tmp_path / "episodes.json").read_text())
    assert [row["success"] for row in episodes] == [True] * 2
    assert (tmp_path / "report.html").exists()


def test_closed_loop_of_an_artifact_with_and_without_memory(tmp_path, artifact):
    overrides = [f"policy={artifact}", "env.num_episodes=2", "planner_stride=260"]
    full = run(tmp_path / "full", "eval=closed_loop", *overrides)
    bare = run(tmp_path / "bare", "eval=closed_loop", "planner=no_memory", *overrides)
    assert full["parse_failure_rate"] == bare["parse_failure_rate"] == 1.0
    assert full["outcomes"] == {"timeout": 2}
    assert full["valid"] is True
    assert (full["planner"], bare["planner"]) == ("artifact", "no_memory")


def test_a_stopped_evaluation_continues_with_its_run_folder(tmp_path, shards, monkeypatch):
    overrides = offline(shards, "planner=noisy_oracle", f"keyframe_rules={RULES}")
    run(tmp_path / "whole", *overrides)
    append, appended = RolloutJournal.append, []

    def stop_after_one(self, rollout):
        append(self, rollout)
        appended.append(rollout.episode_index)
        raise KeyboardInterrupt

    monkeypatch.setattr(RolloutJournal, "append", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", *overrides)
    assert not (tmp_path / "stopped" / "summary.json").exists()
    monkeypatch.setattr(RolloutJournal, "append", append)
    summary = run(tmp_path / "stopped", *overrides)
    assert summary["runtime"]["resumed_episodes"] == 1
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "whole")
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary["metrics"], summary["ci"]) == (whole["metrics"], whole["ci"])


def refused(tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(MemerError) as caught:
        run(tmp_path / "refused", *overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_contract_mismatch_between_artifact_and_shards_is_named(tmp_path, shards, artifact):
    other = tmp_path / "other"
    shutil.copytree(artifact, other)
    contract = Contract.load(other)
    layout = {**contract.to_dict()["cameras"], "jpeg_quality": 80}
    changed = contract.updated({"cameras": layout, "fps": 10.0})
    seal_artifact(other, contract=changed, base_name="tiny", base_hash="", alpha=1.0, step=0)
    overrides = offline(shards, f"policy={other}", "episodes=[0]", "eval_stride=100")
    text = refused(tmp_path, *overrides)
    assert "cameras.jpeg_quality: 80 against 90" in text
    assert "fps: 10.0 against 15.0" in text
    assert "allow_mismatch" in text
    allowed = "allow_mismatch=[cameras.jpeg_quality,fps]"
    assert run(tmp_path / "allowed", *overrides, allowed)["num_episodes"] == 1


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        ("[camera.jpeg_qualty]", "contract field 'camera.jpeg_qualty', did you mean 'cameras.jpeg_quality'?"),
        ("[windows,keyframes_length]", "'keyframes_length', did you mean 'windows.keyframes_length'"),
        ("[colour]", "no contract field 'colour'; fields are fps, cameras, windows,"),
        ("fps", "'fps', must be a list such as"),
    ],
)
def test_a_mistyped_field_allows_nothing_silently(tmp_path, allowed, words):
    assert words in refused(tmp_path, "eval=closed_loop", "planner=oracle", f"allow_mismatch={allowed}")


def test_every_field_that_contracts_may_differ_in_can_be_named():
    check_allowed(["plan", "plan.canvas.height", "statistics.state.mean", "rules_hash", "plan.codec.weights"])


def test_contract_overrides_need_a_name_too(tmp_path, shards, artifact):
    overrides = offline(
        shards, f"policy={artifact}", "contract.windows.keyframes_length=2", "episodes=[0]", "eval_stride=100"
    )
    assert "windows.keyframes_length: 8 against 2" in refused(tmp_path, *overrides)
    summary = run(tmp_path / "allowed", *overrides, "allow_mismatch=[windows]")
    assert summary["contract"]["windows"]["keyframes_length"] == 2


def test_other_rules_than_the_contract_names_are_refused(tmp_path, shards, artifact):
    text = refused(tmp_path, *offline(shards, f"policy={artifact}", "keyframe_rules=all_last"))
    assert "rules_hash" in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["planner=oracle", "episodes=[1,77]", "keyframe_rules=all_last"], "episodes: 77 is not in"),
        (["planner=oracle"], "give keyframe_rules=FILE or all_last"),
        (["keyframe_rules=all_last"], "needs policy=DIR"),
        (
            ["planner=oracle", "keyframe_rules=all_last", "eval_stride=0"],
            "eval_stride: 0, must be at least",
        ),
        (["planner=oracle", "keyframe_rules=all_last", "memory_source=all"], "predicted, gt, none, shuffled"),
        (["planner=oracle", "keyframe_rules=/nowhere.json"], "/nowhere.json"),
        (["policy=/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_are_one_line(tmp_path, shards, overrides, words):
    assert words in refused(tmp_path, *offline(shards, *overrides))
    assert not (tmp_path / "refused" / "summary.json").exists()


def test_mistakes_in_closed_loop_are_one_line(tmp_path, artifact):
    assert "object_search" in refused(tmp_path, "eval=closed_loop", "planner=oracle", "env.task=juggling")
    assert "env.num_episodes: 0" in refused(
        tmp_path, "eval=closed_loop", "planner=oracle", "env.num_episodes=0"
    )
    other = tmp_path / "other"
    shutil.copytree(artifact, other)
    contract = Contract.load(other)
    layout = {**contract.to_dict()["cameras"], "camera_keys": ["base", "head"]}
    seal_artifact(
        other,
        contract=contract.updated({"cameras": layout}),
        base_name="tiny",
        base_hash="",
        alpha=1.0,
        step=0,
    )
    text = refused(tmp_path, "eval=closed_loop", f"policy={other}")
    assert "no camera 'head'; available: base, wrist" in text


def test_unknown_settings_of_a_continued_run_are_refused(tmp_path, shards):
    cfg = compose("eval", offline(shards, "planner=oracle", "keyframe_rules=all_last"))
    settings = {"eval_stride": 1, "contract": {}}
    RolloutJournal(tmp_path, settings=settings)
    with pytest.raises(MemerError, match="unfinished evaluation with other settings"):
        evaluation.main({**cfg, "run_dir": str(tmp_path)})


def test_every_planner_config_names_what_exists():
    for path in sorted((ROOT / "conf" / "planner").glob("*.yaml")):
        overrides = ["eval=closed_loop", f"planner={path.stem}"]
        if path.stem == "constant":
            overrides.append("planner.subtask=wait")
        node = compose("eval", overrides)["planner"]
        module, _, name = node["_target_"].rpartition(".")
        assert callable(getattr(sys.modules[module], name)), path.stem


def test_shards_that_are_not_there_are_unavailable(tmp_path):
    with pytest.raises(SourceUnavailableError, match="nowhere"):
        run(tmp_path / "run", *offline(Path("/nowhere"), "planner=oracle"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_ends_with_its_exit_code(tmp_path, shards):
    def command(*overrides: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "eval.py", *overrides, f"hydra.run.dir={tmp_path / 'run'}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    good = command(*offline(shards, "planner=oracle", "keyframe_rules=all_last"))
    assert good.returncode == 0, good.stderr
    assert "normalized_accuracy      1.0000" in good.stdout
    bad = command(*offline(shards, "planner=oracle", "keyframe_rules=all_last", "episodes=[77]"))
    assert bad.returncode == 2
    assert len([line for line in bad.stderr.splitlines() if line.startswith("error:")]) == 1
    assert "Traceback" not in bad.stderr
    missing = command("eval=offline", "planner=oracle")
    assert missing.returncode == 2
    assert "data.root is missing" in missing.stderr
