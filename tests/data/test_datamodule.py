import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from data.datamodule import ShardDataModule
from data.dataset import TrainBatches, ValidationBatches
from data.shards import BuildSettings, ShardSet, build_shards
from data.views.planner import PlannerViewConfig
from memer.contract import CameraLayout
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.sample import PlannerSample
from tests.data.synthetic import LAYOUT, SyntheticSource, identities

Ids = list[tuple[str, int, int]]


def ids(samples: list[PlannerSample]) -> Ids:
    return [(s.source, s.episode_index, s.step) for s in samples]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shard directories: `a` and `b` with equal contracts, `wide` with another layout."""
    folder = tmp_path_factory.mktemp("shards")
    other = CameraLayout(camera_keys=LAYOUT.camera_keys, view_width=80, view_height=54)
    for name, lengths, shift, layout in (
        ("a", {0: 23, 1: 17, 2: 30, 3: 12}, 0.0, LAYOUT),
        ("b", {0: 14, 7: 21}, 1000.0, LAYOUT),
        ("wide", {0: 9}, 0.0, other),
    ):
        settings = BuildSettings(cameras=layout, max_frames_per_part=8, max_shard_bytes=40_000)
        source = SyntheticSource(lengths, shift=shift)
        build_shards(source, out=folder / name, settings=settings, progress=False)
    return folder


def view(**choices: Any) -> PlannerViewConfig:
    values: dict[str, Any] = {
        "contract": {"windows": {"frame_subsample": 2, "recent_frames_length": 3}},
        "rules": "all_last",
        "sample_stride": 1,
        "transition_weight": 1.0,
        "transition_before": 4,
        "transition_after": 4,
        "answer_weight": 1.0,
        "augmentation": None,
    }
    return PlannerViewConfig(**{**values, **choices})


def module(roots: Path, **choices: Any) -> ShardDataModule:
    values: dict[str, Any] = {
        "train": {"a": {"root": roots / "a", "episodes": [0, 1, 2]}},
        "val": {"a": {"root": roots / "a", "episodes": [3]}},
        "view": view(),
        "batch_size": 4,
        "num_workers": 0,
        "seed": 0,
    }
    return ShardDataModule(**{**values, **choices})


def first_batches(made: ShardDataModule, count: int) -> list[Ids]:
    stream = iter(made.train_dataloader())
    return [ids(next(stream)) for _ in range(count)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_holds_every_sample_once_and_batches_are_full(roots: Path, num_workers: int) -> None:
    made = module(roots, num_workers=num_workers)
    n = len(made.train_table)
    assert n == 70
    batches = first_batches(made, 2 * n // 4)
    assert {len(batch) for batch in batches} == {4}
    stream = [name for batch in batches for name in batch]
    assert len(set(stream[:n])) == n
    assert sorted(stream[n : 2 * n]) == sorted(stream[:n])
    assert stream[:n] != stream[n:]


def test_the_order_does_not_depend_on_workers(roots: Path) -> None:
    alone = first_batches(module(roots), 12)
    for num_workers in (1, 2, 3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 3 workers do not divide the lanes
            assert first_batches(module(roots, num_workers=num_workers), 12) == alone


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_after_a_read_in_the_parent_give_the_right_pictures(roots: Path, context: str) -> None:
    made = module(roots, num_workers=2, multiprocessing_context=context)
    next(iter(module(roots).train_dataloader()))
    made.train_table.sample(
        0,
        frames=TrainBatches(
            made.train_table, settings=made._order, rank=0, world_size=1, first_batch=0, cache_bytes=0
        ).frames,
    )
    stream = iter(made.train_dataloader())
    for _ in range(6):
        for sample in next(stream):
            for key, frame in sample.question.frames.items():
                assert identities(frame) == [(key[1], key[2], 0), (key[1], key[2], 1)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shard_bytes", [1, 20_000, 1 << 30])
def test_ranks_split_the_stream_whatever_the_shards(
    tmp_path: Path, world_size: int, shard_bytes: int
) -> None:
    settings = BuildSettings(cameras=LAYOUT, max_shard_bytes=shard_bytes, max_frames_per_part=5)
    build_shards(SyntheticSource({0: 9, 1: 8, 4: 7}), out=tmp_path / "s", settings=settings, progress=False)
    made = ShardDataModule(
        train={"s": {"root": tmp_path / "s"}}, val=None, view=view(), batch_size=2, num_workers=0, seed=0
    )

    def batches(rank: int, ranks: int) -> Iterator[list[PlannerSample]]:
        return iter(
            TrainBatches(
                made.train_table,
                settings=made._order,
                rank=rank,
                world_size=ranks,
                first_batch=0,
                cache_bytes=1 << 20,
            )
        )

    whole = batches(0, 1)
    expected = [ids(next(whole)) for _ in range(12)]
    ranks = [batches(rank, world_size) for rank in range(world_size)]
    assert [ids(next(ranks[k % world_size])) for k in range(12)] == expected
    assert len({name for batch in expected for name in batch}) == 24

    seen: list[tuple[str, int, int]] = []
    counts = set()
    for rank in range(world_size):
        mine = list(
            ValidationBatches(
                made.train_table,
                batch_size=5,
                lanes=3,
                rank=rank,
                world_size=world_size,
                cache_bytes=1 << 20,
            )
        )
        counts.add(len(mine))
        seen += [name for batch in mine for name in ids(batch)]
    assert len(counts) == 1
    assert len(seen) == len(set(seen)) == 24


@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_sees_every_sample_once_and_knows_its_length(roots: Path, num_workers: int) -> None:
    made = module(roots, num_workers=num_workers, val_batch_size=5)
    loader = made.val_dataloader()
    assert not isinstance(loader, list)
    seen = [name for batch in loader for name in ids(batch)]
    assert sorted(seen) == [("a", 3, t) for t in range(12)]
    assert len(loader) == 3
    assert sorted(name for batch in loader for name in ids(batch)) == sorted(seen)


def test_validation_may_have_its_own_stride_and_none_is_possible(roots: Path) -> None:
    assert len(module(roots, val_sample_stride=5).val_table) == 3
    assert module(roots, val=None).val_dataloader() == []


def test_each_frame_is_decoded_once_while_its_chunk_is_open(roots: Path) -> None:
    made = module(roots, lanes=1, chunk_clips=100, clip_steps=100, train={"a": {"root": roots / "a"}})
    dataset = TrainBatches(
        made.train_table,
        settings=made._order,
        rank=0,
        world_size=1,
        first_batch=0,
        cache_bytes=1 << 26,
    )
    stream = iter(dataset)
    for _ in range(-(-len(made.train_table) // 4)):
        next(stream)
    assert dataset.frames.decoded == 82
    assert dataset.frames.served > 3 * 70


def test_a_mixture_uses_sources_by_weight_and_keeps_their_frames_apart(roots: Path) -> None:
    made = module(
        roots,
        train={"first": {"root": roots / "a"}, "second": {"root": roots / "b", "weight": 2}},
        val=None,
    )
    n = 82 + 2 * 35
    stream = [name for batch in first_batches(made, n // 4) for name in batch]
    counts = Counter(stream)
    assert {counts[name] for name in counts if name[0] == "first"} == {1}
    assert {counts[name] for name in counts if name[0] == "second"} == {2}
    assert len(counts) == 82 + 35


def test_statistics_are_combined_or_chosen_by_name(roots: Path) -> None:
    train = {"a": {"root": roots / "a", "episodes": [0, 1]}, "b": {"root": roots / "b"}}
    rows = {
        "a": [SyntheticSource({0: 23, 1: 17}).episode(k).state for k in (0, 1)],
        "b": [SyntheticSource({0: 14, 7: 21}, shift=1000.0).episode(k).state for k in (0, 7)],
    }
    for choice, wanted in (("combined", rows["a"] + rows["b"]), ("b", rows["b"])):
        contract = module(roots, train=train, val=None, statistics=choice).contract
        expected = np.concatenate(wanted).astype(np.float64)
        assert contract.statistics["state"]["mean"] == pytest.approx(expected.mean(axis=0))
        assert contract.statistics["state"]["std"] == pytest.approx(expected.std(axis=0))
    with pytest.raises(UsageError, match=r"data\.statistics: 'c', must be combined or one of a, b"):
        module(roots, train=train, statistics="c")


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ({"train": {}}, UsageError, "data.train: empty"),
        ({"train": {"x": {"root": "/nowhere"}}}, SourceUnavailableError, r"manifest\.json: not found"),
        ({"train": {"x": {"path": "y"}}}, UsageError, "unknown field 'path'"),
        ({"train": {"x": {"root": "A", "episodes": [99]}}}, UsageError, "99 is not in"),
        ({"train": {"x": {"root": "A", "weight": 0}}}, UsageError, "weight: 0, must be positive"),
        ({"train": {"x": {"root": "A"}, "y": {"root": "W"}}}, MemerError, "view_width: 96 against 80"),
        ({"val": {"y": {"root": "W"}}}, MemerError, "view_width: 96 against 80"),
        ({"view": view(rules="nowhere.json")}, SourceUnavailableError, "nowhere.json"),
        ({"num_workers": -1}, UsageError, "num_workers -1"),
    ],
)
def test_mistakes_are_named(
    roots: Path, choices: dict[str, Any], error: type[Exception], message: str
) -> None:
    places = {"A": str(roots / "a"), "W": str(roots / "wide")}
    for part in ("train", "val"):
        for entry in choices.get(part, {}).values():
            entry.update(root=places.get(entry["root"], entry["root"])) if "root" in entry else None
    with pytest.raises(error, match=message):
        module(roots, **choices)


def test_a_truncated_shard_stops_the_run_at_once(roots: Path, tmp_path: Path) -> None:
    build_shards(
        SyntheticSource({0: 9}), out=tmp_path / "s", settings=BuildSettings(cameras=LAYOUT), progress=False
    )
    shard = tmp_path / "s" / "shard-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(MemerError, match=r"shard-000000\.tar: \d+ bytes"):
        module(roots, train={"s": {"root": tmp_path / "s"}})


def test_shared_episodes_of_training_and_validation_are_reported(roots: Path) -> None:
    with pytest.warns(UserWarning, match="share 1 episodes"):
        module(roots, val={"a": {"root": roots / "a", "episodes": [2, 3]}})


class Recorder(pl.LightningModule):
    """Notes which samples a training saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Ids] = []
        self.validated: list[Ids] = []

    def training_step(self, batch: list[PlannerSample], batch_idx: int) -> torch.Tensor:
        self.seen.append(ids(batch))
        return self.weight * 1.0

    def validation_step(self, batch: list[PlannerSample], batch_idx: int) -> None:
        self.validated.append(ids(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


def trainer(folder: Path, max_steps: int, **choices: Any) -> pl.Trainer:
    return pl.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        **choices,
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_resume_goes_on_with_the_next_batch(
    roots: Path, tmp_path: Path, num_workers: int, accumulate: int
) -> None:
    choices: dict[str, Any] = {"accumulate_grad_batches": accumulate, "val_check_interval": 100}
    whole = Recorder()
    trainer(tmp_path, 8, **choices).fit(whole, module(roots))
    first = Recorder()
    stopped = trainer(tmp_path, 5, **choices)
    stopped.fit(first, module(roots, num_workers=num_workers))
    stopped.save_checkpoint(tmp_path / "at5.ckpt")
    second = Recorder()
    trainer(tmp_path, 8, **choices).fit(
        second,
        module(roots, num_workers=num_workers),
        ckpt_path=str(tmp_path / "at5.ckpt"),
        weights_only=True,
    )
    assert len(whole.seen) == 8 * accumulate
    assert first.seen + second.seen == whole.seen


def test_validation_runs_at_its_interval_on_the_endless_stream(roots: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer(tmp_path, 40, val_check_interval=20).fit(recorder, module(roots))
    assert len(recorder.seen) == 40
    assert Counter(name for batch in recorder.validated for name in batch) == {
        ("a", 3, t): 2 for t in range(12)
    }


def state(roots: Path, **choices: Any) -> Mapping[str, Any]:
    return module(roots, **choices).state_dict()


@pytest.mark.parametrize(
    ("choices", "field"),
    [
        ({"batch_size": 8}, "batch_size: 4 before, 8 now"),
        ({"seed": 1}, "seed: 0 before, 1 now"),
        ({"lanes": 4}, "lanes: 8 before, 4 now"),
        ({"view": view(sample_stride=2)}, "steps: "),
        ({"view": view(transition_weight=2.0)}, "steps: "),
    ],
)
def test_a_resume_into_another_order_is_refused(roots: Path, choices: dict[str, Any], field: str) -> None:
    with pytest.raises(MemerError, match=field):
        module(roots, **choices).load_state_dict(dict(state(roots)))


def test_a_resume_with_other_workers_or_ranks_is_fine(roots: Path) -> None:
    made = module(roots, num_workers=2)
    made.load_state_dict({**state(roots), "batches": 7, "processed": 7})
    assert first_batches(made, 3) == first_batches(module(roots), 10)[7:]
    assert made.state_dict()["batches"] == 7


def test_collate_is_injected(roots: Path) -> None:
    made = module(roots).bind(len)
    assert next(iter(made.train_dataloader())) == 4


def test_description_counts_what_will_be_seen(roots: Path) -> None:
    described = module(roots).describe()
    assert described["train"]["samples"] == 70
    assert described["val"]["samples"] == 12
    assert described["sources"]["a"]["episodes"] == 3
    assert sum(described["train"]["labels"].values()) == 70


def test_the_contract_carries_data_and_choices(roots: Path) -> None:
    contract = module(roots).contract
    assert (contract.fps, contract.cameras, contract.windows.frame_subsample) == (10.0, LAYOUT, 2)
    assert contract.rules_hash
    assert ShardSet(roots / "a").contract.windows.frame_subsample == 5


def test_a_cache_that_cannot_hold_the_open_chunks_is_reported(roots: Path) -> None:
    with pytest.warns(UserWarning, match=r"data\.cache_mib=0: the open chunks of a worker need about 2 MiB"):
        module(roots, cache_mib=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(roots)


def test_lanes_that_workers_share_are_reported(roots: Path) -> None:
    with pytest.warns(UserWarning, match="no multiple of 3 loader processes"):
        module(roots, num_workers=3)


def test_a_validation_set_without_root_is_none(roots: Path) -> None:
    assert module(roots, val={"a": {"root": None, "episodes": None}}).val_dataloader() == []
