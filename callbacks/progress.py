"""A progress bar that counts the batches of the whole run: training is one endless epoch."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar


class RunProgress(TQDMProgressBar):
    """Shows batches done of those that `max_steps` needs, also after a resume."""

    @property
    def total_train_batches(self) -> int:
        """Batches of the run on this rank."""
        return self.trainer.max_steps * self.trainer.accumulate_grad_batches

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Name the bar after what it counts, and start where the run stands."""
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description("train")
        self.train_progress_bar.n = trainer.fit_loop.epoch_loop.batch_progress.current.completed

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What is shown behind the bar, without the version number of a logger."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
