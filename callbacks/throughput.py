"""How fast training runs: samples, tokens and frames per second, time per batch, waiting for data, memory.

No device is synchronised for it: rates are taken over a window of batches, so that queued work evens out.
"""

import resource
import statistics
import sys
import time
from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch

from memer.errors import UsageError


class Throughput(pl.Callback):
    """Logs `throughput/*` with every training batch.

    Rates count all ranks, on the assumption that they are alike.

    Args:
        window: batches that a rate is taken over, >= 2.
        warmup: batches at the start (and after a resume) that the figures of the whole run leave out.
    """

    def __init__(self, *, window: int = 50, warmup: int = 3) -> None:
        for name, value, least in (("window", window, 2), ("warmup", warmup, 0)):
            if value < least:
                raise UsageError(f"Throughput.{name}: {value!r}, must be >= {least}")
        self.window = window
        self.warmup = warmup
        self._reset()

    def _reset(self) -> None:
        #: (end of the batch in s, seconds waited for data, samples, tokens, frames)
        self._recent: deque[tuple[float, float, int, int, int]] = deque(maxlen=self.window + 1)
        self._batch_s: list[float] = []
        self._data_s: list[float] = []
        self._totals = [0, 0, 0]
        self._seen = 0
        self._last_end: float | None = None
        self._waited = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting; forget what a former fit counted."""
        self._reset()
        self._last_end = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The batch is here: the wait for it is over."""
        assert self._last_end is not None
        self._waited = time.perf_counter() - self._last_end

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch and log the window's rates."""
        now = time.perf_counter()
        assert self._last_end is not None
        counts = batch_counts(batch)
        self._seen += 1
        if self._seen > self.warmup:
            self._batch_s.append(now - self._last_end)
            self._data_s.append(self._waited)
            self._totals = [total + count for total, count in zip(self._totals, counts, strict=True)]
        self._recent.append((now, self._waited, *counts))
        self._last_end = now
        if len(self._recent) < 2:
            return
        first, *rest = self._recent
        seconds = now - first[0]
        figures = {
            "samples_per_s": trainer.world_size * sum(r[2] for r in rest) / seconds,
            "tokens_per_s": trainer.world_size * sum(r[3] for r in rest) / seconds,
            "frames_per_s": trainer.world_size * sum(r[4] for r in rest) / seconds,
            "batch_ms": 1000 * seconds / len(rest),
            "data_ms": 1000 * sum(r[1] for r in rest) / len(rest),
            "peak_memory_gib": peak_memory_gib(),
        }
        pl_module.log_dict({f"throughput/{name}": value for name, value in figures.items()}, batch_size=1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Time spent on validation belongs to no training batch."""
        self._skip_pause()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """The window starts anew after a checkpoint, for the same reason."""
        self._skip_pause()

    def _skip_pause(self) -> None:
        self._recent.clear()
        self._last_end = time.perf_counter()

    def figures(self) -> dict[str, float]:
        """Figures of the whole fit without warm-up, validation and checkpoints; empty without batches."""
        if not self._batch_s:
            return {}
        seconds = sum(self._batch_s)
        names = ("samples_per_s", "tokens_per_s", "frames_per_s")
        rates = {name: total / seconds for name, total in zip(names, self._totals, strict=True)}
        ordered = sorted(self._batch_s)
        return {
            **rates,
            "batch_ms": 1000 * statistics.median(ordered),
            "batch_ms_p95": 1000 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
            "data_ms": 1000 * statistics.median(self._data_s),
            "peak_memory_gib": peak_memory_gib(),
        }


def batch_counts(batch: Any) -> tuple[int, int, int]:
    """(samples, tokens, distinct frames) of a batch; 0 for what it does not tell."""
    samples = getattr(batch, "sample_ids", None)
    return (
        len(samples) if samples is not None else len(batch) if hasattr(batch, "__len__") else 0,
        int(getattr(batch, "num_tokens", 0)),
        int(getattr(batch, "num_frames", 0)),
    )


def peak_memory_gib() -> float:
    """Highest memory so far, GiB: of the accelerator where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1024**3
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1024**3
