"""Imagined plans: the world model is asked as at run time, and the executor's view shows what it answered."""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.compose import compose
from data.build import plans as plans_command
from data.datamodule import ShardDataModule
from data.features import FeatureSettings, ImaginedPlans, build_features, build_plans
from data.shards import BuildSettings, ShardSet, build_shards
from data.views.executor import ExecutorViewConfig
from data.views.plans import canvas_stack
from data.views.visual_planner import VisualPlannerViewConfig
from memer.contract import CameraLayout
from memer.errors import MemerError, UsageError
from memer.executors.base import Pixels
from memer.plan_settings import TextSettings
from memer.plan_windows import segment_plan_indices
from models.codec import PatchCodec
from models.map_planners import ModelVisualPlanner
from models.text import HashedText
from tests.data.plans import plan_contract, plan_values, shown
from tests.data.synthetic import LAYOUT, SyntheticSource
from tests.models.plan_exports import export_world_model
from tests.models.plan_exports import plan_contract as tiny_contract

LENGTHS = {0: 23, 1: 17, 2: 30}
CONFIG = ExecutorViewConfig(contract=plan_values())


@dataclass
class Scribe:
    """A world model that writes down what it is asked, and answers with a picture of one brightness."""

    stop_at: int | None = None
    height: int = 112
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def reset(self, instruction: str, canvas: Pixels, *, seed: int) -> None:
        self.calls.append(("reset", instruction, shown(canvas), seed))
        self.seed, self.number = seed, 0

    def plan(self, text: str, canvas: Pixels) -> Pixels:
        if len(self.calls) == self.stop_at:
            raise KeyboardInterrupt
        self.calls.append(("plan", text, shown(canvas)))
        self.number += 1
        return np.full((8, self.height, 96, 3), brightness(self.seed, self.number - 1), np.uint8)

    def write_back(self, frames: Pixels, text: str) -> None:
        self.calls.append(("write_back", text, [shown(frame)[1] for frame in frames]))


def brightness(episode: int, number: int) -> int:
    return 10 * episode + number + 1


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "a"
    build_shards(SyntheticSource(LENGTHS), out=out, settings=BuildSettings(cameras=LAYOUT), progress=False)
    return out


def make(root: Path, out: Path, planner: Any = None, **choices: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"name": "scribe", "contract": plan_contract(), "progress": False}
    return build_plans(
        ShardSet(root), out=out, planner=Scribe() if planner is None else planner, **values | choices
    )


def module(root: Path, *, source: str = "generated", **choices: Any) -> ShardDataModule:
    values: dict[str, Any] = {
        "train": {"a": {"root": root, "episodes": [0, 1]}},
        "val": {"a": {"root": root, "episodes": [2]}},
        "view": replace(CONFIG, plan_source=source),
        "batch_size": 4,
        "num_workers": 0,
        "seed": 0,
        "lanes": 2,
    }
    return ShardDataModule(**values | choices)


