"""Features: what training reads from them equals what it would compute itself, or is refused."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.compose import compose
from data.build import features
from data.datamodule import ShardDataModule
from data.features import FeatureSet, FeatureSettings, build_features
from data.shards import BuildSettings, ShardSet, build_shards
from data.views.executor import ExecutorViewConfig
from data.views.language_planner import LanguagePlannerViewConfig
from data.views.visual_planner import VisualPlannerViewConfig
from memer.canvas import to_signed
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.plan_settings import TextSettings
from models.codec import PatchCodec
from models.text import HashedText
from tests.data.plans import plan_values
from tests.data.synthetic import LAYOUT, SyntheticSource

CANVAS = {
    "height": 16,
    "width": 32,
    "regions": [{"camera": "base", "y": 0, "x": 0, "height": 16, "width": 32}],
}


def small(**choices: Any) -> dict[str, Any]:
    """Choices of a run with a canvas of few latents."""
    return plan_values(canvas=CANVAS, **choices)


CONFIGS: Mapping[str, Any] = {
    "visual_planner": VisualPlannerViewConfig(contract=small()),
    "current_only": VisualPlannerViewConfig(contract=small(visual_plan="current_only")),
    "executor": ExecutorViewConfig(contract=small()),
    "no_plan": ExecutorViewConfig(contract=small(visual_plan="none")),
}


class CountingCodec(PatchCodec):
    """Stops at a chosen call, as a kill would."""

    def __init__(self, *, stop_at: int | None = None) -> None:
        super().__init__(4)
        self.calls = 0
        self.stop_at = stop_at

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        return super().encode(x)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "s"
    build_shards(
        SyntheticSource({0: 12, 1: 17}), out=out, settings=BuildSettings(cameras=LAYOUT), progress=False
    )
    return out


def make(root: Path, out: Path, config: Any, **choices: Any) -> dict[str, Any]:
    shards = ShardSet(root)
    values: dict[str, Any] = {
        "codec": PatchCodec(4),
        "text_encoder": HashedText(TextSettings()),
        "settings": FeatureSettings(batch_size=3),
    }
    values |= choices
    return build_features(shards, out=out, view=config.bind(shards.contract), progress=False, **values)


def module(root: Path, config: Any, features: Any, **choices: Any) -> ShardDataModule:
    values: dict[str, Any] = {
        "train": {"a": {"root": root, "episodes": [0]}},
        "val": {"a": {"root": root, "episodes": [1]}},
        "view": config,
        "batch_size": 4,
        "num_workers": 0,
        "seed": 0,
        "features": features,
    }
    return ShardDataModule(**{**values, **choices})


def encoded(frames: np.ndarray) -> np.ndarray:
    return PatchCodec(4).encode(to_signed(frames).movedim(0, 1)[None])[0].numpy()


@pytest.mark.parametrize(("kind", "num_workers"), [*((kind, 0) for kind in CONFIGS), ("executor", 2)])
def test_samples_from_features_equal_those_computed_on_the_fly(
    root: Path, tmp_path: Path, kind: str, num_workers: int
) -> None:
    config = CONFIGS[kind]
    make(root, tmp_path / "f", config)
    encoder = HashedText(TextSettings())
    stored = module(root, config, str(tmp_path / "f"), num_workers=num_workers, lanes=2)
    plain = module(root, config, None, lanes=2)
    ours, theirs = iter(stored.train_dataloader()), iter(plain.train_dataloader())
    pairs = [pair for _ in range(5) for pair in zip(next(ours), next(theirs), strict=True)]
    pairs += [
        pair
        for batches in zip(stored.val_dataloader(), plain.val_dataloader(), strict=True)
        for pair in zip(*batches, strict=True)
    ]
    replaced = {"frames": "latents", "plan_frames": "plan_latents", "clip_frames": "clip_latents"}
    for sample, live in pairs:
        for field in fields(live):
            name = field.name
            if name in replaced:
                frames, latents = getattr(live, name), getattr(sample, replaced[name])
                assert getattr(sample, name).shape == (0, *frames.shape[1:])
                if len(frames):
                    assert latents.dtype == np.float32
                    assert np.array_equal(latents, encoded(frames))
                else:
                    assert latents is None
            elif name not in (*replaced.values(), "text_features", "instruction_features"):
                assert np.array_equal(getattr(sample, name), getattr(live, name)), name
        words = live.texts if kind in ("visual_planner", "current_only") else [live.text]
        expected = encoder.encode(words).numpy()
        assert np.array_equal(sample.text_features.reshape(expected.shape), expected)
        assert np.array_equal(sample.instruction_features, encoder.encode([live.instruction])[0].numpy())


def test_no_frame_is_decoded_where_latents_are(root: Path, tmp_path: Path) -> None:
    make(root, tmp_path / "f", CONFIGS["executor"])
    loader = module(root, CONFIGS["executor"], tmp_path / "f").train_dataloader()
    next(iter(loader))
    assert loader.dataset.frames.decoded == 0


def test_half_precision_takes_half_the_room(root: Path, tmp_path: Path) -> None:
    config = CONFIGS["visual_planner"]
    sizes = {}
    for dtype in ("float32", "float16"):
        made = make(root, tmp_path / dtype, config, settings=FeatureSettings(dtype=dtype))
        sizes[dtype] = made["files"]["episode_000001.clip.npy"]
    assert sizes["float16"] - 128 == (sizes["float32"] - 128) / 2
    latents = FeatureSet(tmp_path / "float16").latents(1, "clip", 0)
    assert latents.dtype == np.float32
    assert np.abs(latents - FeatureSet(tmp_path / "float32").latents(1, "clip", 0)).max() < 1e-3


def test_embeddings_may_be_left_out(root: Path, tmp_path: Path) -> None:
    make(root, tmp_path / "f", CONFIGS["visual_planner"], text_encoder=None)
    sample = next(iter(module(root, CONFIGS["visual_planner"], tmp_path / "f").train_dataloader()))[0]
    assert sample.latents is not None
    assert sample.text_features is None
    assert sample.instruction_features is None


def test_a_stopped_build_goes_on_with_the_same_result(root: Path, tmp_path: Path) -> None:
    config, whole = CONFIGS["executor"], CountingCodec()
    make(root, tmp_path / "whole", config, codec=whole)
    with pytest.raises(KeyboardInterrupt):
        make(root, tmp_path / "f", config, codec=CountingCodec(stop_at=whole.calls - 1))
    assert not (tmp_path / "f").exists()
    again = CountingCodec()
    make(root, tmp_path / "f", config, codec=again)
    assert 0 < again.calls < whole.calls
    assert not (tmp_path / "f.partial").exists()
    ours, theirs = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("f", "whole"))
    assert ours == theirs
    idle = CountingCodec()
    make(root, tmp_path / "f", config, codec=idle)
    assert idle.calls == 0


def test_a_started_directory_of_other_inputs_is_refused(root: Path, tmp_path: Path) -> None:
    config = CONFIGS["executor"]
    with pytest.raises(KeyboardInterrupt):
        make(root, tmp_path / "f", config, codec=CountingCodec(stop_at=2))
    with pytest.raises(UsageError, match="dtype: 'float32' there, 'float16' asked"):
        make(root, tmp_path / "f", config, settings=FeatureSettings(dtype="float16"))
    make(root, tmp_path / "f", config)
    with pytest.raises(UsageError, match=r"key\.tail: 'pad' there, 'continue' asked"):
        make(root, tmp_path / "f", replace(config, tail="continue"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"codec": {"spatial_ratio": 2, "channels": 48}}, r"codec\.channels: 192 there, 48 in this run"),
        ({"plan_frames": 4}, "plan_frames: 8 there, 4 in this run"),
        ({"action_horizon": 32}, "action_horizon: 16 there, 32 in this run"),
        ({"text": {"max_tokens": 9}}, r"text\.max_tokens: 8 there, 9 in this run"),
        ({"visual_plan": "none"}, "visual_plan: 'memory' there, 'none' in this run"),
    ],
)
def test_features_of_other_settings_are_refused(
    root: Path, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    make(root, tmp_path / "f", CONFIGS["executor"])
    other = ExecutorViewConfig(contract=small(**changes))
    with pytest.raises(MemerError, match=field) as raised:
        module(root, other, tmp_path / "f")
    assert "\n" not in str(raised.value)


def test_another_canvas_is_refused(root: Path, tmp_path: Path) -> None:
    make(root, tmp_path / "f", CONFIGS["executor"])
    values = small()
    values["plan"]["canvas"] = {**CANVAS, "height": 24}
    with pytest.raises(MemerError, match=r"canvas\.height: 16 there, 24 in this run"):
        module(root, ExecutorViewConfig(contract=values), tmp_path / "f")


def test_features_of_other_shards_or_another_view_are_refused(root: Path, tmp_path: Path) -> None:
    make(root, tmp_path / "f", CONFIGS["executor"])
    other = tmp_path / "other"
    build_shards(
        SyntheticSource({0: 12, 1: 18}), out=other, settings=BuildSettings(cameras=LAYOUT), progress=False
    )
    with pytest.raises(MemerError, match=r"f: features of something else \(shards: "):
        module(other, CONFIGS["executor"], tmp_path / "f")
    with pytest.raises(MemerError, match="view: 'executor' there, 'visual_planner' in this run"):
        module(root, CONFIGS["visual_planner"], tmp_path / "f")
    with pytest.raises(UsageError, match="samples of this view hold no latents"):
        module(root, LanguagePlannerViewConfig(contract=small()), tmp_path / "f")


def test_each_source_of_a_mixture_finds_its_own(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    build_shards(SyntheticSource({0: 9}), out=other, settings=BuildSettings(cameras=LAYOUT), progress=False)
    config = CONFIGS["visual_planner"]
    for shards, name in ((root, "one"), (other, "two")):
        make(shards, tmp_path / name, config)
    made = module(
        root,
        config,
        [tmp_path / "two", tmp_path / "one"],
        train={"a": {"root": root}, "b": {"root": other}},
        val=None,
        batch_size=3,
    )
    found = {(s.source, s.episode_index): s.latents for s in next(iter(made.train_dataloader()))}
    assert np.array_equal(found["b", 0], FeatureSet(tmp_path / "two").latents(0, "clip", 0))
    assert np.array_equal(found["a", 0], FeatureSet(tmp_path / "one").latents(0, "clip", 0))


def test_missing_episodes_and_steps_are_named(root: Path, tmp_path: Path) -> None:
    make(root, tmp_path / "f", CONFIGS["executor"], episodes=[0])
    with pytest.raises(MemerError, match="no features of episode 1"):
        module(root, CONFIGS["executor"], tmp_path / "f")
    strided = ExecutorViewConfig(contract=small(), sample_stride=2)
    make(root, tmp_path / "g", strided)
    made = module(root, CONFIGS["executor"], tmp_path / "g")
    with pytest.raises(UsageError, match=r"no clip latents of \d+; make features with"):
        list(zip(range(3), made.train_dataloader(), strict=False))


def test_damage_is_noticed(root: Path, tmp_path: Path) -> None:
    make(root, tmp_path / "f", CONFIGS["executor"])
    path = tmp_path / "f" / "episode_000000.clip.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(MemerError, match=r"episode_000000\.clip\.npy: \d+ bytes"):
        FeatureSet(tmp_path / "f")
    path.unlink()
    with pytest.raises(MemerError, match="None bytes"):
        FeatureSet(tmp_path / "f")
    with pytest.raises(SourceUnavailableError, match="stage=features"):
        FeatureSet(tmp_path / "nowhere")


def test_a_codec_that_breaks_the_contract_is_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(MemerError, match=r"the codec gives latents \(1, 48, "):
        make(root, tmp_path / "f", CONFIGS["visual_planner"], codec=PatchCodec(2))


def test_labels_belong_to_the_key(tmp_path: Path) -> None:
    """A change of one letter moves no byte of a shard's index."""
    hashes = set()
    for name, label in (("a", "left"), ("b", "bent")):
        source = SyntheticSource({0: 9})
        made = source.episode(0)
        segments = tuple(replace(s, label=label) for s in made.segments)
        source.episode = lambda index, m=made, s=segments: replace(m, segments=s)  # type: ignore[method-assign]
        build_shards(source, out=tmp_path / name, settings=BuildSettings(cameras=LAYOUT), progress=False)
        make(tmp_path / name, tmp_path / f"f{name}", CONFIGS["visual_planner"])
        manifest = json.loads((tmp_path / f"f{name}" / "manifest.json").read_text())
        hashes.add(manifest["key"]["shards"])
    assert len(hashes) == 2


