"""Sizes of base models without their weights: a folder's or the hub cache's own config.json, or the published
values of the full models, so that their shapes and memory can be worked out with no network.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedConfig, Qwen3_5Config, Qwen3VLConfig

from memer.errors import SourceUnavailableError
from models.qwen_vl import load_config


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A base's configuration and where it was read.

    Attributes:
        config: as the library reads it.
        origin: `folder`, `hub cache`, `published sizes` or `hub`.
        folder: with config.json and perhaps more, None for published sizes.
    """

    config: PreTrainedConfig
    origin: str
    folder: Path | None


def qwen3_vl_4b() -> Qwen3VLConfig:
    """Qwen3-VL-4B: 4 437 815 808 parameters, tied head (values of the published config.json)."""
    return _qwen3_vl(
        hidden_size=2560,
        intermediate_size=9728,
        tied=True,
        vision={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "depth": 24,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    )


def qwen3_vl_8b() -> Qwen3VLConfig:
    """Qwen3-VL-8B: 8 767 123 696 parameters, a head of its own (values of the published config.json)."""
    return _qwen3_vl(
        hidden_size=4096,
        intermediate_size=12_288,
        tied=False,
        vision={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "depth": 27,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    )


def qwen3_5_4b() -> Qwen3_5Config:
    """Qwen3.5-4B without its layer of multi-token prediction: 4 539 265 536 parameters, tied head.

    Three layers of linear attention for each one of full attention (values of the published config.json).
    """
    return Qwen3_5Config(
        text_config={
            "vocab_size": 248_320,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision_config={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "depth": 24,
            "num_heads": 16,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2560,
        },
        image_token_id=248_056,
        video_token_id=248_057,
        vision_start_token_id=248_053,
        vision_end_token_id=248_054,
        tie_word_embeddings=True,
    )


#: Hub id -> configuration.
PUBLISHED: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "Qwen/Qwen3-VL-4B-Instruct": qwen3_vl_4b,
    "Qwen/Qwen3-VL-8B-Instruct": qwen3_vl_8b,
    "Qwen/Qwen3.5-4B": qwen3_5_4b,
}


def find_config(base: str | Path) -> FoundConfig:
    """The configuration of a base: a folder's, the hub cache's, the published one, then the hub's.

    Raises:
        SourceUnavailableError: none of them.
        UsageError: the model type is not supported.
    """
    if Path(base).is_dir():
        return FoundConfig(load_config(base), "folder", Path(base))
    if str(base).count("/") == 1 and str(base)[0] not in "./":
        cached = try_to_load_from_cache(str(base), "config.json")
        if isinstance(cached, str):
            return FoundConfig(load_config(Path(cached).parent), "hub cache", Path(cached).parent)
    if str(base) in PUBLISHED:
        return FoundConfig(PUBLISHED[str(base)](), "published sizes", None)
    try:
        return FoundConfig(load_config(base), "hub", None)
    except SourceUnavailableError as error:
        raise SourceUnavailableError(
            f"{error}; sizes that need no hub: {', '.join(PUBLISHED)}, or a folder with config.json"
        ) from error


def _qwen3_vl(
    *, hidden_size: int, intermediate_size: int, tied: bool, vision: Mapping[str, Any]
) -> Qwen3VLConfig:
    """What the dense models share: 36 layers, 32 query and 8 key-value heads, vocabulary and special ids."""
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 151_936,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": tied,
        },
        vision_config={
            "num_heads": 16,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden_size,
            **vision,
        },
        image_token_id=151_655,
        video_token_id=151_656,
        vision_start_token_id=151_652,
        vision_end_token_id=151_653,
        tie_word_embeddings=tied,
    )
