"""The one data module over the views of plans: exact epochs, resume, mixtures, one-line errors."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.datamodule import ShardDataModule
from data.shards import BuildSettings, build_shards
from data.views.executor import ExecutorViewConfig
from data.views.language_planner import LanguagePlannerViewConfig
from data.views.visual_planner import VisualPlannerViewConfig
from memer.episode import Episode
from memer.errors import MemerError, UsageError
from memer.sample import VisualPlannerSample
from tests.data.plans import plan_values, shown
from tests.data.synthetic import LAYOUT, SyntheticSource

VIEWS: dict[str, tuple[Any, int]] = {
    # Episodes of 23, 17, 30 frames with three segments each; the executor leaves out the last frame of each.
    "visual_planner": (VisualPlannerViewConfig(contract=plan_values()), 3),
    "current_only": (VisualPlannerViewConfig(contract=plan_values(visual_plan="current_only")), 9),
    "language_planner": (LanguagePlannerViewConfig(contract=plan_values()), 9),
    "executor": (ExecutorViewConfig(contract=plan_values()), 70 - 9),
}


@dataclass
class WideSource(SyntheticSource):
    """One state dimension more."""

    def episode(self, index: int) -> Episode:
        made = super().episode(index)
        return replace(made, state=np.concatenate([made.state, made.state[:, :1]], axis=1))


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for name, source in (
        ("a", SyntheticSource({0: 23, 1: 17, 2: 30, 3: 12})),
        ("b", SyntheticSource({0: 14, 7: 21})),
        ("wide", WideSource({0: 9})),
    ):
        settings = BuildSettings(cameras=LAYOUT, max_frames_per_part=8, max_shard_bytes=40_000)
        build_shards(source, out=folder / name, settings=settings, progress=False)
    return folder


def module(roots: Path, view: Any, **choices: Any) -> ShardDataModule:
    values: dict[str, Any] = {
        "train": {"a": {"root": roots / "a", "episodes": [0, 1, 2]}},
        "val": {"a": {"root": roots / "a", "episodes": [3]}},
        "view": view,
        "batch_size": 2,
        "num_workers": 0,
        "seed": 0,
        "lanes": 2,
    }
    return ShardDataModule(**{**values, **choices})


def names(batch: list[Any]) -> list[tuple[str, str]]:
    return [(sample.source, sample.sample_id) for sample in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", VIEWS)
def test_an_epoch_holds_every_sample_once_and_a_resume_goes_on(
    roots: Path, kind: str, num_workers: int
) -> None:
    view, count = VIEWS[kind]
    made = module(roots, view, num_workers=num_workers)
    assert len(made.train_table) == count
    stream = iter(made.train_dataloader())
    batches = [names(next(stream)) for _ in range(count)]  # two epochs of batches of two
    flat = [name for batch in batches for name in batch]
    assert len(set(flat[:count])) == count
    assert sorted(flat[count:]) == sorted(flat[:count])
    later = module(roots, view)
    later.load_state_dict({**made.state_dict(), "batches": 2, "processed": 2})
    resumed = iter(later.train_dataloader())
    assert [names(next(resumed)) for _ in range(count - 2)] == batches[2:]


@pytest.mark.parametrize("kind", VIEWS)
def test_validation_sees_every_sample_once_and_is_described(roots: Path, kind: str) -> None:
    made = module(roots, VIEWS[kind][0])
    seen = [name for batch in made.val_dataloader() for name in names(batch)]
    assert len(seen) == len(set(seen)) == len(made.val_table)
    described = made.describe()
    assert described["train"]["samples"] == VIEWS[kind][1]
    assert described["val"]["samples"] == len(seen)
    assert described["train"]["segment_frames"] == {"least": 5, "median": 8, "greatest": 10}
    assert json.loads(json.dumps(described))["train"]["segments"] == 9


def test_validation_of_the_executor_may_have_its_own_stride(roots: Path) -> None:
    assert len(module(roots, VIEWS["executor"][0], val_sample_stride=2).val_table) == 6  # 0, 2 of each four


def test_the_language_planner_gets_the_subtasks_of_its_training_data(roots: Path) -> None:
    bound = module(roots, VIEWS["language_planner"][0])
    assert bound.contract.subtasks == tuple(bound.subtasks()) != ()


def test_several_tasks_are_one_mixture(roots: Path) -> None:
    train = {"a": {"root": roots / "a"}, "b": {"root": roots / "b", "weight": 2}}
    made = module(roots, VIEWS["executor"][0], train=train, val=None)
    ours, theirs = 82 - 12, 35 - 6
    stream = iter(made.train_dataloader())
    samples = [s for _ in range((ours + 2 * theirs) // 2) for s in next(stream)]
    counts = Counter((s.source, s.sample_id) for s in samples)
    assert Counter((name, used) for (name, _), used in counts.items()) == {("a", 1): ours, ("b", 2): theirs}
    for sample in samples[:20]:
        assert {shown(canvas)[0] for canvas in sample.plan_frames} == {sample.episode_index}
    assert made.contract.plan is not None
    assert len(made.contract.statistics["action"]["std"]) == 2


def test_sources_with_other_columns_are_refused_where_samples_hold_them(roots: Path) -> None:
    train = {"a": {"root": roots / "a"}, "wide": {"root": roots / "wide"}}
    with pytest.raises(MemerError, match=r"wide .*: state of 4 dimensions, the statistics have 3"):
        module(roots, VIEWS["executor"][0], train=train, val=None, statistics="a")
    with pytest.raises(MemerError, match="3 and 4 dimensions cannot be combined"):
        module(roots, VIEWS["executor"][0], train=train, val=None)
    module(roots, VIEWS["visual_planner"][0], train=train, val=None, statistics="a")


@pytest.mark.parametrize("kind", VIEWS)
def test_an_episode_without_segments_is_named(roots: Path, tmp_path: Path, kind: str) -> None:
    build_shards(
        SyntheticSource({0: 9, 4: 9}),
        out=tmp_path / "s",
        settings=BuildSettings(cameras=LAYOUT),
        progress=False,
    )
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    manifest["episodes"][1]["segments"] = []
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MemerError, match=r"episode 4 of demos .*: segments: none; label the episode"):
        module(roots, VIEWS[kind][0], train={"demos": {"root": tmp_path / "s"}}, val=None)


def test_a_model_of_other_samples_is_refused(roots: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        return samples

    collate.sample_type = VisualPlannerSample
    with pytest.raises(
        UsageError, match="view: makes ExecutorSamples, the model trains on VisualPlannerSamples"
    ):
        module(roots, VIEWS["executor"][0]).bind(collate)
