"""The check that an exported folder loads by itself and is the model that was meant."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.func import functional_call
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    ProcessorMixin,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.utils import logging as transformers_logging

from callbacks.tuned import TunedModel
from memer.contract import Contract
from memer.errors import MemerError
from memer.weights import WeightFiles

#: Of the largest logit; both sides compute in float32, but not by the same sequence of kernels.
TOLERANCE = 1e-4


def check_reload(folder: Path, tuned: TunedModel) -> float:
    """Load an exported folder as anyone would, and compare it with the model in memory.

    Keys must be the base's, nothing may be missing, unexpected or left at random values, the processor must
    give the grid that the contract's pixel bounds mean, and the logits of a picture with text must equal the
    logits of the module's own model with the merged weights.

    Returns:
        Largest logit difference, as a share of the largest logit.

    Raises:
        MemerError: naming what differs.
    """
    keys = WeightFiles.open(folder).entries.keys()
    expected_keys = tuned.files.entries.keys() - tuned.drop
    if keys != expected_keys:
        raise MemerError(
            f"{folder}: {len(expected_keys - keys)} keys of the base are missing, "
            f"{len(keys - expected_keys)} extra"
        )
    inputs = probe_inputs(folder, tuned.module.contract)
    expected = memory_logits(tuned.module.model, folder, inputs)
    found = reloaded_logits(folder, inputs)
    share = float((found - expected).abs().max() / expected.abs().max())
    if not share <= TOLERANCE:  # also refuses NaN
        raise MemerError(
            f"{folder}: reloaded logits differ from the model in memory by {share:.2g} of the largest logit, "
            f"at most {TOLERANCE:g} is rounding; the weights were not read as they were meant"
        )
    return share


def probe_inputs(folder: Path, contract: Contract) -> dict[str, Tensor]:
    """One stacked picture between two words, made with the folder's own tokenizer and image processor.

    Raises:
        MemerError: the processor does not apply the contract's bounds.
    """
    tokenizer, image_processor = load_processors(folder)
    width, height = contract.cameras.stacked_size
    ramp = np.add.outer(np.arange(height), np.arange(width))
    picture = Image.fromarray(np.stack([ramp % 256, ramp * 3 % 256, ramp * 7 % 256], -1).astype(np.uint8))
    pixels = image_processor(images=[picture], return_tensors="pt")
    grid = pixels["image_grid_thw"]
    size = image_processor.patch_size
    meant = smart_resize(
        height,
        width,
        factor=size * image_processor.merge_size,
        min_pixels=contract.min_pixels,
        max_pixels=contract.max_pixels,
    )
    if [int(n) * size for n in grid[0, 1:]] != list(meant):
        raise MemerError(
            f"{folder}: a picture of {width}x{height} px gets the grid {grid[0].tolist()}, the contract's "
            f"bounds {contract.min_pixels}..{contract.max_pixels} px mean {meant[1]}x{meant[0]} px"
        )
    special = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("vision_start", "image_pad", "vision_end")
    }
    count = int(grid[0].prod()) // image_processor.merge_size**2
    words = tokenizer("Task: look", add_special_tokens=False)["input_ids"]
    pads = [special["image_pad"]] * count
    ids = torch.tensor([[*words, special["vision_start"], *pads, special["vision_end"], *words]])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == special["image_pad"]).long(),
        "pixel_values": pixels["pixel_values"],
        "image_grid_thw": grid,
    }


def load_processors(folder: Path) -> tuple[Any, Any]:
    """Tokenizer and image processor; through AutoProcessor where it can be built (it needs torchvision).

    Raises:
        MemerError: the folder's files do not load.
    """
    try:
        with suppress(ImportError, AttributeError):  # what transformers raises without torchvision
            processor = AutoProcessor.from_pretrained(folder)
            if isinstance(processor, ProcessorMixin):
                return processor.tokenizer, processor.image_processor
        return (
            AutoTokenizer.from_pretrained(folder),
            AutoImageProcessor.from_pretrained(folder, backend="pil"),
        )
    except (OSError, ValueError) as error:
        raise MemerError(f"{folder}: tokenizer or image processor does not load ({error})") from None


@torch.no_grad()
def memory_logits(model: Any, folder: Path, inputs: dict[str, Tensor]) -> Tensor:
    """float32[1, L, V]: logits of the model in memory with a folder's weights in its trained places."""
    files = WeightFiles.open(folder)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:  # the merged matrix holds the update already
            weights[name] = torch.zeros_like(parameter)
        elif ".base_layer." in name or (parameter.requires_grad and ".lora_A." not in name):
            stored = files.read(name.replace("_orig_mod.", "").replace(".base_layer.", "."))
            weights[name] = stored.to(parameter)
    device = next(model.parameters()).device
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    with _plain_evaluation(model):
        outputs = functional_call(model, weights, args=(), kwargs=moved | {"use_cache": False})
    return outputs.logits.float().cpu()


@torch.no_grad()
def reloaded_logits(folder: Path, inputs: dict[str, Tensor]) -> Tensor:
    """float32[1, L, V]: logits of the folder's model, loaded by transformers in float32.

    Raises:
        MemerError: it does not load, or tensors are missing, unexpected or of another shape.
    """
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, info = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise MemerError(f"{folder}: the exported model does not load ({error})") from None
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            names = sorted(str(name) for name in info[what])
            raise MemerError(f"{folder}: loaded with {len(names)} {what.replace('_', ' ')}, first {names[0]}")
    logits: Tensor = model.eval()(**inputs, use_cache=False).logits
    return logits.float()


@contextmanager
def _plain_evaluation(model: Any) -> Iterator[None]:
    """Evaluation mode with torch's own attention kernels, which run on every device; undone at the end."""
    modes = {module: module.training for module in model.modules()}
    parts = (getattr(model.config, name, None) for name in ("text_config", "vision_config"))
    configs = [model.config, *(part for part in parts if part is not None)]
    kernels = [config._attn_implementation for config in configs]
    try:
        for module in modes:
            module.training = False
        for config in configs:
            config._attn_implementation = "sdpa"
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for config, kernel in zip(configs, kernels, strict=True):
            config._attn_implementation = kernel
