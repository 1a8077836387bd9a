"""An endless, exact stream of batches; where it starts follows from the optimizer steps already made."""

from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
import torch

from memer.sample import PlannerSample
from models.collate import PackedBatch, PlannerCollator


class Stream(pl.LightningDataModule):
    """Rank r takes every r-th of each step's groups of samples."""

    def __init__(
        self, collate: PlannerCollator, samples: Sequence[PlannerSample], *, batch_size: int
    ) -> None:
        super().__init__()
        self.collate = collate
        self.samples = samples
        self.batch_size = batch_size

    def train_dataloader(self) -> "Batches":
        assert self.trainer is not None
        done = self.trainer.global_step * self.trainer.accumulate_grad_batches
        return Batches(self, first=done, rank=self.trainer.global_rank, world=self.trainer.world_size)


class Batches(torch.utils.data.IterableDataset):
    def __init__(self, stream: Stream, *, first: int, rank: int, world: int) -> None:
        self.stream, self.first, self.rank, self.world = stream, first, rank, world

    def __iter__(self) -> Iterator[PackedBatch]:
        samples, size = self.stream.samples, self.stream.batch_size
        number = self.first
        while True:
            start = (number * self.world + self.rank) * size
            yield self.stream.collate([samples[(start + i) % len(samples)] for i in range(size)])
            number += 1
