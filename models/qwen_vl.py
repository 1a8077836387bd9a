"""Qwen vision-language models: loading, the frozen tower, features per frame, hidden states.

Shapes: P patches, F frames, T picture tokens of all frames, R rows, L tokens per row, C hidden features.
"""

import hashlib
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures
from transformers.vision_utils import get_vision_position_ids

from memer.contract import Contract
from memer.errors import MemerError, SourceUnavailableError, UsageError
from models.pixels import PixelGeometry, normalized
from models.progress import no_progress_bars
from models.prompt_encoder import PromptEncoder

log = logging.getLogger(__name__)

Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"]

#: Patches that go through the tower at once; bounds its memory, not its result.
TOWER_PATCHES = 16_384

#: `config.model_type` of the bases whose towers, positions and features the code below reproduces.
SUPPORTED_MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")

#: Modules that layers with a recurrent state need before samples may share a row.
LINEAR_ATTENTION_KERNELS = ("fla", "causal_conv1d")

#: Logger that advises, once per function, to install such kernels.
_KERNEL_LOGGER = "transformers.integrations.hub_kernels"

_FINGERPRINT_SAMPLES = 16
_TOWER_ATTENTION = "memer_flash_equal_lengths"


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A base model with what belongs to it.

    Attributes:
        model: the class that `config.model_type` names, in eval mode.
        tokenizer: its fast tokenizer.
        image_processor: built from its preprocessor_config.json.
    """

    model: Any
    tokenizer: Any
    image_processor: Any


def load_config(base: str | Path) -> PreTrainedConfig:
    """The configuration of a local folder or hub id, without weights.

    Raises:
        SourceUnavailableError: nothing there.
        UsageError: no vision tower, or of a family whose tower and positions are not reproduced here; names
            the model type and the supported ones.
    """
    config: PreTrainedConfig = _load(AutoConfig, base)
    if not hasattr(config, "vision_config") or not hasattr(config, "text_config"):
        raise UsageError(
            f"{base}: model type {config.model_type!r} has no vision tower; give a Qwen3-VL model"
        )
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise UsageError(
            f"{base}: model type {config.model_type!r} is not supported (its patches, positions or picture "
            f"features differ); supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    return config


def load_base(
    base: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: Attention = "sdpa",
) -> LoadedBase:
    """Load weights, tokenizer and image processor; the class follows the configuration's model type.

    Raises:
        SourceUnavailableError: nothing there.
        UsageError: not a supported image-and-text model.
    """
    load_config(base)
    logging.getLogger(_KERNEL_LOGGER).addFilter(_kernels_could_run)
    with no_progress_bars():
        model = _load(
            AutoModelForImageTextToText, base, dtype=dtype, attn_implementation=available_attention(attention)
        )
    if not hasattr(getattr(model, "model", None), "visual"):
        raise UsageError(f"{base}: {type(model).__name__} has no model.visual tower; give a Qwen3-VL model")
    _speed_up_tower(model.model.visual)
    tokenizer, image_processor = load_processors(base)
    return LoadedBase(model.eval(), tokenizer, image_processor)


def _kernels_could_run(record: logging.LogRecord) -> bool:
    """Whether to show a record: the kernels need a GPU, so without one four lines advise what cannot help."""
    return torch.cuda.is_available() or "reference PyTorch implementation" not in record.getMessage()


def load_processors(base: str | Path) -> tuple[Any, Any]:
    """Tokenizer and image processor of a base, without its weights."""
    return _load(AutoTokenizer, base), _load(AutoImageProcessor, base, backend="pil")


def load_encoder(base: str | Path, contract: Contract) -> PromptEncoder:
    """The prompt encoder of a base under a contract; needs no weights, so data workers can hold it.

    Raises:
        MemerError: the contract is for another model family, or pictures or prompt would differ in serving.
    """
    config = load_config(base)
    if contract.model_family not in ("", config.model_type):
        raise MemerError(
            f"contract.model_family: {contract.model_family!r}, but {base} is a {config.model_type!r} model"
        )
    return PromptEncoder(*load_processors(base), contract)


def available_attention(attention: Attention) -> Attention:
    """`attention` itself, or sdpa with a notice where its package or a GPU is missing."""
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(attention)
    if package is None or (importlib.util.find_spec(package) and torch.cuda.is_available()):
        return attention
    log.warning("attention %s: package %s or a GPU is missing; using sdpa", attention, package)
    return "sdpa"


def check_packing(config: PreTrainedConfig, *, kernels: Sequence[str] = LINEAR_ATTENTION_KERNELS) -> None:
    """Refuse rows with several samples where the layers carry a state from one sample into the next.

    Raises:
        UsageError: linear-attention layers without the kernels that know sample boundaries.
    """
    layer_types = getattr(config.text_config, "layer_types", None) or ()
    if "linear_attention" not in layer_types:
        return
    missing = [name for name in kernels if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"pack_tokens: packing leaks state between samples in the linear-attention layers of "
            f"{config.model_type!r} without {', '.join(missing)}; install them or set pack_tokens=0"
        )


def freeze_tower(model: Any) -> None:
    """Freeze everything under `model.visual`: blocks, position table, merger and every deepstack merger."""
    tower: nn.Module = model.model.visual
    tower.requires_grad_(False)
    tower.eval()


@torch.no_grad()
def encode_frames(
    model: Any, patches: Tensor, *, grids: Sequence[tuple[int, int]], geometry: PixelGeometry
) -> list[Tensor]:
    """Run the frozen tower over distinct frames.

    Args:
        model: as loaded.
        patches: uint8[P, ...], patches of all frames in order.
        grids: (rows, columns) of each frame, patches.
        geometry: for normalisation.

    Returns:
        One [T, C] tensor per level: the merged output, then every deepstack level; frames in order.
    """
    parts: list[list[Tensor]] = []
    start = first = 0
    while first < len(grids):
        grid = grids[first]
        size = grid[0] * grid[1]
        last = first
        while last < len(grids) and grids[last] == grid and (last - first) * size < max(size, TOWER_PATCHES):
            last += 1
        stop = start + (last - first) * size
        parts.append(_run_tower(model.model.visual, patches[start:stop], grid, last - first, geometry))
        first, start = last, stop
    return [torch.cat(level) if len(parts) > 1 else level[0] for level in zip(*parts, strict=True)]


def language_hidden(
    model: Any,
    input_ids: Tensor,
    *,
    position_ids: Tensor,
    features: Sequence[Tensor],
    attention_mask: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Last hidden states, with pictures given as features instead of pixels.

    Without mask and cache the library derives the causal mask from the jumps of `position_ids[0]`: tokens of
    one sample see each other, tokens of different samples in a row do not.

    Args:
        model: as loaded.
        input_ids: int64[R, L].
        position_ids: int64[4, R, L], text positions restarting with every sample, then time, height, width.
        features: one [n, C] tensor per level for the picture tokens, row by row; empty without pictures.
        attention_mask: bool[R, L + cached], True = real token; None for packed rows.
        cache: keys and values of earlier tokens, extended in place.
        **kwargs: handed to the attention, such as cu_seq_lens_q.

    Returns:
        [R, L, C].
    """
    pictures = None
    if features:
        pictures = {
            "image": BaseModelOutputWithDeepstackFeatures(
                pooler_output=[features[0]], deepstack_features=[[level] for level in features[1:]]
            )
        }
    outputs = model.model(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        cache=cache,
        use_cache=cache is not None,
        mm_encoder_outputs=pictures,
        **kwargs,
    )
    return outputs.last_hidden_state  # type: ignore[no-any-return]


