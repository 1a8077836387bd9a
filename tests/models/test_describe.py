import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.compose import CONF_DIR, compose
from memer.contract import CameraLayout
from memer.errors import SourceUnavailableError, UsageError
from memer.sample import PlannerSample
from models import sizes
from models.describe import describe, full_question, main
from models.footprint import TrainingPlan, count_parameters, meta_model, training_memory
from models.lit.planner import PlannerModule
from models.qwen_vl import encode_frames, load_base
from models.sizes import PUBLISHED, find_config
from models.tiny import TinySize, make_tiny_base
from tests.models.samples import tiny_contract

#: Published `safetensors.total` of the two repositories, parameters.
PUBLISHED_TOTALS = {"Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808, "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696}


def described(*overrides: str) -> dict[str, Any]:
    return describe(compose("describe", list(overrides)))


def on_base(base: Path) -> list[str]:
    return ["experiment=memer_tiny", f"model.module.base={base}", "model.tiny_base=null"]


def language_formula(*, features: int, inner: int, layers: int, tied: bool) -> int:
    """Embedding, layers (attention 32 / 8 heads of 128 with query and key norms, gated MLP), norm, head."""
    queries, keys = 32 * 128, 8 * 128
    attention = 2 * features * queries + 2 * features * keys + 2 * 128
    layer = attention + 3 * features * inner + 2 * features
    return (1 if tied else 2) * 151_936 * features + layers * layer + features


def vision_formula(*, features: int, inner: int, blocks: int, out: int, levels: int) -> int:
    """Patches with bias, position table, blocks with biases, one merger and one more per level."""
    embedding = 3 * 2 * 16 * 16 * features + features + 2304 * features
    attention = features * 3 * features + 3 * features + features * features + features
    mlp = 2 * features * inner + inner + features
    merged = 4 * features
    projection = merged * merged + merged + merged * out + out
    mergers = projection + 2 * features + levels * (projection + 2 * merged)
    return embedding + blocks * (attention + mlp + 4 * features) + mergers


@pytest.mark.parametrize(
    ("experiment", "language", "vision"),
    [
        (
            "memer_qwen3vl_4b",
            {"features": 2560, "inner": 9728, "layers": 36, "tied": True},
            {"features": 1024, "inner": 4096, "blocks": 24, "out": 2560, "levels": 3},
        ),
        (
            "memer_paper",
            {"features": 4096, "inner": 12_288, "layers": 36, "tied": False},
            {"features": 1152, "inner": 4304, "blocks": 27, "out": 4096, "levels": 3},
        ),
    ],
)
def test_full_sizes_follow_the_closed_formula(
    experiment: str, language: dict[str, Any], vision: dict[str, Any]
) -> None:
    found = described(f"experiment={experiment}")
    counts = found["parameters"]
    assert counts["vision_tower"] + counts["projector"] == vision_formula(**vision)
    text = counts["embeddings"] + counts["language_layers"] + counts["head"]
    assert text == language_formula(**language)
    assert counts["total"] == PUBLISHED_TOTALS[found["base"]]
    assert counts["trainable"] == text
    assert counts["frozen"] == vision_formula(**vision)
    assert found["head_tied"] is language["tied"]
    assert found["base_config_from"] == "published sizes"


def test_the_full_question_has_the_pictures_of_the_public_recipe() -> None:
    shapes = described("experiment=memer_qwen3vl_4b")["shapes"]
    # Two 320 x 180 views within 50,176 .. 115,200 px: 10 x 11 cells of 32 px (spec of pixels and tokens).
    assert shapes["frame_tokens"] == 110
    assert shapes["picture_tokens"] == 16 * 110
    assert shapes["picture_tokens"] < shapes["question_tokens"] < shapes["max_length_tokens"]
    none = described("experiment=memer_qwen3vl_4b", "contract.memory_form=none")["shapes"]
    assert (none["memory_images"], none["window_images"], none["picture_tokens"]) == (0, 1, 110)


