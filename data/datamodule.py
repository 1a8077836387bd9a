"""The data module of every view: exact epochs, mixtures, and a position that survives a kill.

The saved position is the number of training batches all ranks have consumed. The order depends on data,
view, seed, batch size and lanes, so a resume refuses a change of these, and works with other numbers of
loader workers or ranks.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning
from torch.utils.data import DataLoader

from data.dataset import ChosenShards, SampleTable, TrainBatches, ValidationBatches
from data.features import FeatureSet, ImaginedPlans
from data.features.matching import listed, use_features, use_plans
from data.order import OrderSettings
from data.shards import Moments, ShardSet
from data.sources import json_hash
from data.views.base import Sample, View, ViewConfig
from data.views.frames import FrameCache
from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.windows import even_indices

Collate = Callable[[list[Sample]], Any]

logger = logging.getLogger(__name__)

#: Contract fields that the run chooses; those that the data fix must be equal in a mixture.
_CHOSEN_BY_RUN = (
    "windows",
    "prompt",
    "min_pixels",
    "max_pixels",
    "memory_form",
    "memory_mode",
    "history_length",
    "plan",
)


class ShardDataModule(lightning.LightningDataModule):
    """Samples of one view from one or several shard directories.

    Args:
        train: data set name -> {root, weight, episodes}. `weight` is how often each sample is used per epoch
            (default 1; fractions alternate between epochs), `episodes` a list of numbers or null for all.
        val: the same without weights; empty for no validation.
        view: conf/view, one for all sources.
        statistics: `combined` over all train sources, or the name of one of them.
        batch_size: samples per batch and rank.
        val_batch_size: the same for validation.
        val_sample_stride: raw frames between validation steps; null takes the view's.
        num_workers: loader processes per rank; 0 loads in the training process.
        prefetch_factor: batches a worker prepares ahead.
        lanes: see data.order; a multiple of num_workers x ranks decodes least.
        clip_steps: steps of one episode that stay together.
        chunk_clips: clips whose steps are shuffled together.
        cache_mib: decoded frames kept per worker, MiB.
        seed: of the order.
        multiprocessing_context: fork, spawn, forkserver or null for the platform's.
        features: directories of `python -m data.build stage=features`, one or a list; each source needs the
            one that was made from its shards. Samples then hold latents instead of frames.
        plans: directories of `python -m data.build stage=plans`, one or a list, for the training sources of a
            view whose `plan_source` is not `real`.
        collate: list of samples -> batch; also settable with `bind`.
    """

    def __init__(
        self,
        *,
        train: Mapping[str, Mapping[str, Any]],
        val: Mapping[str, Mapping[str, Any]] | None,
        view: ViewConfig,
        batch_size: int,
        num_workers: int,
        seed: int,
        statistics: str = "combined",
        val_batch_size: int | None = None,
        val_sample_stride: int | None = None,
        prefetch_factor: int = 2,
        lanes: int = 8,
        clip_steps: int = 64,
        chunk_clips: int = 8,
        cache_mib: int = 1024,
        multiprocessing_context: str | None = None,
        features: str | Path | Sequence[str | Path] | None = None,
        plans: str | Path | Sequence[str | Path] | None = None,
        collate: Collate | None = None,
    ) -> None:
        super().__init__()
        if not train:
            raise UsageError("data.train: empty; give {name: {root: DIR}}")
        if num_workers < 0 or cache_mib < 0:
            raise UsageError(
                f"data.num_workers {num_workers}, data.cache_mib {cache_mib}: must not be negative"
            )
        self._order = OrderSettings(
            batch_size=batch_size, lanes=lanes, clip_steps=clip_steps, chunk_clips=chunk_clips, seed=seed
        )
        self._val_batch_size = batch_size if val_batch_size is None else val_batch_size
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._cache_bytes = cache_mib * 1024**2
        self._context = multiprocessing_context
        self._collate = collate
        self._first_batch = 0  # over all ranks
        self._processed_before = 0  # per rank, as the trainer counts
        self._described: dict[str, Any] | None = None
        self._train = {name: _choose(name, values, part="train") for name, values in train.items()}
        self._val = {
            name: _choose(name, values, part="val")
            for name, values in (val or {}).items()
            if values.get("root", name) is not None
        }
        _check_disjoint(self._train, self._val)
        data_contract = _common_contract({**self._train, **{f"val {n}": c for n, c in self._val.items()}})
        data_contract = replace(data_contract, statistics=_statistics(self._train, statistics))
        self.train_view: View = view.bind(data_contract)
        self.contract: Contract = self.train_view.contract
        _check_columns({**self._train, **self._val}, self.train_view)
        val_view = view.bind(data_contract, sample_stride=val_sample_stride, plain=True)
        if features is not None:
            sets = [FeatureSet(root) for root in listed(features)]
            use_features(self.train_view, self._train, sets)
            use_features(val_view, self._val, sets)
        self._plans = use_plans(self.train_view, self._train, [ImaginedPlans(r) for r in listed(plans)])
        self.train_table = SampleTable(self._train, self.train_view)
        self.val_table = SampleTable(self._val, val_view)
        if self.contract.prompt.form == "segments":
            self.contract = replace(self.contract, subtasks=tuple(self.subtasks()))
        self._check_lanes()

    def bind(self, collate: Collate) -> "ShardDataModule":
        """Set what makes batches of samples; needs the model's tokenizer, so it comes late.

        Raises:
            UsageError: it takes other samples than the view makes.
        """
        made, taken = self.train_view.sample_type, getattr(collate, "sample_type", None)
        if taken is not None and taken is not made:
            raise UsageError(
                f"view: makes {made.__name__}s, the model trains on {taken.__name__}s; "
                "leave the view that its experiment names"
            )
        self._collate = collate
        return self

    def describe(self) -> dict[str, Any]:
        """The view's histograms per part, as plain JSON values."""
        return {
            "train": self.train_view.histograms(self.train_table.plans),
            "val": self.train_view.histograms(self.val_table.plans),
            "sources": {
                name: {"root": str(c.shards.root), "episodes": len(c.episodes), "weight": c.weight}
                for name, c in self._train.items()
            },
            **self._plans,
        }

    def example_samples(self, count: int) -> list[Sample]:
        """The same samples at every call, spread over the validation data, else over the training data."""
        table = self.val_table if len(self.val_table) else self.train_table
        frames = FrameCache(max_bytes=self._cache_bytes)
        samples = [table.sample(number, frames=frames) for number in even_indices(len(table), count)]
        table.close()  # a loader process forked later must not inherit open files
        return samples

    def subtasks(self) -> list[str]:
        """Every label of the training episodes, sorted."""
        chosen = [(c.shards, index) for c in self._train.values() for index in c.episodes]
        return sorted({segment.label for shards, index in chosen for segment in shards.segments(index)})

    def instructions(self) -> list[str]:
        """Every instruction of the training episodes, sorted."""
        found: set[str] = set()
        for chosen in self._train.values():
            for index in chosen.episodes:
                found.update(span.text for span in chosen.shards.episode(index).instructions)
            chosen.shards.close()  # a loader process forked later must not inherit open files
        return sorted(found)

    def train_dataloader(self) -> DataLoader[Any]:
        """The endless stream of full batches from the saved position on."""
        rank, world_size = self._place()
        dataset = TrainBatches(
            self.train_table,
            settings=self._order,
            rank=rank,
            world_size=world_size,
            first_batch=self._first_batch,
            cache_bytes=self._cache_bytes,
        )
        self._check_lanes()
        return self._loader(dataset)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Every validation sample once, as many batches on each rank; [] without validation data."""
        if not self._val:
            return []
        rank, world_size = self._place()
        dataset = ValidationBatches(
            self.val_table,
            batch_size=self._val_batch_size,
            lanes=self._order.lanes,
            rank=rank,
            world_size=world_size,
            cache_bytes=self._cache_bytes // 4,  # read in order, and training's cache stays alive
        )
        return self._loader(dataset)

    def state_dict(self) -> dict[str, Any]:
        """Position of the training stream, the same on every rank, as plain values."""
        processed = self._processed()
        new = max(0, processed - self._processed_before) * self._place()[1]
        return {
            "batches": self._first_batch + new,
            "processed": max(processed, self._processed_before),
            "order": self._order_description(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the saved position.

        Raises:
            MemerError: data, view, seed, batch size or lanes differ, so the order would be another one.
        """
        ours, theirs = self._order_description(), state_dict["order"]
        changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if changed:
            listed = "; ".join(f"{n}: {theirs.get(n)!r} before, {ours.get(n)!r} now" for n in changed)
            raise MemerError(
                f"resume with another order of the data ({listed}); restore these values, or start a new run "
                "from the checkpoint's weights"
            )
        self._first_batch = int(state_dict["batches"])
        self._processed_before = int(state_dict["processed"])

    def _processed(self) -> int:
        """Training batches that this rank has finished, over all starts of the run."""
        if self.trainer is None:
            return self._processed_before
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def _order_description(self) -> dict[str, Any]:
        """Everything that the order depends on; hashed once, because it goes into every checkpoint."""
        if self._described is None:
            chosen = self._train.values()
            data = [[c.shards.manifest["index"]["sha256"], list(c.episodes), c.weight] for c in chosen]
            steps = [[plan.steps, plan.weights] for _, plan in self.train_table.plans]
            self._described = {
                **asdict(self._order),
                "data": json_hash(data)[:16],
                "steps": json_hash(steps)[:16],
                **self._plans,
            }
        return self._described

    def _place(self) -> tuple[int, int]:
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

    def _loader(self, dataset: TrainBatches | ValidationBatches) -> DataLoader[Any]:
        dataset.table.close()  # a forked worker must not inherit open files
        several = self._num_workers > 0
        return DataLoader(
            dataset,
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=self._collate if self._collate is not None else _as_list,
            multiprocessing_context=self._context if several else None,
            prefetch_factor=self._prefetch_factor if several else None,
            persistent_workers=several,
        )

    def _check_lanes(self) -> None:
        """Say what makes loading slow: lanes that workers share, or open chunks that do not fit the cache."""
        order = self._order
        readers = max(1, self._num_workers) * self._place()[1]
        if order.lanes % readers:
            warnings.warn(
                f"data.lanes={order.lanes} is no multiple of {readers} loader processes: frames are "
                f"decoded more than once; set data.lanes={readers * max(1, order.lanes // readers)}",
                stacklevel=2,
            )
        needed = -(-order.lanes // readers) * order.chunk_clips * self.train_view.clip_bytes(order.clip_steps)
        everything = sum(c.shards.num_frames(i) for c in self._train.values() for i in c.episodes)
        needed = min(needed, everything * self.train_view.frame_bytes)
        if needed > self._cache_bytes:
            warnings.warn(
                f"data.cache_mib={self._cache_bytes // 1024**2}: the open chunks of a worker need about "
                f"{needed // 1024**2} MiB; frames are decoded more than once unless cache_mib grows or "
                "lanes, chunk_clips or clip_steps shrink",
                stacklevel=2,
            )


def _as_list(samples: list[Sample]) -> list[Sample]:
    return samples


def _choose(name: str, values: Mapping[str, Any], *, part: str) -> ChosenShards:
    where = f"data.{part}.{name}"
    unknown = sorted(set(values) - {"root", "weight", "episodes"})
    if unknown:
        raise UsageError(f"{where}: unknown field {unknown[0]!r}; known: root, weight, episodes")
    if not values.get("root"):
        raise UsageError(f"{where}.root: missing; the directory that python -m data.build wrote")
    weight = values.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise UsageError(f"{where}.weight: {weight!r}, must be positive (uses of each sample per epoch)")
    shards = ShardSet(values["root"], name=name)
    present = shards.episode_indices()
    episodes = values.get("episodes")
    if episodes is None:
        return ChosenShards(shards=shards, episodes=tuple(present), weight=float(weight))
    missing = sorted(set(episodes) - set(present))
    if missing or not episodes:
        raise UsageError(
            f"{where}.episodes: {missing[0]} is not in {shards.root}"
            if missing
            else f"{where}.episodes: empty; null takes all"
        )
    return ChosenShards(shards=shards, episodes=tuple(sorted(set(episodes))), weight=float(weight))


def _check_disjoint(train: Mapping[str, ChosenShards], val: Mapping[str, ChosenShards]) -> None:
    for train_name, ours in train.items():
        for val_name, theirs in val.items():
            if ours.shards.root.resolve() != theirs.shards.root.resolve():
                continue
            both = sorted(set(ours.episodes) & set(theirs.episodes))
            if both:
                warnings.warn(
                    f"data.train.{train_name} and data.val.{val_name} share {len(both)} episodes of "
                    f"{ours.shards.root}, first {both[0]}: validation would measure memorising; "
                    "set episodes=[...] in both",
                    stacklevel=3,
                )


def _common_contract(chosen: Mapping[str, ChosenShards]) -> Contract:
    """The contract that all sources share, without statistics."""
    first_name, first = next(iter(chosen.items()))
    for name, other in chosen.items():
        first.shards.contract.check_same(
            other.shards.contract,
            what=f"shards {first_name} ({first.shards.root}) and {name} ({other.shards.root})",
            allow=("statistics", *_CHOSEN_BY_RUN, "rules_hash", "model_family"),
        )
    return replace(first.shards.contract, statistics={})


def _check_columns(chosen: Mapping[str, ChosenShards], view: View) -> None:
    """Every source must have the columns of the samples in the size of the statistics."""
    for name, source in chosen.items():
        for feature, moments in source.shards.statistics(source.episodes).items():
            expected = len(view.contract.statistics[feature]["mean"])
            if feature in view.columns and len(moments.mean) != expected:
                raise MemerError(
                    f"{name} ({source.shards.root}): {feature} of {len(moments.mean)} dimensions, the "
                    f"statistics have {expected}; leave the source out, or train on it alone"
                )


def _statistics(train: Mapping[str, ChosenShards], choice: str) -> dict[str, dict[str, tuple[float, ...]]]:
    if choice != "combined" and choice not in train:
        raise UsageError(f"data.statistics: {choice!r}, must be combined or one of {', '.join(train)}")
    parts = [c.shards.statistics(c.episodes) for name, c in train.items() if choice in ("combined", name)]
    return {
        feature: Moments.combine(
            (p[feature] for p in parts), what=f"data.statistics, {feature}"
        ).contract_entry()
        for feature in parts[0]
    }