def _run_tower(
    tower: Any, patches: Tensor, grid: tuple[int, int], count: int, geometry: PixelGeometry
) -> list[Tensor]:
    one = torch.tensor([[1, *grid]], device=patches.device)
    places = get_vision_position_ids(one, geometry.merge_size)
    outputs = tower(
        normalized(patches, geometry).to(tower.dtype),
        grid_thw=one.expand(count, -1),
        position_ids=places.repeat(count, 1),
        return_dict=True,
    )
    return [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or [])]


def _speed_up_tower(tower: Any) -> None:
    """Same results with fewer operations: patches by one matrix product, attention over all frames at once.

    The 3-D convolution of the patch embedding has no overlap, so it is a matrix product; as a convolution it
    takes longer than the rest of a small tower, and several torch releases run it 5-20 times slower still. A
    still picture fills a patch with equal copies in time, so one copy meets the kernel summed over time.
    """
    projection = tower.patch_embed.proj

    def embed(patches: Tensor) -> Tensor:
        kernel = projection.weight.flatten(3)
        if patches.shape[1] < kernel[0].numel():
            kernel = kernel.float().sum(2).to(kernel.dtype)
        return F.linear(patches.to(kernel.dtype), kernel.flatten(1), projection.bias)

    tower.patch_embed.forward = embed
    if tower.config._attn_implementation == "sdpa":
        tower.config._attn_implementation = _TOWER_ATTENTION


def _equal_length_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of many pictures of one size as one batch, where the library would loop over pictures.

    Args:
        module: unused, part of the interface.
        query: [1, heads, P, head_dim], all pictures in one row; `key` and `value` alike.
        key: see query.
        value: see query.
        attention_mask: None.
        scaling: factor on the scores.
        cu_seq_lens_q: int[F + 1], where each picture starts.
        max_length_q: patches of the longest picture.
        **kwargs: unused.

    Returns:
        [1, P, heads, head_dim] and None.
    """
    _, heads, total, head_dim = query.shape
    count = len(cu_seq_lens_q) - 1
    if count * max_length_q != total:
        raise ValueError(f"{count} pictures of up to {max_length_q} patches, but {total} patches in all")
    q, k, v = (x.view(heads, count, max_length_q, head_dim).transpose(0, 1) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
    return out.permute(0, 2, 1, 3).reshape(1, total, heads, head_dim), None


AttentionInterface.register(_TOWER_ATTENTION, _equal_length_attention)


def _load(kind: Any, base: str | Path, **kwargs: Any) -> Any:
    """`kind.from_pretrained` with our words for what is missing; code from the folder is never run."""
    path = Path(base)
    local = path.is_dir()
    looks_local = path.is_absolute() or str(base).startswith(".") or str(base).count("/") != 1
    if looks_local and not local:
        raise SourceUnavailableError(
            f"base model {base}: no such folder; give a folder with config.json or a hub id as owner/name"
        )
    if local and not (path / "config.json").is_file():
        raise SourceUnavailableError(f"base model {base}: no config.json in this folder")
    try:
        return kind.from_pretrained(str(base), trust_remote_code=False, **kwargs)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise SourceUnavailableError(
            f"base model {base}: {kind.__name__} cannot be loaded ({reason})"
        ) from error


def base_fingerprint(base: str | Path) -> str:
    """A short hash that tells two bases apart: names, sizes and samples of a folder's weight files.

    Reads a few megabytes whatever the model's size. A hub id stands for itself.
    """
    path = Path(base)
    if not path.is_dir():
        return str(base)
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for part in range(_FINGERPRINT_SAMPLES):
                stream.seek(size * part // _FINGERPRINT_SAMPLES)
                digest.update(stream.read(65_536))
    return digest.hexdigest()