def test_the_language_planner_is_described_with_its_adapters_and_the_head_view() -> None:
    found = described("experiment=map_language_planner_qwen35_4b")
    counts, shapes = found["parameters"], found["shapes"]
    vision = vision_formula(features=1024, inner=4096, blocks=24, out=2560, levels=0)
    assert counts["vision_tower"] + counts["projector"] == vision
    # 24 layers of linear attention: 16 heads of queries and keys, 32 of values, 128 features each; 8 of full
    # attention: 16 gated heads of 256 features, 4 of keys and values.
    inner, keys, values = 9216, 16 * 128, 32 * 128
    linear = 2560 * (2 * keys + values + values + 2 * 32) + values * 2560  # inputs and output
    linear += 4 * (2 * keys + values) + 2 * 32 + 128  # convolution, decay, norm
    full = 2560 * (2 * 16 + 2 * 4) * 256 + 16 * 256 * 2560 + 2 * 256
    shared = 3 * 2560 * inner + 2 * 2560
    text = 248_320 * 2560 + 24 * linear + 8 * full + 32 * shared + 2560
    assert counts["frozen"] == text + vision == 4_539_265_536
    rank = 32
    per_linear = rank * (2560 + 2 * keys + values) + 2 * rank * (2560 + values) + 2 * rank * (2560 + 32)
    per_full = rank * (2560 + 2 * 4096) + 2 * rank * (2560 + 1024) + rank * (4096 + 2560)
    assert counts["adapters"] == 24 * per_linear + 8 * per_full + 32 * 3 * rank * (2560 + inner)
    assert counts["trainable"] == counts["adapters"]
    assert shapes["stacked_frame_px"] == [320, 256], "the head view alone, as the canvas has it"
    assert shapes["resized_frame_px"][0] * shapes["resized_frame_px"][1] <= 320 * 240
    assert (shapes["memory_images"], shapes["window_images"]) == (17, 0)


@pytest.mark.parametrize("experiment", ["memer_tiny", "map_language_planner_tabletop"])
def test_the_tiny_experiment_is_the_model_that_the_run_makes(tmp_path: Path, experiment: str) -> None:
    config = compose("describe", [f"experiment={experiment}"])
    node = {k: v for k, v in config["model"]["tiny_base"]["size"].items() if k != "_target_"}
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, 6))) for _ in range(400)]  # fills the vocabulary
    real = load_base(make_tiny_base(tmp_path / "base", corpus=words * 3, size=TinySize(**node))).model
    assert describe(config)["parameters"]["total"] == sum(p.numel() for p in real.parameters())


@pytest.mark.parametrize("lora", [False, True])
def test_counts_are_those_of_the_configured_module(base: Path, lora: bool) -> None:
    overrides = ["lora=qwen", "lora.rank=4"] if lora else []
    config = compose("describe", [*on_base(base), *overrides])
    counts = describe(config)["parameters"]
    settings = {k: v for k, v in config["lora"].items() if k != "_target_"} if lora else None
    module = PlannerModule(str(base), contract=tiny_contract(), optim={"total_steps": 1}, lora=settings)
    module.configure_model()
    sums: dict[str, int] = {}
    for name, parameter in module.model.named_parameters():
        sums[name] = parameter.numel()
    assert counts["total"] == sum(sums.values())
    assert counts["trainable"] == sum(p.numel() for p in module.trainable().values())
    assert counts["frozen"] == counts["total"] - counts["trainable"]
    assert counts["adapters"] == sum(n for name, n in sums.items() if ".lora_" in name)
    assert bool(counts["adapters"]) is lora
    tower = sum(n for name, n in sums.items() if name.startswith("model.visual."))
    assert counts["vision_tower"] + counts["projector"] == tower
    assert counts["projector"] == sum(n for name, n in sums.items() if "merger" in name)


def test_shapes_are_those_of_a_real_batch(base: Path, tmp_path: Path) -> None:
    layout = CameraLayout(camera_keys=("base", "wrist"), view_width=96, view_height=32)
    contract = replace(tiny_contract(), cameras=layout)
    contract.save(tmp_path)
    config = compose("describe", [*on_base(base), f"data.train.demos.root={tmp_path}"])
    found = describe(config)["shapes"]
    contract = contract.updated(config["contract"])
    asked = full_question(contract)
    rng = np.random.default_rng(0)
    width, height = layout.stacked_size
    frames = {key: rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for key in asked.image_keys}
    module = PlannerModule(str(base), contract=contract, optim={"total_steps": 1})
    module.configure_model()
    batch = module.make_collator()(
        [
            PlannerSample(
                sample_id="x",
                source="",
                episode_index=0,
                step=0,
                question=replace(asked, frames=frames),
                subtask="wait",
                positions=(1,),
            )
        ]
    )
    geometry = module.make_encoder().geometry
    levels = encode_frames(module.model, batch.patches, grids=batch.frame_grids, geometry=geometry)
    assert found["cameras_from"] == str(tmp_path)
    assert found["stacked_frame_px"] == [width, height]
    assert found["patches"] == list(batch.patches.shape)
    assert found["frame_features"] == list(torch.stack(levels).shape)
    assert found["question_tokens"] == batch.input_ids.shape[1] - batch.num_targets
    assert found["position_ids"] == [4, 1, found["question_tokens"]]


