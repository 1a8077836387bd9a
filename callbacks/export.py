"""Export what was trained as a folder that can be loaded by itself.

run_dir/export/                   the merged model that MergeCallback chose, or the trained weights
run_dir/exports/step_00000500/    the trained weights in mid-training, when asked for

A planner becomes a folder of its base's form (transformers, vLLM, `memer.artifact.load_policy`); a module
that saves its own model (`callbacks.whole.SavesModel`) decides on the form itself.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from callbacks.merge import MergeCallback
from callbacks.reload import check_reload
from callbacks.tuned import TunedModel
from callbacks.whole import SavesModel, WholeModel, gathered_weights
from memer.artifact import verify_artifact
from memer.errors import UsageError
from memer.folders import new_folders

log = logging.getLogger(__name__)


class ExportCallback(pl.Callback):
    """Writes artifacts on rank 0; each is complete, checked by loading it, and appears only then.

    Args:
        run_dir: where to write; None is the trainer's default root.
        every_n_steps: optimizer steps between exports in mid-training, each takes the model's size on disk; 0
            exports at the end only.
        keep_last: such exports kept, older ones are removed; 0 keeps all.
        check: load every export and compare its outputs with the model in memory; needs memory for one more
            float32 copy of the model.
    """

    def __init__(
        self,
        *,
        run_dir: Path | str | None = None,
        every_n_steps: int = 0,
        keep_last: int = 2,
        check: bool = True,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep_last", keep_last)):
            if value < 0:
                raise UsageError(f"ExportCallback.{name}: {value!r}, must be >= 0")
        self.run_dir = run_dir
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self.check = check
        self.path: Path | None = None
        self._last_step = -1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before training: is the base one that can be exported at all?"""
        self.path = None
        if stage == "fit" and trainer.is_global_zero and not isinstance(pl_module, SavesModel):
            TunedModel(pl_module, step=0)  # type: ignore[arg-type]  # a Lightning module, see TunedModule

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Export in mid-training, once per optimizer step that is due."""
        step = trainer.global_step
        if not self.every_n_steps or step == 0 or step % self.every_n_steps or step == self._last_step:
            return
        self._last_step = step
        weights = gathered_weights(trainer, pl_module)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            folder = self._root(trainer) / "exports"
            out = self._export(folder / f"step_{step:08d}", pl_module, weights, step=step)
            log.info("exported step %d to %s", step, out)
            if self.keep_last:
                for old in sorted(folder.glob("step_*"))[: -self.keep_last]:
                    shutil.rmtree(old)
        trainer.strategy.barrier("export")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Export the chosen merge, or what was trained."""
        weights = gathered_weights(trainer, pl_module)
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        out = self._root(trainer) / "export"
        merging = next((c for c in trainer.callbacks if isinstance(c, MergeCallback)), None)  # type: ignore[attr-defined]
        if merging is None:
            self._export(out, pl_module, weights, step=trainer.global_step)
        else:
            best = merging.merge(trainer, pl_module, weights).best
            with new_folders([out], replace=True) as (folder,):
                copy_artifact(best.folder, folder)
                if weights is None:  # the merge of a whole model was checked when it was written
                    tuned = TunedModel(pl_module, step=trainer.global_step)  # type: ignore[arg-type]
                    self._check_reload(folder, tuned)
        self.path = out
        log.info("exported to %s", out)

    def _export(
        self, out: Path, module: pl.LightningModule, weights: Mapping[str, Tensor] | None, *, step: int
    ) -> Path:
        if weights is not None:
            assert isinstance(module, SavesModel)
            return WholeModel(module, step=step, weights=weights).export(out, check=self.check)
        tuned = TunedModel(module, step=step)  # type: ignore[arg-type]
        return tuned.export(out, check=lambda hidden: self._check_reload(hidden, tuned))

    def _check_reload(self, folder: Path, tuned: TunedModel) -> None:
        if self.check:
            check_reload(folder, tuned)

    def _root(self, trainer: pl.Trainer) -> Path:
        return Path(self.run_dir or trainer.default_root_dir)


def copy_artifact(source: Path, folder: Path) -> None:
    """Copy an artifact after checking it; weights become hard links where the disk allows."""
    verify_artifact(source)
    for path in sorted(source.rglob("*")):
        target = folder / path.relative_to(source)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        elif path.suffix == ".safetensors":
            try:
                os.link(path, target)
            except OSError:
                shutil.copyfile(path, target)
        else:
            shutil.copyfile(path, target)
