"""A tiny Qwen base model made on the spot: same classes and files as the full one, trainable on a laptop.

The folder holds everything that a hub folder of Qwen3-VL or Qwen3.5 holds, so loading, training, merging,
export and serving run through the same code. Nothing is downloaded: the tokenizer is a byte-level BPE trained
on the caller's text.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
)

from memer.contract import PromptSettings
from memer.errors import UsageError
from memer.prompts import answer_text
from models.progress import no_progress_bars

#: In the order of the Qwen vocabulary; they follow the learned tokens.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

#: Splits words, single digits, punctuation and white space before merging, as the Qwen tokenizers do.
PRE_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: A turn is <|im_start|>role, newline, content, <|im_end|>, newline; a picture is one pad between its marks.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySize:
    """Sizes of the tiny model; the defaults give about 1.5 M parameters.

    Attributes:
        model_dim: hidden size of the language model, features.
        feedforward_dim: inner size of its MLPs, features.
        num_layers: decoder layers; at least the number of deepstack levels.
        num_heads: query heads.
        num_key_value_heads: key and value heads, divides num_heads.
        head_dim: features per head, even.
        vision_dim: hidden size of the vision tower, features.
        vision_feedforward_dim: inner size of its MLPs, features.
        vision_depth: blocks of the tower; all but the first feed a deepstack level.
        vision_heads: attention heads of the tower.
        vision_positions: learned positions of the tower, a square number.
        vocabulary: learned tokens at most, bytes included; special tokens come on top.
        initializer_range: std of the language model's initial matrices; about 1 / sqrt(model_dim): 0.02
            learns several times slower at this width.
        family: model type; `qwen3_5` mixes linear attention with full attention, and its tower has no
            deepstack levels.
        full_attention_interval: qwen3_5: every how many layers attention is full.
        linear_key_heads: qwen3_5: heads of queries and keys in linear attention.
        linear_value_heads: qwen3_5: value heads in linear attention, a multiple of the former.
        linear_head_dim: qwen3_5: features of each of these heads.
    """

    model_dim: int = 128
    feedforward_dim: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    vision_dim: int = 64
    vision_feedforward_dim: int = 128
    vision_depth: int = 4
    vision_heads: int = 2
    vision_positions: int = 64
    vocabulary: int = 512
    initializer_range: float = 0.08
    family: Literal["qwen3_vl", "qwen3_5"] = "qwen3_vl"
    full_attention_interval: int = 4
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 32

    def __post_init__(self) -> None:
        for name, fine, accepted in (
            ("head_dim", self.head_dim % 2 == 0, "even"),
            ("num_key_value_heads", self.num_heads % self.num_key_value_heads == 0, "a divisor of num_heads"),
            ("vision_positions", math.isqrt(self.vision_positions) ** 2 == self.vision_positions, "a square"),
            ("vision_depth", 1 <= self.vision_depth <= self.num_layers + 1, "1 .. num_layers + 1"),
            ("family", self.family in ("qwen3_vl", "qwen3_5"), "qwen3_vl or qwen3_5"),
            (
                "full_attention_interval",
                1 <= self.full_attention_interval <= self.num_layers,
                "1 .. num_layers",
            ),
            (
                "linear_value_heads",
                self.linear_value_heads % self.linear_key_heads == 0,
                "a multiple of linear_key_heads",
            ),
            ("vocabulary", self.vocabulary >= 256, "at least the 256 bytes"),
        ):
            if not fine:
                raise UsageError(f"TinySize.{name}: {getattr(self, name)!r}, must be {accepted}")

    @property
    def mrope_section(self) -> list[int]:
        """Rotary frequencies of time, height and width, as in the full model: half of what is rotated.

        That is a head, or in Qwen3.5 a quarter of it.
        """
        half = self.head_dim // (2 if self.family == "qwen3_vl" else 8)
        spatial = half * 5 // 16
        return [half - 2 * spatial, spatial, spatial]


def planner_corpus(
    *, subtasks: Iterable[str], instructions: Iterable[str], prompt: PromptSettings, num_positions: int = 8
) -> Iterator[str]:
    """Text that looks like a planner's questions and answers, for the tokenizer of a tiny base."""
    yield prompt.system_text
    yield from (f"Task: {instruction}" for instruction in instructions)
    if prompt.form == "segments":
        yield from (prompt.initial_header, prompt.finished_header, prompt.nothing_finished, prompt.request)
        yield from (f"1. {subtask}{prompt.result_text}" for subtask in subtasks)
        yield from (answer_text(subtask, (), prompt) for subtask in subtasks)
        return
    yield from (prompt.memory_header, prompt.recent_header, prompt.history_header)
    for subtask in subtasks:
        yield f"1. {subtask}"
        for position in range(num_positions + 1):
            yield answer_text(subtask, (position,) if position else (), prompt)


