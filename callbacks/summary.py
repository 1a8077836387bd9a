"""What a training run leaves at its end: `summary.json` with flat figures, and `report.html`."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from callbacks.metrics_csv import METRICS_FILE
from callbacks.throughput import Throughput
from callbacks.wandb_runs import merge_table, to_summary, wandb_run
from memer.intervals import wilson_interval
from memer.report import read_curves, write_report
from memer.summary import is_number, update_summary


class RunSummary(pl.Callback):
    """Writes the summary when fit has ended well; an interrupted or failed run keeps none.

    Figures: the last value of everything logged, steps, parameters, throughput of the whole fit, for every
    merged model `merge/alpha_0.80/<score>`, and for the chosen one `export/alpha` and `export/<score>`. A
    success rate has its interval. The W&B summary gets the same names.

    Args:
        run_dir: where to write; None is the trainer's default root.
        report: also make report.html.
    """

    def __init__(self, *, run_dir: Path | str | None = None, report: bool = True) -> None:
        self.run_dir = run_dir
        self.report = report
        self._started = 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the time."""
        self._started = time.time()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """After every callback's end of fit, so that merges and exports are there."""
        if stage != "fit" or trainer.interrupted or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        folder = Path(self.run_dir or trainer.default_root_dir)
        metrics = run_figures(trainer, pl_module, folder)
        runtime = {
            "seconds": round(time.time() - self._started, 3),
            "device": str(pl_module.device),
            "precision": str(trainer.precision),
            "world_size": trainer.world_size,
        }
        update_summary(folder, metrics=metrics, ci=success_intervals(metrics), runtime=runtime)
        run = wandb_run(trainer)
        if run is not None:
            to_summary(run, metrics)
        if self.report:
            write_report(folder)


def run_figures(trainer: pl.Trainer, pl_module: pl.LightningModule, folder: Path) -> dict[str, float]:
    """Flat figures of a finished fit."""
    logged: Mapping[str, Any] = trainer.callback_metrics
    figures: dict[str, float] = {}
    if (folder / METRICS_FILE).exists():
        # A run that was resumed after its last validation does not repeat it.
        curves = read_curves(folder / METRICS_FILE)
        figures = {name: points[-1][1] for name, points in curves.items() if name.startswith("val/")}
    figures |= {
        name: float(value) for name, value in logged.items() if isinstance(value, Tensor | float | int)
    }
    throughput = next((c for c in trainer.callbacks if isinstance(c, Throughput)), None)  # type: ignore[attr-defined]
    if throughput is not None:
        figures |= {f"throughput/{name}": value for name, value in throughput.figures().items()}
    parameters = list(pl_module.parameters())
    figures |= {
        "steps": trainer.global_step,
        "parameters": sum(p.numel() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
    }
    table = merge_table(folder)
    if table is not None:
        columns, rows = table
        for row in rows:
            values = dict(zip(columns, row, strict=True))
            name = values.pop("folder", f"alpha_{values.get('alpha')}")
            scores = {key: float(v) for key, v in values.items() if is_number(v)}
            figures |= {f"merge/{name}/{key}": value for key, value in scores.items()}
            if values.pop("best", False):
                figures |= {f"export/{key}": value for key, value in scores.items()}
    return figures


def success_intervals(metrics: Mapping[str, float]) -> dict[str, tuple[float, float] | None]:
    """Wilson intervals of every `<place>/success` that has `<place>/episodes` beside it."""
    intervals = {}
    for name, value in metrics.items():
        place, _, last = name.rpartition("/")
        count = metrics.get(f"{place}/episodes")
        if last == "success" and count:
            intervals[name] = wilson_interval(round(value * count), round(count))
    return intervals
