import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from memer.errors import UsageError
from models.tiny import SPECIAL_TOKENS, TinySize
from tests.models.samples import tiny_base


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights(base: Path, tmp_path: Path) -> None:
    again = hashes(tiny_base(tmp_path / "again"))
    other = hashes(tiny_base(tmp_path / "other", seed=1))
    assert again == hashes(base)
    assert {name for name in again if again[name] != other[name]} == {"model.safetensors"}


def test_folder_loads_by_the_auto_classes_as_qwen3_vl(base: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    processor = AutoImageProcessor.from_pretrained(base)
    assert model.config.model_type == "qwen3_vl"
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert model.config.text_config.vocab_size % 64 == 0
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id[0] == tokenizer.eos_token_id
    assert processor.size["shortest_edge"], processor.size["longest_edge"] == (1_024, 9_216)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert json.loads((base / name).read_text())["patch_size"] == 16


def test_tokenizer_keeps_any_text_and_splits_digits(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    text = "Grüße, 机器人 1234 \U0001f916\n\ttabs"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    pieces = [tokenizer.decode([i]) for i in tokenizer("1234").input_ids]
    assert pieces == ["1", "2", "3", "4"]
    assert all(len(tokenizer(token).input_ids) == 1 for token in SPECIAL_TOKENS)


def test_tower_matrices_have_fan_in_scale(base: Path) -> None:
    tower = AutoModelForImageTextToText.from_pretrained(base).model.visual
    scaled = 0
    for name, weight in tower.named_parameters():
        if weight.ndim >= 2 and weight.numel() > 2_000:
            expected = 1 / math.sqrt(weight[0].numel())
            assert abs(weight.std().item() / expected - 1) < 0.1, name
            scaled += 1
    assert scaled > 20
    assert torch.equal(tower.blocks[0].attn.qkv.bias, torch.zeros_like(tower.blocks[0].attn.qkv.bias))


def test_impossible_size_is_named() -> None:
    with pytest.raises(UsageError, match=r"TinySize\.vision_positions: 60"):
        TinySize(vision_positions=60)


def test_an_existing_folder_is_replaced_whole(tmp_path: Path) -> None:
    out = tiny_base(tmp_path / "base")
    (out / "stale.txt").write_text("old")
    tiny_base(out)
    assert not (out / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
