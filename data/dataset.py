"""Shards, view and order joined: what a loader process iterates over."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from data.order import OrderSettings, TrainOrder, validation_batches
from data.shards import ShardSet
from data.views.base import Sample, Steps, View
from data.views.frames import FrameCache
from memer.episode import Episode
from memer.errors import MemerError, UsageError

#: Episodes kept open per process: their arrays and offsets, not their frames.
_OPEN_EPISODES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenShards:
    """One source of a mixture.

    Attributes:
        shards: where the episodes are.
        episodes: their numbers, ascending.
        weight: uses per epoch of each of its samples; 1 = every sample once.
    """

    shards: ShardSet
    episodes: tuple[int, ...]
    weight: float = 1.0


class SampleTable:
    """All samples of a mixture under one view, numbered in the order source, episode, step.

    Args:
        sources: data set name -> what is chosen of it.
        view: chooses the steps.

    Attributes:
        plans: (targets, steps) per episode, in table order.

    Raises:
        MemerError: the labels of an episode do not serve the view.
    """

    def __init__(self, sources: Mapping[str, ChosenShards], view: View) -> None:
        self.view = view
        self._sources = dict(sources)
        self._episodes: list[tuple[str, int]] = []
        self.plans: list[tuple[Any, Steps]] = []
        groups: list[int] = []
        steps: list[int] = []
        weights: list[float] = []
        for name, chosen in self._sources.items():
            for index in chosen.episodes:
                try:
                    targets = view.targets(
                        chosen.shards.segments(index), num_frames=chosen.shards.num_frames(index)
                    )
                except MemerError as error:
                    raise type(error)(f"episode {index} of {name} ({chosen.shards.root}): {error}") from None
                plan = view.steps(targets)
                groups += [len(self._episodes)] * len(plan.steps)
                steps += plan.steps
                weights += [chosen.weight * weight for weight in plan.weights]
                self._episodes.append((name, index))
                self.plans.append((targets, plan))
        self.groups = np.asarray(groups, dtype=np.int64)
        self.steps = np.asarray(steps, dtype=np.int64)
        self.weights = np.asarray(weights, dtype=np.float64)
        self._open: OrderedDict[int, Episode] = OrderedDict()

    def __len__(self) -> int:
        return len(self.steps)

    def sample(self, number: int, *, frames: FrameCache, epoch: int = 0, repeat: int = 0) -> Sample:
        """One sample by its number."""
        group = int(self.groups[number])
        return self.view.sample(
            self._episode(group),
            int(self.steps[number]),
            targets=self.plans[group][0],
            frames=frames,
            epoch=epoch,
            repeat=repeat,
        )

    def close(self) -> None:
        """Close file handles of this process."""
        self._open.clear()
        for chosen in self._sources.values():
            chosen.shards.close()

    def _episode(self, group: int) -> Episode:
        episode = self._open.get(group)
        if episode is None:
            name, index = self._episodes[group]
            episode = self._open[group] = self._sources[name].shards.episode(index)
            if len(self._open) > _OPEN_EPISODES:
                self._open.popitem(last=False)
        self._open.move_to_end(group)
        return episode


class _Batches(IterableDataset[list[Sample]]):
    """Shared part: serve whole batches, worker w of rank r every (W * R)-th one."""

    def __init__(self, table: SampleTable, *, cache_bytes: int) -> None:
        super().__init__()
        self.table = table
        self._cache_bytes = cache_bytes
        self._frames: FrameCache | None = None

    @property
    def frames(self) -> FrameCache:
        """The decoded frames of this process, made at the first use and never sent to another process."""
        if self._frames is None:
            self._frames = FrameCache(max_bytes=self._cache_bytes)
        return self._frames

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_frames": None}

    def _mine(self) -> tuple[int, int]:
        """(this worker, workers)."""
        info = get_worker_info()
        return (0, 1) if info is None else (info.id, info.num_workers)


class TrainBatches(_Batches):
    """The endless stream of full training batches, from a given batch on.

    Args:
        table: all samples.
        settings: batch size, lanes, seed.
        rank: of this process.
        world_size: ranks together.
        first_batch: global number of the first batch that any rank still has to see.
        cache_bytes: decoded frames kept per worker.
    """

    def __init__(
        self,
        table: SampleTable,
        *,
        settings: OrderSettings,
        rank: int,
        world_size: int,
        first_batch: int,
        cache_bytes: int,
    ) -> None:
        super().__init__(table, cache_bytes=cache_bytes)
        self.order = TrainOrder(groups=table.groups, weights=table.weights, settings=settings)
        self._rank, self._world_size, self._first = rank, world_size, first_batch

    def __iter__(self) -> Iterator[list[Sample]]:
        worker, workers = self._mine()
        number = self._first + worker * self._world_size + self._rank
        while True:
            yield [
                self.table.sample(sample, frames=self.frames, epoch=epoch, repeat=repeat)
                for sample, epoch, repeat in self.order.batch(number)
            ]
            number += workers * self._world_size


class ValidationBatches(_Batches):
    """Every sample exactly once over all ranks, the same number of batches on each."""

    def __init__(
        self,
        table: SampleTable,
        *,
        batch_size: int,
        lanes: int,
        rank: int,
        world_size: int,
        cache_bytes: int,
    ) -> None:
        super().__init__(table, cache_bytes=cache_bytes)
        if not len(table):
            raise UsageError("no validation samples: no step of these episodes can be used")
        batches = validation_batches(len(table), batch_size=batch_size, world_size=world_size, lanes=lanes)
        self._batches: Sequence[range] = batches[rank::world_size]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Sample]]:
        worker, workers = self._mine()
        for batch in self._batches[worker::workers]:
            yield [self.table.sample(number, frames=self.frames) for number in batch]
