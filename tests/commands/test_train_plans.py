"""World model and executor as a user trains them: kill and resume, exports, mistakes of one line."""

import json
from pathlib import Path

import pytest

from memer.artifact import verify_artifact
from models.cwm_files import load_world_model
from models.wap_files import load_executor
from tests.commands.conftest import SLOT, check, kill_after_a_checkpoint, run_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def presses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four training and two validation demonstrations of press_button."""
    folder = tmp_path_factory.mktemp("presses")
    for split, count in (("train", 4), ("val", 2)):
        words = ["source=tabletop", "source.task=press_button", f"source.split={split}"]
        words += [f"source.num_episodes={count}", "source.frame_size=32", "cameras.camera_keys=[base]"]
        check(run_in(folder, "-m", "data.build", *words, *SLOT, f"out={split}", "num_workers=0"))
    return folder


def arguments(shards: Path, experiment: str, run_id: str, *more: str) -> list[str]:
    return [
        "train.py",
        f"experiment={experiment}",
        f"data.train.demos.root={shards / 'train'}",
        f"data.val.demos.root={shards / 'val'}",
        "data.batch_size=2",
        "trainer.limit_val_batches=1",
        "callbacks.samples.count=1",
        "model.module.max_sampled=1",
        "max_steps=12",
        "checkpoint_every=2",
        "validate_every=3",
        f"run_id={run_id}",
        *more,
    ]


@pytest.mark.parametrize(
    ("experiment", "weights"),
    [
        ("map_wap_tabletop", "model.safetensors"),
        ("map_cwm_tabletop", "transformer/diffusion_pytorch_model.safetensors"),
    ],
)
def test_a_killed_run_goes_on_to_the_same_weights(
    presses: Path, tmp_path: Path, experiment: str, weights: str
) -> None:
    """kill -9 after the first checkpoint, the same command again: bit for bit the uninterrupted run."""
    check(run_in(tmp_path, *arguments(presses, experiment, "whole")))
    runs = tmp_path / "runs" / experiment
    words = arguments(presses, experiment, "broken")
    kill_after_a_checkpoint(words, runs / "broken", cwd=tmp_path)
    assert not (runs / "broken" / "export").exists()
    result = check(run_in(tmp_path, *words))
    assert "going on from" in result.stdout + result.stderr
    whole, broken = runs / "whole" / "export", runs / "broken" / "export"
    assert (broken / weights).read_bytes() == (whole / weights).read_bytes()
    assert verify_artifact(broken).step == 12
    figures, again = (
        json.loads((folder.parent / "summary.json").read_text())["metrics"] for folder in (whole, broken)
    )
    assert figures["val/loss"] == again["val/loss"]
    assert (whole.parent / "report.html").is_file()
    load = load_executor if experiment == "map_wap_tabletop" else load_world_model
    assert load(broken)[1].plan is not None


@pytest.mark.parametrize(
    ("experiment", "override", "code", "words"),
    [
        ("map_wap_tabletop", "contract.plan.visual_plans=none", 2, "unknown override"),
        ("map_wap_tabletop", "contract.plan.visual_plan=nothing", 2, "memory or current_only or none"),
        ("map_wap_tabletop", "model.module.video_base=/no/base", 3, "/no/base"),
        ("map_wap_tabletop", "model.module.settings.rope=spiral", 2, "sequential or shared"),
        ("map_wap_tabletop", "callbacks.merge={_target_: callbacks.merge.MergeCallback}", 2, "merge=null"),
        ("map_cwm_tabletop", "contract.plan.visual_plan=none", 2, "visual_plan: none"),
        ("map_cwm_tabletop", "+model.module.transformer.text_dim=9", 2, "fixed by contract.plan"),
        ("map_cwm_tabletop", "contract.plan.codec.channels=48", 2, "channels"),
    ],
)
def test_mistakes_are_one_line(
    presses: Path, tmp_path: Path, experiment: str, override: str, code: int, words: str
) -> None:
    result = run_in(tmp_path, *arguments(presses, experiment, "mistake"), override)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert words in result.stderr.splitlines()[-1]
