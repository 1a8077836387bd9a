"""Merge the tuned weights with their base when training ends, once per alpha, and choose the best by a score.

    run_dir/tuned/              the tuned weights as they are (run_dir/adapter/ for LoRA; planners only)
    run_dir/merged/alpha_0.80/  a complete artifact per alpha
    run_dir/merged/table.json   alphas, scores and the choice

`python -m memer.merge --base BASE --tuned run_dir/tuned --alpha 0.8 --out DIR` gives the same weights again.
"""

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
from torch import Tensor

from callbacks.tuned import TunedModel
from callbacks.whole import SavesModel, WholeModel, check_has_base, gathered_weights
from memer.errors import MemerError, UsageError
from memer.folders import write_json
from memer.merge import alpha_name

log = logging.getLogger(__name__)

TABLE_FILE = "table.json"

#: Artifact folder -> metrics, e.g. a rollout of it.
Scorer = Callable[[Path], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRow:
    """One merged model.

    Attributes:
        alpha: share of the tuned weights.
        folder: its artifact.
        num_changed: tensors that training changed.
        metrics: what the scorer measured, empty without one.
    """

    alpha: float
    folder: Path
    num_changed: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """All merged models of a run.

    Attributes:
        rows: in the order of the alphas.
        best: the chosen one.
    """

    rows: tuple[MergeRow, ...]
    best: MergeRow


class MergeCallback(pl.Callback):
    """Merges at the end of fit, on rank 0, from files.

    Args:
        alphas: shares of the tuned weights, each in [0, 1]; without a scorer the first one is chosen.
        run_dir: where to write; None is the trainer's default root.
        scorer: measures an artifact folder; see `Scorer`.
        metric: key of the score that decides.
        mode: whether more or less of it is better.
        keep: `all` merged folders, or the `best` alone.
    """

    def __init__(
        self,
        alphas: Sequence[float] = (0.8,),
        *,
        run_dir: Path | str | None = None,
        scorer: Scorer | None = None,
        metric: str = "success",
        mode: Literal["max", "min"] = "max",
        keep: Literal["all", "best"] = "all",
    ) -> None:
        self.alphas = tuple(float(alpha) for alpha in alphas)
        unfit = [alpha for alpha in self.alphas if not 0 <= alpha <= 1]
        if not self.alphas or unfit or len(set(self.alphas)) < len(self.alphas):
            raise UsageError(
                f"MergeCallback.alphas: {list(self.alphas)}, must be different numbers between 0 and 1"
            )
        for name, value, accepted in (("mode", mode, ("max", "min")), ("keep", keep, ("all", "best"))):
            if value not in accepted:
                raise UsageError(f"MergeCallback.{name}: {value!r}, must be {' or '.join(accepted)}")
        self.run_dir = run_dir
        self.scorer = scorer
        self.metric = metric
        self.mode = mode
        self.keep = keep
        self.result: MergeResult | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before training: is the base one that can be exported at all?"""
        self.result = None
        if stage == "fit" and isinstance(pl_module, SavesModel):
            check_has_base(pl_module)
        elif stage == "fit" and trainer.is_global_zero:
            TunedModel(pl_module, step=0)  # type: ignore[arg-type]  # a Lightning module, see TunedModule

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Merge, score, choose."""
        weights = gathered_weights(trainer, pl_module)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self.merge(trainer, pl_module, weights)

    def merge(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, weights: Mapping[str, Tensor] | None
    ) -> MergeResult:
        """Do it once per fit; the export asks for it too, whichever callback comes first.

        Args:
            trainer: of the fit.
            pl_module: what was trained.
            weights: of `callbacks.whole.gathered_weights`.
        """
        if self.result is not None:
            return self.result
        run_dir = Path(self.run_dir or trainer.default_root_dir)
        outs = {alpha: run_dir / "merged" / alpha_name(alpha) for alpha in self.alphas}
        if weights is not None:
            assert isinstance(pl_module, SavesModel)
            whole = WholeModel(pl_module, step=trainer.global_step, weights=weights)
            merged = whole.merge(outs)
        else:
            tuned = TunedModel(pl_module, step=trainer.global_step)  # type: ignore[arg-type]
            folder = tuned.write(run_dir / ("adapter" if tuned.is_adapter else "tuned"))
            merged = [(r.alpha, r.out, r.num_changed) for r in tuned.merge(folder, outs)]
        rows = []
        for alpha, out, num_changed in merged:
            metrics = dict(self.scorer(out)) if self.scorer else {}
            log.info("merged alpha=%g into %s %s", alpha, out, metrics or "")
            rows.append(MergeRow(alpha=alpha, folder=out, num_changed=num_changed, metrics=metrics))
        best = max(rows, key=self._score) if self.scorer else rows[0]
        self.result = MergeResult(rows=tuple(rows), best=best)
        self._write_table(run_dir / "merged")
        if self.keep == "best":
            for row in rows:
                if row is not best:
                    shutil.rmtree(row.folder)
        return self.result

    def _score(self, row: MergeRow) -> float:
        value = row.metrics.get(self.metric)
        if value is None:
            raise MemerError(
                f"MergeCallback.metric: {self.metric!r} is not among the scores "
                f"{', '.join(sorted(row.metrics))}"
            )
        if math.isnan(value):
            return -math.inf
        return float(value) if self.mode == "max" else -float(value)

    def _write_table(self, folder: Path) -> None:
        assert self.result is not None
        table = {
            "metric": self.metric if self.scorer else None,
            "mode": self.mode,
            "best": self.result.best.alpha,
            "rows": [
                {
                    "alpha": row.alpha,
                    "folder": row.folder.name,
                    "num_changed": row.num_changed,
                    **{
                        name: None if math.isnan(value) else float(value)
                        for name, value in row.metrics.items()
                    },
                }
                for row in self.result.rows
            ],
        }
        write_json(folder / TABLE_FILE, table)
