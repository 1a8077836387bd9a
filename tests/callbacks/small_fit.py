"""A fit of a second: real trainer, real planner samples, one weight."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from memer.contract import CameraLayout, Contract
from memer.prompts import answer_text
from memer.sample import PlannerQuestion, PlannerSample

CONTRACT = Contract(fps=15, cameras=CameraLayout(camera_keys=("base",), view_width=16, view_height=8))


def make_sample(step: int) -> PlannerSample:
    keys = [("set", 3, k) for k in (step, step + 5, step + 10)]
    frames = {key: np.full((8, 16, 3), key[2], dtype=np.uint8) for key in keys}
    question = PlannerQuestion(
        instruction="find <image> it",
        memory_keys=(keys[0],),
        recent_keys=tuple(keys[1:]),
        frames=frames,
    )
    return PlannerSample(
        sample_id=f"episode_000003_t{step:06d}",
        source="set",
        episode_index=3,
        step=step,
        question=question,
        subtask="look left",
        positions=(2,),
    )


@dataclass(frozen=True)
class Batch:
    """What the throughput callback counts."""

    sample_ids: tuple[str, ...]
    num_tokens: int
    num_frames: int

    def to(self, *args: Any, **kwargs: Any) -> "Batch":
        return self


class Batches(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield Batch(sample_ids=("a", "b"), num_tokens=100, num_frames=6)


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.contract = CONTRACT

    def example_samples(self, count: int) -> list[PlannerSample]:
        return [make_sample(10 * k) for k in range(count)]

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(Batches(), batch_size=None)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader([Batch(sample_ids=("v",), num_tokens=9, num_frames=1)], batch_size=None)


class OneWeight(pl.LightningModule):
    """Loss falls from 1; fails at a step when told to."""

    def __init__(self, *, fail_at: int = -1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.ones(7), requires_grad=False)
        self.fail_at = fail_at

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fail_at:
            raise ValueError("boom")
        loss = (self.weight**2).sum()
        self.log("train/loss", loss, batch_size=1)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/loss", (self.weight**2).sum(), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.1)

    def answer_samples(self, samples: Sequence[PlannerSample]) -> list[str]:
        right = answer_text(samples[0].subtask, samples[0].positions, CONTRACT.prompt)
        return [right if k == 0 else "no idea" for k in range(len(samples))]


def fit(
    folder: Path,
    *,
    steps: int = 12,
    model: pl.LightningModule | None = None,
    ckpt_path: str | None = None,
    **settings: Any,
) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        val_check_interval=5,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, **settings},
    )
    trainer.fit(model or OneWeight(), datamodule=Data(), ckpt_path=ckpt_path)
    return trainer
