"""Rates and times of a fit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from callbacks.metrics_csv import MetricsCsv
from callbacks.throughput import Throughput, batch_counts, peak_memory_gib
from memer.errors import UsageError
from memer.report import read_curves
from tests.callbacks.small_fit import Batch, Batches, OneWeight, fit


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Timed(OneWeight):
    """A step takes 10 ms (the first two a second), a validation 300 ms."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.clock.now += 1.0 if self.global_step < 2 else 0.01
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.clock.now += 0.3


def test_rates_count_samples_tokens_and_frames_and_leave_warmup_and_validation_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("callbacks.throughput.time", clock)
    throughput = Throughput(window=4, warmup=2)
    fit(tmp_path, model=Timed(clock), callbacks=[throughput], logger=MetricsCsv(run_dir=tmp_path))
    # 2 samples, 100 tokens and 6 frames in every batch of 10 ms.
    figures = throughput.figures()
    assert figures["samples_per_s"] == pytest.approx(200)
    assert figures["tokens_per_s"] == pytest.approx(10_000)
    assert figures["frames_per_s"] == pytest.approx(600)
    assert figures["batch_ms"] == figures["batch_ms_p95"] == pytest.approx(10)
    assert figures["data_ms"] == pytest.approx(0)
    curves = read_curves(tmp_path / "metrics.csv")
    assert {name.removeprefix("throughput/") for name in curves if name.startswith("throughput/")} == {
        name for name in figures if name != "batch_ms_p95"
    }
    # From the sixth step on no batch of a window was slow: the validation at step 5 is in none.
    late = [y for x, y in curves["throughput/batch_ms"] if x >= 6]
    assert late
    assert late == pytest.approx([10] * len(late))


def test_waiting_for_data_is_part_of_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("callbacks.throughput.time", clock)
    original = Batches.__iter__

    def slow(self: Batches) -> Iterator[Batch]:
        for batch in original(self):
            clock.now += 0.02
            yield batch

    monkeypatch.setattr(Batches, "__iter__", slow)
    throughput = Throughput(warmup=3)
    fit(tmp_path, model=Timed(clock), callbacks=[throughput])
    figures = throughput.figures()
    assert figures["batch_ms"] == pytest.approx(30)
    assert figures["data_ms"] == pytest.approx(20)


def test_a_batch_says_what_it_holds() -> None:
    assert batch_counts(Batch(sample_ids=("a",), num_tokens=5, num_frames=2)) == (1, 5, 2)
    assert batch_counts([1, 2, 3]) == (3, 0, 0)
    assert batch_counts(object()) == (0, 0, 0)


def test_memory_is_in_gib() -> None:
    assert 0.05 < peak_memory_gib() < 500


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match=r"window: 1, must be >= 2"):
        Throughput(window=1)
    assert Throughput().figures() == {}