def test_the_world_model_is_asked_as_at_run_time(root: Path, tmp_path: Path) -> None:
    scribe, episode = Scribe(), ShardSet(root).episode(1)
    make(root, tmp_path / "p", scribe, episodes=[1])
    expected: list[tuple[Any, ...]] = [("reset", episode.instruction_at(0), (1, 0), 1)]
    for segment in episode.segments:
        length = segment.end - segment.start
        last = [segment.start - 1 - (-length * (b + 1) // 8) for b in range(8)]
        expected += [
            ("plan", segment.label, (1, segment.start)),
            ("write_back", segment.label, last),
        ]
    assert scribe.calls == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_show_what_was_imagined_behind_the_real_first_frame(
    root: Path, tmp_path: Path, num_workers: int
) -> None:
    make(root, tmp_path / "p")
    made = module(root, plans=tmp_path / "p", num_workers=num_workers)
    starts = {i: [s.start for s in ShardSet(root).segments(i)] for i in LENGTHS}
    seen = set()
    for _, batch in zip(range(20), made.train_dataloader(), strict=False):
        for sample in batch:
            number = sum(start <= sample.step for start in starts[sample.episode_index]) - 1
            seen.add((sample.episode_index, number))
            assert shown(sample.plan_frames[0]) == (
                sample.episode_index,
                starts[sample.episode_index][number],
            )
            assert sample.plan_frames.shape == (9, 112, 96, 3)
            assert (sample.plan_frames[1:] == brightness(sample.episode_index, number)).all()
            assert shown(sample.clip_frames[0]) == (sample.episode_index, sample.step)
    assert seen == {(episode, number) for episode in (0, 1) for number in range(3)}
    # Validation compares runs of all plan sources, so it shows real plans and needs none of these.
    for batch in made.val_dataloader():
        for sample in batch:
            assert shown(sample.plan_frames[-1])[0] == 2


def test_half_of_all_uses_show_each_source(root: Path, tmp_path: Path) -> None:
    make(root, tmp_path / "p")
    uses: Counter[bool] = Counter()
    first: dict[str, list[bool]] = {}
    for again in range(2):
        made = module(root, source="mixed", plans=tmp_path / "p", seed=3)
        for _, batch in zip(range(60), made.train_dataloader(), strict=False):
            for sample in batch:
                real = bool((sample.plan_frames[1] != sample.plan_frames[1, 0, 0, 0]).any())
                first.setdefault(sample.sample_id, []).append(real)
                uses[real] += 1
        if not again:
            once = {name: list(values) for name, values in first.items()}
    assert all(first[name] == values * 2 for name, values in once.items())  # the same order, the same choice
    # Another choice in another epoch, and not for all samples in the same rhythm.
    long = [tuple(values[:4]) for values in once.values() if len(values) >= 4]
    opposite = {tuple(not real for real in values) for values in long[:1]}
    assert len(set(long) - {long[0]} - opposite) > 2
    assert 0.35 < uses[True] / uses.total() < 0.65


def test_a_stopped_build_goes_on_with_the_same_result(root: Path, tmp_path: Path) -> None:
    make(root, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        make(root, tmp_path / "p", Scribe(stop_at=10))
    assert not (tmp_path / "p").exists()
    again = Scribe()
    make(root, tmp_path / "p", again)
    assert [call[3] for call in again.calls if call[0] == "reset"] == [1, 2]
    ours, theirs = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("p", "whole"))
    assert ours == theirs
    with pytest.raises(UsageError, match="world_model: 'scribe' there, 'other' asked"):
        make(root, tmp_path / "p", name="other")


def test_plans_of_something_else_are_refused(root: Path, tmp_path: Path) -> None:
    make(root, tmp_path / "p", episodes=[0])
    with pytest.raises(MemerError, match="no plans of episode 1"):
        module(root, plans=tmp_path / "p")
    other = tmp_path / "other"
    build_shards(
        SyntheticSource({0: 12, 1: 18}), out=other, settings=BuildSettings(cameras=LAYOUT), progress=False
    )
    with pytest.raises(MemerError, match=r"plans of something else \(shards: .*stage=plans"):
        module(other, val=None, plans=tmp_path / "p")
    four = ExecutorViewConfig(contract=plan_values(plan_frames=4), plan_source="generated")
    with pytest.raises(MemerError, match="plan_frames: 8 there, 4 in this run"):
        module(root, view=four, plans=tmp_path / "p")
    features = tmp_path / "f"
    build_features(
        ShardSet(root),
        out=features,
        view=CONFIG.bind(ShardSet(root).contract),
        codec=PatchCodec(4),
        text_encoder=HashedText(TextSettings()),
        settings=FeatureSettings(),
        progress=False,
    )
    with pytest.raises(MemerError, match="describes no plans"):
        module(root, plans=features)
    make(root, tmp_path / "all")
    with pytest.raises(UsageError, match=r"data\.features: hold the latents of real plans"):
        module(root, plans=tmp_path / "all", features=features)


def test_each_source_has_one_directory(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    build_shards(SyntheticSource({0: 9}), out=other, settings=BuildSettings(cameras=LAYOUT), progress=False)
    for shards, name in ((root, "a"), (root, "again"), (other, "b")):
        make(shards, tmp_path / name, name=name)
    both = {"a": {"root": root, "episodes": [0]}, "b": {"root": other}}
    made = module(root, train=both, plans=[tmp_path / "b", tmp_path / "a"])
    assert made.describe()["plans"] == {"a": "a", "b": "b"}
    with pytest.raises(UsageError, match="again were made from the same shards"):
        module(root, plans=[tmp_path / "a", tmp_path / "again"])
    with pytest.raises(UsageError, match=r"data\.plans: .*/b was made from none of the training shards"):
        module(root, plans=[tmp_path / "a", tmp_path / "b"])


def test_a_resume_under_other_plans_is_refused(root: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(root, tmp_path / name, name=name)
    state = module(root, plans=tmp_path / "a").state_dict()
    module(root, plans=tmp_path / "a").load_state_dict(state)
    with pytest.raises(MemerError, match=r"plans: \{'a': 'a'\} before, \{'a': 'b'\} now"):
        module(root, plans=tmp_path / "b").load_state_dict(state)
    with pytest.raises(MemerError, match="plan_source: 'generated' before, 'mixed' now"):
        module(root, source="mixed", plans=tmp_path / "a").load_state_dict(state)
    with pytest.raises(MemerError, match="plan_source: 'generated' before, None now"):
        module(root, source="real").load_state_dict(state)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"source": "generated"}, r"data\.plans: missing, view\.plan_source is generated"),
        ({"source": "real", "plans": "p"}, r"data\.plans: samples of this view show real plans"),
        (
            {"view": VisualPlannerViewConfig(contract=plan_values()), "plans": "p"},
            r"data\.plans: samples of this view show real plans",
        ),
        ({"source": "imagined", "plans": "p"}, r"view\.plan_source: 'imagined', must be real or generated"),
        (
            {
                "view": ExecutorViewConfig(contract=plan_values(visual_plan="none"), plan_source="generated"),
                "plans": "p",
            },
            r"view\.plan_source: generated, but contract\.plan\.visual_plan is none",
        ),
    ],
)
def test_switches_that_do_not_fit_are_one_line(
    root: Path, tmp_path: Path, choices: dict[str, Any], words: str
) -> None:
    make(root, tmp_path / "p")
    if "plans" in choices:
        choices = {**choices, "plans": tmp_path / choices["plans"]}
    with pytest.raises(UsageError, match=words) as raised:
        module(root, **choices)
    assert "\n" not in str(raised.value)


