"""summary.json and report.html at the end of a fit, and only then."""

import json
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.metrics_csv import MetricsCsv
from callbacks.summary import RunSummary
from callbacks.throughput import Throughput
from memer.compare import compare
from memer.summary import read_summary
from tests.callbacks.small_fit import OneWeight, fit


def test_a_finished_fit_leaves_flat_figures_and_a_report(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    rows = [{"alpha": 0.5, "folder": "alpha_0.50", "success": 0.25}]
    (tmp_path / "merged/table.json").write_text(json.dumps({"rows": rows}))
    fit(tmp_path, callbacks=[RunSummary(), Throughput()], logger=MetricsCsv(run_dir=tmp_path))
    figures = read_summary(tmp_path).metrics
    assert figures["steps"] == 12
    assert (figures["parameters"], figures["trainable_parameters"]) == (8, 1)
    # The weight shrinks by 0.8 per step; the last logged loss is that of step 12.
    assert figures["train/loss"] == pytest.approx(0.8**22)
    assert figures["val/loss"] == pytest.approx(0.8**20)
    assert figures["merge/alpha_0.50/success"] == 0.25
    assert figures["throughput/samples_per_s"] > 0
    assert compare([tmp_path]).columns == ("val/loss", "train/loss")
    page = (tmp_path / "report.html").read_text()
    assert "train/loss" in page
    assert "<polyline" in page


def test_a_failed_fit_leaves_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"):
        fit(tmp_path, model=OneWeight(fail_at=3), callbacks=[RunSummary()])
    assert not (tmp_path / "summary.json").exists()


def test_a_run_that_was_resumed_after_its_last_validation_keeps_its_figure(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=11, save_top_k=-1, filename="{step}")
    settings = {"logger": MetricsCsv(run_dir=tmp_path), "enable_checkpointing": True, "callbacks": [saving]}
    fit(tmp_path, steps=11, **settings)  # validates after 5 and 10 steps
    again = {**settings, "logger": MetricsCsv(run_dir=tmp_path), "callbacks": [saving, RunSummary()]}
    fit(tmp_path, steps=12, ckpt_path=str(tmp_path / "step=11.ckpt"), **again)
    figures = read_summary(tmp_path).metrics
    assert figures["steps"] == 12
    assert figures["val/loss"] == pytest.approx(0.8**20)
