import json
from pathlib import Path

import pytest
import torch

from tests.commands.conftest import SHORT, check, kill_after_a_checkpoint, run_in

pytestmark = pytest.mark.slow


def arguments(shards: Path, run_id: str, *more: str) -> list[str]:
    return [
        "train.py",
        *SHORT,
        f"data.train.demos.root={shards / 'train'}",
        f"data.val.demos.root={shards / 'val'}",
        "max_steps=12",
        "checkpoint_every=2",
        "validate_every=3",
        f"run_id={run_id}",
        *more,
    ]


def test_a_killed_run_goes_on_to_the_same_weights(shards: Path, tmp_path: Path) -> None:
    """kill -9 after the first checkpoint, the same command again: bit for bit the uninterrupted run."""
    check(run_in(tmp_path, *arguments(shards, "whole")))
    whole = tmp_path / "runs" / "memer_tabletop" / "whole"

    broken = tmp_path / "runs" / "memer_tabletop" / "broken"
    words = arguments(shards, "broken")
    kill_after_a_checkpoint(words, broken, cwd=tmp_path)
    assert not (broken / "export").exists()

    result = check(run_in(tmp_path, *words))
    assert "going on from" in result.stdout + result.stderr
    for name in ("tuned/model.safetensors", "export/model.safetensors"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name
    summary = json.loads((broken / "summary.json").read_text())
    assert summary["metrics"]["val/loss"] == pytest.approx(
        json.loads((whole / "summary.json").read_text())["metrics"]["val/loss"], abs=0
    )


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("max_step=3", 2, "unknown override 'max_step'"),
        ("data.train.demos.root=nowhere", 3, "nowhere"),
        ("view.rules=no_rules.json", 3, "no_rules.json"),
        ("contract.windows.frame_subsample=0", 2, "frame_subsample"),
        ("model.module.max_length=40", 1, "max_length=40"),
        pytest.param(
            "trainer=gpu",
            2,
            "trainer=cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so it is no mistake"),
        ),
    ],
)
def test_mistakes_are_one_line(shards: Path, tmp_path: Path, override: str, code: int, words: str) -> None:
    result = run_in(tmp_path, *arguments(shards, "mistake"), override)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert words in result.stderr.splitlines()[-1]


def test_a_base_that_is_not_there(shards: Path, tmp_path: Path) -> None:
    result = run_in(
        tmp_path, *arguments(shards, "base"), "model.tiny_base=null", "model.module.base=/no/base"
    )
    assert result.returncode == 3
    assert "/no/base" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