def test_memory_is_that_of_the_real_tensors(base: Path) -> None:
    found = described(*on_base(base))["memory_per_device"]
    module = PlannerModule(str(base), contract=tiny_contract(), optim={"total_steps": 1})
    module.configure_model()
    trained = list(module.trainable().values())
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    real = {
        "weights": list(module.parameters()),
        "gradients": [p.grad for p in trained if p.grad is not None],
        "adamw_moments": moments,
    }
    for name, tensors in real.items():
        gib = sum(t.numel() * t.element_size() for t in tensors) / 1024**3
        assert found[f"{name}_gib"] == pytest.approx(gib, rel=1e-3), name


def gib(parameters: float, num_bytes: int) -> float:
    return float(f"{parameters * num_bytes / 1024**3:.4g}")


def test_memory_follows_strategy_and_precision() -> None:
    model = meta_model(PUBLISHED["Qwen/Qwen3-VL-4B-Instruct"]())
    counts = count_parameters(model)
    trained, total = counts["trainable"], counts["total"]

    def memory(strategy: Any, devices: int, *, checkpointing: bool = True) -> dict[str, float]:
        plan = TrainingPlan(
            precision="bf16-mixed",
            strategy=strategy,
            devices=devices,
            activation_checkpointing=checkpointing,
        )
        return training_memory(model, plan)

    one, two = memory("auto", 1), memory("ddp", 2)
    assert one["weights_gib"] == gib(total, 4)
    assert one["adamw_moments_gib"] == gib(trained, 8)
    assert two["gradient_buckets_gib"] == one["gradients_gib"] == gib(trained, 4)
    assert one["gradient_buckets_gib"] == 0
    view = {
        "_target_": "lightning.pytorch.strategies.DDPStrategy",
        "gradient_as_bucket_view": True,
    }
    assert memory(view, 2)["sum_without_activations_gib"] == one["sum_without_activations_gib"]
    assert one["autocast_copies_gib"] == gib(151_936 * 2560, 2), "the tied head alone"
    assert memory("auto", 1, checkpointing=False)["autocast_copies_gib"] > gib(3_600_000_000, 2)

    sharded = memory("deepspeed_stage_2", 8)
    assert sharded["weights_gib"] == gib(total, 2)
    assert sharded["master_weights_gib"] == gib(trained / 8, 4)
    assert sharded["gradients_gib"] == gib(trained / 8, 2)
    assert sharded["adamw_moments_gib"] == gib(trained / 8, 8)
    for found in (one, two, sharded):
        parts = [value for name, value in found.items() if not name.startswith("sum")]
        assert found["sum_without_activations_gib"] == pytest.approx(sum(parts), rel=1e-3)


def test_a_precision_that_training_refuses_is_refused() -> None:
    with pytest.raises(UsageError, match=r"trainer\.precision: '16-mixed'"):
        described("experiment=memer_tiny", "trainer.precision=16-mixed")


def test_the_cache_of_the_hub_comes_before_published_sizes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "Qwen/Qwen3-VL-4B-Instruct"
    repo = tmp_path / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_config(name).origin == "published sizes"
    (snapshot / "config.json").write_bytes((base / "config.json").read_bytes())
    found = find_config(name)
    assert found.origin == "hub cache"
    assert found.folder == snapshot
    assert found.config.text_config.hidden_size == find_config(base).config.text_config.hidden_size == 128


def test_an_unknown_base_names_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(base: Any) -> None:
        raise SourceUnavailableError(f"base model {base}: cannot be loaded")

    monkeypatch.setattr(sizes, "load_config", unreachable)
    with pytest.raises(SourceUnavailableError, match=r"Qwen/Other.*Qwen3-VL-4B-Instruct"):
        described("experiment=memer_qwen3vl_4b", "model.module.base=Qwen/Other")


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError, match="no such folder"):
        described("experiment=memer_qwen3vl_4b", f"model.module.base={tmp_path / 'none'}")
    with pytest.raises(UsageError, match=r"model\.module\.base: missing"):
        described("experiment=memer_tiny", "model.tiny_base=null")


def test_shapes_stand_on_one_line_and_the_whole_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(compose("describe", ["experiment=memer_tiny"])) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["shapes"]["stacked_frame_px"] == [320, 360]
    assert '"stacked_frame_px": [320, 360],' in text


@pytest.mark.slow
def test_the_command_prints_json_alone_and_leaves_no_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "models.describe", "experiment=memer_qwen3vl_4b_lora"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(CONF_DIR.parent), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)["parameters"]
    assert 0 < counts["adapters"] == counts["trainable"] < counts["total"] / 20
    assert not list(tmp_path.glob("runs"))
    assert not list(tmp_path.glob("outputs"))
