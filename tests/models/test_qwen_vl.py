import inspect
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen3_5Config
from transformers.integrations import hub_kernels

from memer.errors import MemerError, SourceUnavailableError, UsageError
from models.pixels import PixelGeometry
from models.prompt_encoder import PromptEncoder
from models.qwen_vl import (
    available_attention,
    base_fingerprint,
    check_packing,
    encode_frames,
    freeze_tower,
    load_base,
    load_config,
    load_encoder,
)
from tests.models.samples import frame, tiny_base, tiny_contract


@pytest.mark.parametrize("name", ["/nowhere/base", "./nowhere", "runs/none/base"])
def test_a_missing_base_is_one_line_with_exit_code_3(name: str) -> None:
    with pytest.raises(SourceUnavailableError, match=f"base model {name}: no such folder") as caught:
        load_base(name)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError, match=r"no config\.json"):
        load_base(tmp_path)


def test_a_folder_without_weights_is_named(base: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(base, tmp_path / "broken"))
    (broken / "model.safetensors").unlink()
    with pytest.raises(SourceUnavailableError, match="broken"):
        load_base(broken)


def test_a_text_model_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UsageError, match="'qwen3' has no vision tower"):
        load_base(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_vl"])
def test_a_family_with_another_tower_is_refused(base: Path, tmp_path: Path, model_type: str) -> None:
    """28 px units and window attention: loading would work, and every picture would be read wrongly."""
    other = Path(shutil.copytree(base, tmp_path / "other"))
    (other / "config.json").write_text(json.dumps({"model_type": model_type}))
    for load in (load_config, load_base, lambda path: load_encoder(path, tiny_contract())):
        with pytest.raises(UsageError, match=f"'{model_type}' is not supported.*qwen3_vl") as caught:
            load(other)
        assert "\n" not in str(caught.value)
        assert str(other) in str(caught.value)


def test_the_class_follows_the_configuration_not_the_path(base: Path, tmp_path: Path) -> None:
    renamed = Path(shutil.copytree(base, tmp_path / "qwen2_5_vl"))
    assert load_base(renamed).model.config.model_type == "qwen3_vl"


def test_a_contract_for_another_family_is_refused(base: Path) -> None:
    assert load_encoder(base, tiny_contract(model_family="qwen3_vl"))
    with pytest.raises(MemerError, match="qwen2_5_vl"):
        load_encoder(base, tiny_contract(model_family="qwen2_5_vl"))


def test_flash_falls_back_to_sdpa_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, flash attention may be available")
    with caplog.at_level(logging.WARNING):
        assert available_attention("flash_attention_2") == "sdpa"
    assert "flash_attn" in caplog.text
    assert available_attention("eager") == "eager"


def test_the_whole_tower_is_frozen_and_nothing_else(loaded) -> None:
    freeze_tower(loaded.model)
    frozen = {name for name, p in loaded.model.named_parameters() if not p.requires_grad}
    expected = {name for name, _ in loaded.model.named_parameters() if name.startswith("model.visual.")}
    assert frozen == expected
    assert {part for name in frozen for part in name.split(".")} >= {
        "deepstack_merger_list",
        "pos_embed",
        "merger",
    }
    assert not loaded.model.model.visual.training


def test_features_of_frames_are_those_of_the_library(base: Path, loaded, encoder: PromptEncoder) -> None:
    plain = AutoModelForImageTextToText.from_pretrained(base).eval()
    sizes = [(128, 64), (128, 64), (64, 64), (128, 64), (96, 96)]
    frames = [frame(("made", 0, i), height=h, width=w) for i, (h, w) in enumerate(sizes)]
    bounds = {"shortest_edge": 1_024, "longest_edge": 9_216}
    theirs = encoder.image_processor(images=frames, size=bounds, return_tensors="pt")
    with torch.no_grad():
        expected = plain.get_image_features(
            theirs["pixel_values"], theirs["image_grid_thw"], return_dict=True
        )
    patches = torch.cat([torch.from_numpy(encoder.geometry.patches(picture)) for picture in frames])
    grids = [encoder.geometry.grid(size) for size in sizes]
    levels = encode_frames(loaded.model, patches, grids=grids, geometry=encoder.geometry)
    assert all(not level.requires_grad for level in levels)
    for ours, level in zip(levels, [expected.pooler_output, *expected.deepstack_features], strict=True):
        torch.testing.assert_close(ours, torch.cat(level), atol=2e-5, rtol=0)


def test_the_tower_runs_in_portions_with_the_same_result(
    loaded, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry: PixelGeometry = encoder.geometry
    patches = torch.cat([torch.from_numpy(geometry.patches(frame(("made", 1, i)))) for i in range(5)])
    whole = encode_frames(loaded.model, patches, grids=[(8, 4)] * 5, geometry=geometry)
    monkeypatch.setattr("models.qwen_vl.TOWER_PATCHES", 64)
    parts = encode_frames(loaded.model, patches, grids=[(8, 4)] * 5, geometry=geometry)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_packing_is_refused_for_linear_attention_without_kernels(base: Path) -> None:
    hybrid = Qwen3_5Config()
    assert "linear_attention" in hybrid.text_config.layer_types
    with pytest.raises(UsageError, match="pack_tokens=0"):
        check_packing(hybrid, kernels=("no_such_kernel",))
    check_packing(hybrid, kernels=("json",))
    check_packing(load_config(base), kernels=("no_such_kernel",))


def test_fingerprint_follows_the_weights(base: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    assert base_fingerprint(copy) == base_fingerprint(base)
    assert base_fingerprint(tiny_base(tmp_path / "other", seed=3)) != base_fingerprint(base)


@pytest.mark.parametrize("gpu", [False, True])
def test_kernels_are_advised_only_where_they_could_run(
    base: Path, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_base(base)
    text = "is falling back to its reference PyTorch implementation because"
    assert text in inspect.getsource(hub_kernels)
    logger = logging.getLogger(hub_kernels.__name__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for message, shown in ((f"`f` {text} `fla` is not installed", gpu), ("another warning", True)):
        record = logger.makeRecord(logger.name, logging.WARNING, __file__, 1, message, (), None)
        assert bool(logger.filter(record)) is shown
