"""metrics.csv keeps every value, whatever happens to the process."""

import csv
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.metrics_csv import MetricsCsv
from memer.report import read_curves
from tests.callbacks.small_fit import fit


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_new_names_extend_the_table(tmp_path: Path) -> None:
    logger = MetricsCsv(run_dir=tmp_path)
    logger.log_metrics({"a": torch.tensor(1.5), "epoch": 0}, step=1)
    logger.log_metrics({"b": 2}, step=2)
    assert rows(tmp_path / "metrics.csv") == [
        {"step": "1", "part": "1", "a": "1.5", "b": ""},
        {"step": "2", "part": "1", "a": "", "b": "2"},
    ]


def test_a_resumed_run_loses_nothing(tmp_path: Path) -> None:
    """Logged to step 52, resumed from 40: every value is in the file, the curve shows the later ones."""
    first = MetricsCsv(run_dir=tmp_path)
    for step in range(1, 53):
        first.log_metrics({"loss": float(step)}, step=step)
    second = MetricsCsv(run_dir=tmp_path)
    for step in range(41, 61):
        second.log_metrics({"loss": 1000.0 + step}, step=step)
    found = [(int(r["step"]), float(r["loss"])) for r in rows(tmp_path / "metrics.csv")]
    assert found == [(s, float(s)) for s in range(1, 53)] + [(s, 1000.0 + s) for s in range(41, 61)]
    curve = read_curves(tmp_path / "metrics.csv")["loss"]
    assert curve == [(s, float(s)) for s in range(1, 41)] + [(s, 1000.0 + s) for s in range(41, 61)]


def test_a_row_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    MetricsCsv(run_dir=tmp_path).log_metrics({"loss": 1.0}, step=1)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,1,0.")
    MetricsCsv(run_dir=tmp_path).log_metrics({"loss": 3.0}, step=3)
    assert [(r["step"], r["part"]) for r in rows(tmp_path / "metrics.csv")] == [("1", "1"), ("3", "2")]


def test_the_trainer_writes_it_and_a_resume_appends(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=8, save_top_k=-1)
    fit(tmp_path, logger=MetricsCsv(run_dir=tmp_path), callbacks=[saving], enable_checkpointing=True)
    before = rows(tmp_path / "metrics.csv")
    train = [row for row in before if row["train/loss"]]
    assert len(train) == 12
    assert float(train[0]["train/loss"]) == 1.0
    assert sum(bool(row["val/loss"]) for row in before) == 2
    fit(
        tmp_path,
        steps=14,
        logger=MetricsCsv(run_dir=tmp_path),
        ckpt_path=str(next((tmp_path / "c").glob("*step=8*"))),
    )
    after = rows(tmp_path / "metrics.csv")
    assert after[: len(before)] == before
    assert {row["part"] for row in after[len(before) :]} == {"2"}
    losses = [float(r["train/loss"]) for r in after[len(before) :] if r["train/loss"]]
    assert losses[:4] == [float(r["train/loss"]) for r in train[8:12]]
