"""`eval=map_wam`: oracles, exported models, what does not fit, continuing a stopped evaluation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import eval as evaluation
from conf.compose import compose
from memer.errors import MemerError
from memer.journal import RolloutJournal
from tests.models.plan_exports import export_executor, export_world_model, plan_contract


def run(run_dir: Path, *overrides: str) -> dict:
    """Run the command's function in this process and return its summary."""
    cfg = compose("eval", ["eval=map_wam", "num_demonstrations=2", *overrides, "run_id=test"])
    run_dir.mkdir(exist_ok=True)
    evaluation.main({**cfg, "run_dir": str(run_dir)})
    return json.loads((run_dir / "summary.json").read_text())


def chunks_of(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "chunks.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("latency_ms", "timings_ms")} for row in rows]


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exports")
    return {
        "visual": export_world_model(root / "cwm", plan_contract()),
        "current": export_world_model(root / "current", plan_contract(visual_plan="current_only")),
        "executor": export_executor(root / "wap", plan_contract()),
        "blind": export_executor(root / "blind", plan_contract(visual_plan="none")),
    }


def models(exports, *names: str) -> list[str]:
    roles = {"visual": "visual", "current": "visual", "executor": "executor", "blind": "executor"}
    few = ["env.num_episodes=1", "steps=1", "max_segment_steps=40", "tau=0.999", "window=16"]
    return [*few, *(f"{roles[name]}={exports[name]}" for name in names)]


def test_oracles_and_what_is_written(tmp_path):
    summary = run(tmp_path, "env.num_episodes=2")
    assert summary["success_rate"] == summary["metrics"]["success_rate"] == 1.0
    low, high = summary["ci"]["success_rate"]
    assert low == pytest.approx(1 / (1 + 1.96**2 / 2), abs=1e-3)  # Wilson, all of 2
    assert high == 1.0
    assert summary["outcomes"] == {"success": 2}
    assert summary["segments_mean"] == summary["asked_presses_mean"] == summary["replans_mean"] + 1
    assert (summary["gate_delay_mean"], summary["gate_miss_rate"]) == (0, 0)
    assert (summary["calibration"], summary["window"]) == ("alignment", 4)
    assert set(summary["latency_ms"]) == {"total", "act", "language", "visual", "prefill"}
    rows = chunks_of(tmp_path)
    assert len(rows) == summary["num_chunks"]
    episodes = json.loads((tmp_path / "episodes.json").read_text())
    assert [row["steps"] for row in episodes] == [
        sum(row["executed"] for row in rows if row["episode_index"] == index) for index in range(2)
    ]
    page = (tmp_path / "report.html").read_text()
    assert "Plans and progress" in page
    assert page.count("data:image") == sum(row["segments"] for row in episodes)
    assert not (tmp_path / "partial").exists()


def test_switches_of_oracles(tmp_path):
    few = "env.num_episodes=1"
    classified = run(
        tmp_path / "c", few, "oracle_contract.plan.progress_mode=classification", "language=table"
    )
    assert classified["calibration"] == "none"
    blind = run(tmp_path / "b", few, "visual=none")
    assert (blind["success_rate"], blind["contract"]["plan"]["visual_plan"]) == (1.0, "none")
    assert "data:image" in (tmp_path / "b" / "report.html").read_text()  # the real frames alone


@pytest.mark.parametrize(
    ("parts", "similarity"), [(("visual", "executor"), "latent_mse"), (("current", "executor"), "rgb_mae")]
)
def test_exported_models_play(tmp_path, exports, parts, similarity):
    summary = run(tmp_path, *models(exports, *parts), f"similarity={similarity}")
    kind = "current_only" if "current" in parts else "memory"
    assert summary["contract"]["plan"]["visual_plan"] == kind
    assert summary["num_episodes"] == 1
    assert (
        summary["contract"]["statistics"]
        == json.loads((exports["executor"] / "contract.json").read_text())["statistics"]
    )


def test_a_cold_executor_does_the_same_under_every_seed(tmp_path, exports):
    predicted = {}
    for temperature in ("0", "1.0"):
        for seed in (0, 1):
            out = tmp_path / f"{temperature}_{seed}"
            summary = run(out, *models(exports, "executor"), f"temperature={temperature}", f"seed={seed}")
            assert summary["config"]["temperature"] == float(temperature)
            predicted[temperature, seed] = [row["predicted"] for row in chunks_of(out)]
    assert predicted["0", 0] == predicted["0", 1]
    assert predicted["1.0", 0] != predicted["1.0", 1]


def test_a_stopped_evaluation_continues(tmp_path, monkeypatch):
    few = "env.num_episodes=2"
    run(tmp_path / "whole", few)
    append = RolloutJournal.append

    def stop_after_one(self, rollout):
        append(self, rollout)
        raise KeyboardInterrupt

    monkeypatch.setattr(RolloutJournal, "append", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", few)
    monkeypatch.setattr(RolloutJournal, "append", append)
    summary = run(tmp_path / "stopped", few)
    assert summary["runtime"]["resumed_episodes"] == 1
    assert chunks_of(tmp_path / "stopped") == chunks_of(tmp_path / "whole")
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary["metrics"], summary["ci"]) == (whole["metrics"], whole["ci"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.task=juggling"], "juggling"),
        (["env.num_episodes=0"], "env.num_episodes: 0"),
        (["replan=17"], "replan: 17, must be in 1..16"),
        (["visual=none", "calibration=alignment"], "use calibration=none"),
        (["window=many"], "window: 'many', must be auto or a number"),
        (["visual=table"], "visual: 'table'"),
        (["executor=none"], "executor: 'none'"),
        (["language=none"], "language: 'none'"),
        (["executor=/nowhere"], "/nowhere"),
        (["oracle_contract.plan.visual_plan=maybe"], "visual_plan: 'maybe'"),
        (["batch_size=0"], "batch_size: 0"),
        (["batch_size=x"], "batch_size: 'x', must be a whole number"),
        (["env.num_episodes=1.5"], "env.num_episodes: 1.5, must be a whole number"),
        (["env.first_episode=-1"], "env.first_episode: -1"),
        (["seed=-1"], "seed: -1"),
        (["steps=0"], "steps: 0, must be at least 1"),
        (["temperature=-1"], "temperature: -1, must be a number from 0 on"),
        (["temperature=nan"], "temperature: nan"),
        (["temperature=cold"], "temperature: 'cold'"),
        (["tau=2"], "tau: 2, must be a number between 0 and 1"),
        (["tau=x", "window=4"], "tau: 'x', must be a number"),
        (["window=0"], "window: 0, must be auto or a number"),
        (["num_demonstrations=0"], "num_demonstrations: 0, must be at least 1"),
        (["similarity=learned"], "similarity=learned: not built"),
        (["similarity=latent_mse"], "needs a visual codec"),
        (["update_rule=average"], "update_rule: 'average', must be average_nearest2"),
        (["max_segment_steps=1.5"], "max_segment_steps: 1.5"),
        (["check_every=x"], "check_every: 'x'"),
        (["visual=null"], "visual: None, must be oracle or the folder"),
        (["policy=/somewhere"], "policy: '/somewhere'"),
        (["oracle_contract.plan.executor_context=full_history"], "use visual=none"),
    ],
)
def test_mistakes_are_one_line(tmp_path, overrides, words):
    with pytest.raises(MemerError) as caught:
        run(tmp_path / "refused", *overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "refused" / "summary.json").exists()


@pytest.mark.parametrize(
    ("parts", "more", "words"),
    [
        (["executor"], ["visual=none"], "was trained with visual_plan 'memory'"),
        (["blind"], [], "one was given, but the contract says visual_plan 'none'"),
        (["executor"], ["contract.cameras.jpeg_quality=50"], "cameras.jpeg_quality: 90 against 50"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, exports, parts, more, words):
    with pytest.raises(MemerError, match=words):
        run(tmp_path / "refused", *models(exports, *parts), *more)


def test_an_export_under_the_wrong_role_is_refused(tmp_path, exports):
    with pytest.raises(MemerError, match=r"executor=.*is a ModelVisualPlanner"):
        run(tmp_path / "refused", f"executor={exports['visual']}")


class OtherTask:
    """A language planner that learned another task."""

    contract = replace(plan_contract(), subtasks=("swap the blocks",))

    def next(self, instruction, done, images):
        return "swap the blocks"


def test_a_language_planner_of_another_task_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("conf.evaluate.map_wam.load_parts", lambda *_, **__: {"language": OtherTask()})
    monkeypatch.setattr("conf.evaluate.map_wam.joint_contract", lambda *_, **__: plan_contract())
    with pytest.raises(
        MemerError, match=r"its 1 subtasks \(first 'swap the blocks'\) are none of task press_b"
    ):
        run(tmp_path / "refused", "language=/somewhere")


def test_a_device_that_does_not_exist_is_named(tmp_path, exports):
    with pytest.raises(MemerError, match="device: 'cdua', must be cpu or cuda"):
        run(tmp_path / "refused", *models(exports, "executor"), "device=cdua")
