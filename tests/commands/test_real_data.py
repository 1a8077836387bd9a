"""Real robot episodes through the whole way: build, train, merge, export, evaluate on held-out episodes."""

import json
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT, check, run_in

pytestmark = pytest.mark.slow

DATA = ROOT.parent / "shared" / "data"


def train_and_evaluate(folder: Path, *, train: str, held_out: str) -> dict[str, object]:
    check(
        run_in(
            folder,
            "train.py",
            "experiment=memer_tiny",
            "view.rules=all_last",
            "data.train.demos.root=shards",
            f"data.train.demos.episodes={train}",
            "data.val.demos.root=shards",
            f"data.val.demos.episodes={held_out}",
            "data.batch_size=4",
            "trainer.limit_val_batches=1",
            "callbacks.samples.count=1",
            "callbacks.merge.alphas=[0.8,1.0]",
            "max_steps=2",
            "validate_every=2",
            "run_id=run",
        )
    )
    run = folder / "runs" / "memer_tiny" / "run"
    assert (run / "merged" / "alpha_1.00" / "model.safetensors").exists()
    check(
        run_in(
            folder,
            "eval.py",
            "eval=offline",
            f"policy={run / 'export'}",
            "data.root=shards",
            f"episodes={held_out}",
            "eval_stride=30",
            "run_id=scored",
        )
    )
    scored = folder / "runs" / "eval" / "scored"
    assert "data:image" in (scored / "report.html").read_text()
    summary: dict[str, object] = json.loads((scored / "summary.json").read_text())
    return summary


@pytest.mark.skipif(not (DATA / "cr5_banana").exists(), reason="real episodes are not beside the checkout")
def test_cr5_a_partial_set_with_drifting_clocks(tmp_path: Path) -> None:
    built = check(
        run_in(
            tmp_path,
            "-m",
            "data.build",
            "source=lerobot",
            f"source.root={DATA / 'cr5_banana' / 'lerobot_data'}",
            "labels=gripper",
            "labels.names=[pick up the banana,carry the banana to the plate,release the banana and retreat]",
            "cameras.camera_keys=[observation.images.top]",
            "cameras.view_width=64",
            "cameras.view_height=64",
            "episodes=[28,51,73]",
            "num_workers=0",
            "out=shards",
        )
    )
    told = built.stdout + built.stderr
    assert "73 of 81" in told or "73 episodes" in told, "absent episodes are reported"
    assert "1.6" in told, "the largest deviation of the row clock (episode 28: 1.600 s) is reported"
    summary = train_and_evaluate(tmp_path, train="[28,51]", held_out="[73]")
    assert summary["dataset"]["evaluated"] == 1  # type: ignore[index]


@pytest.mark.skipif(not (DATA / "g1_bottle").exists(), reason="real episodes are not beside the checkout")
def test_g1_with_labels_from_a_file(tmp_path: Path) -> None:
    lengths = {29: 221, 30: 277}
    rows = ["episode,start,end,label"]
    for episode, length in lengths.items():
        rows += [f"{episode},0,100,reach for the bottle", f"{episode},100,{length},lift the bottle"]
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    check(
        run_in(
            tmp_path,
            "-m",
            "data.build",
            "source=lerobot",
            f"source.root={DATA / 'g1_bottle'}",
            "labels=file",
            "labels.path=labels.csv",
            "cameras.camera_keys=[observation.images.cam_high]",
            "cameras.view_width=64",
            "cameras.view_height=64",
            "episodes=[29,30]",
            "num_workers=0",
            "out=shards",
        )
    )
    summary = train_and_evaluate(tmp_path, train="[29]", held_out="[30]")
    assert summary["dataset"]["evaluated"] == 1  # type: ignore[index]