def test_features_of_imagined_plans_are_refused(root: Path, tmp_path: Path) -> None:
    words = [f"root={root}", f"out={tmp_path / 'f'}", "view=executor", "view.plan_source=mixed"]
    with pytest.raises(UsageError, match=r"view\.plan_source: features hold the latents of real plans"):
        features(compose("features", words))
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(("view", "clips"), [("visual_planner", 1), ("executor", 9 + 3)])
def test_the_command_makes_what_the_data_module_reads(
    root: Path, tmp_path: Path, view: str, clips: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """`data.build stage=features` in this process: one clip per episode, or per step and segment."""
    regions = json.dumps(CANVAS["regions"]).replace('"', "").replace(" ", "")
    words = [f"root={root}", f"out={tmp_path / 'f'}", f"view={view}", "episodes=[0]", "progress=false"]
    canvas = [f"contract.plan.canvas.{side}={CANVAS[side]}" for side in ("height", "width")]
    codec = ["contract.plan.codec.mean=[0,0,0]", "contract.plan.codec.std=[1,1,1]"]  # those of small()
    features(compose("features", [*words, *canvas, *codec, f"contract.plan.canvas.regions={regions}"]))
    assert f"1 episodes, {clips} clips" in capsys.readouterr().out
    chosen = {"val": None, "train": {"a": {"root": root, "episodes": [0]}}}
    config = {"visual_planner": VisualPlannerViewConfig, "executor": ExecutorViewConfig}[view]
    read = module(root, config(contract=small()), tmp_path / "f", **chosen)
    (sample, *_) = next(iter(read.train_dataloader()))
    assert getattr(sample, "latents" if view == "visual_planner" else "clip_latents") is not None