def test_bad_episodes_and_plans_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(MemerError, match=r"episode 0 of .*: the world model gives uint8\[8, 56, 96, 3\]"):
        make(root, tmp_path / "p", Scribe(height=56))
    slow = replace(plan_contract(), fps=5.0)
    with pytest.raises(MemerError, match=r"fps 10\.0, the world model was trained with 5\.0"):
        make(root, tmp_path / "q", contract=slow)
    with pytest.raises(MemerError, match="stage=plans"):
        ImaginedPlans(tmp_path / "nowhere")


def test_the_command_asks_an_exported_world_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`data.build stage=plans` in this process gives what the world model gives when asked by hand."""
    layout = CameraLayout(camera_keys=("base",), view_width=32, view_height=32)
    build_shards(
        SyntheticSource({0: 12}, camera_keys=("base",), fps=15.0),
        out=tmp_path / "s",
        settings=BuildSettings(cameras=layout),
        progress=False,
    )
    export = export_world_model(tmp_path / "cwm", tiny_contract())
    words = [f"root={tmp_path / 's'}", f"out={tmp_path / 'p'}", f"visual={export}", "steps=2"]
    plans_command(compose("plans", [*words, "progress=false"]))
    assert "plans of 1 episodes" in capsys.readouterr().out
    made = ImaginedPlans(tmp_path / "p")
    assert made.manifest["world_model"].endswith(", 2 steps")
    planner = ModelVisualPlanner.from_artifact(export)
    planner.steps = 2
    shards, contract = ShardSet(tmp_path / "s"), tiny_contract()
    episode = shards.episode(0)
    planner.reset(
        episode.instruction_at(0), canvas_stack(episode, [0], contract=contract, frames=None)[0], seed=0
    )
    for number, segment in enumerate(episode.segments):
        shows = segment_plan_indices(segment.start, segment.end)
        canvases = canvas_stack(episode, shows, contract=contract, frames=None)
        assert np.array_equal(made.frames(0, number), planner.plan(segment.label, canvases[0]))
        planner.write_back(canvases[1:], segment.label)