def make_tiny_base(
    out: Path | str,
    *,
    corpus: Iterable[str],
    size: TinySize | None = None,
    seed: int = 0,
    min_pixels: int = 1_024,
    max_pixels: int = 9_216,
) -> Path:
    """Write a complete model folder: weights, tokenizer, chat template and processor files.

    Same arguments, same bytes. The weights are float32. The tower stays frozen in training, so its matrices
    start with std 1 / sqrt(fan_in): with the usual 0.02 the pictures' differences vanish on their way.

    Args:
        out: folder to write; an existing one is replaced once the new one is whole.
        corpus: texts for the tokenizer; see `planner_corpus`.
        size: sizes of the model.
        seed: of the initial weights.
        min_pixels: lower area bound of the image processor, px.
        max_pixels: upper area bound, px.

    Returns:
        The folder.
    """
    out = Path(out)
    size = size or TinySize()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        tokenizer = _train_tokenizer(corpus, vocabulary=size.vocabulary)
        _write_tokenizer(temporary, tokenizer)
        _write_processors(temporary, min_pixels=min_pixels, max_pixels=max_pixels)
        _write_model(temporary, tokenizer, size=size, seed=seed)
        if out.exists():
            shutil.rmtree(out)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def tiny_config(size: TinySize, *, num_tokens: int) -> PreTrainedConfig:
    """The model configuration of a size.

    Args:
        size: of the model.
        num_tokens: of the tokenizer, the special ones last; the embedding's rows are rounded up to 64.
    """
    ids: dict[str, Any] = {
        token: num_tokens - len(SPECIAL_TOKENS) + k for k, token in enumerate(SPECIAL_TOKENS)
    }
    text: dict[str, Any] = {}
    vision: dict[str, Any] = {"deepstack_visual_indexes": list(range(1, size.vision_depth))}
    rope: dict[str, Any] = {}
    if size.family == "qwen3_5":
        vision = {}
        rope = {"partial_rotary_factor": 0.25}
        text = {
            "full_attention_interval": size.full_attention_interval,
            "linear_num_key_heads": size.linear_key_heads,
            "linear_num_value_heads": size.linear_value_heads,
            "linear_key_head_dim": size.linear_head_dim,
            "linear_value_head_dim": size.linear_head_dim,
        }
    kind = Qwen3_5Config if size.family == "qwen3_5" else Qwen3VLConfig
    return kind(
        text_config={
            "vocab_size": math.ceil(num_tokens / 64) * 64,
            "hidden_size": size.model_dim,
            "intermediate_size": size.feedforward_dim,
            "num_hidden_layers": size.num_layers,
            "num_attention_heads": size.num_heads,
            "num_key_value_heads": size.num_key_value_heads,
            "head_dim": size.head_dim,
            "initializer_range": size.initializer_range,
            "max_position_embeddings": 131_072,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000,
                "mrope_section": size.mrope_section,
                "mrope_interleaved": True,
                **rope,
            },
            "tie_word_embeddings": True,
            **text,
        },
        vision_config={
            "hidden_size": size.vision_dim,
            "intermediate_size": size.vision_feedforward_dim,
            "depth": size.vision_depth,
            "num_heads": size.vision_heads,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": size.model_dim,
            "num_position_embeddings": size.vision_positions,
            **vision,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def _train_tokenizer(corpus: Iterable[str], *, vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def _write_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "additional_special_tokens": list(SPECIAL_TOKENS),
            "clean_up_tokenization_spaces": False,
            "model_max_length": 131_072,
        },
    )


def _write_processors(out: Path, *, min_pixels: int, max_pixels: int) -> None:
    shared = {
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    _write_json(
        out / "preprocessor_config.json", shared | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    )
    _write_json(
        out / "video_preprocessor_config.json", shared | {"video_processor_type": "Qwen3VLVideoProcessor"}
    )


def _write_model(out: Path, tokenizer: Tokenizer, *, size: TinySize, seed: int) -> None:
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    config = tiny_config(size, num_tokens=tokenizer.get_vocab_size())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        _scale_tower(model.model.visual)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
    )
    with no_progress_bars():
        model.save_pretrained(out)


@torch.no_grad()
def _scale_tower(tower: nn.Module) -> None:
    """Give every matrix of the tower std 1 / sqrt(fan_in), the patch embedding's 3-D kernel included."""
    for parameter in tower.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))


def _write_json(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
