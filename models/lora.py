"""Low-rank adapters on the language model of a vision-language model, injected in place."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn

from memer.errors import UsageError

#: Projections of attention (full and gated-delta) and MLP; small gate projections and norms stay as they are.
LANGUAGE_TARGETS = (
    r"model\.language_model\.layers\.\d+\.("
    r"self_attn\.(q|k|v|o)_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|mlp\.(gate|up|down)_proj)"
)

_ADAPTER = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """An adapter's size and place.

    Attributes:
        rank: of the update.
        alpha: the update is scaled by alpha / rank.
        dropout: on the adapter's input while training.
        targets: regular expression that matches whole module names; language model only.
    """

    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    targets: str = LANGUAGE_TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"LoraSettings.rank: {self.rank!r}, must be at least 1")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"LoraSettings.dropout: {self.dropout!r}, must be in [0, 1)")
        try:
            re.compile(self.targets)
        except re.error as error:
            raise UsageError(
                f"LoraSettings.targets: {self.targets!r} is no regular expression ({error})"
            ) from None


def inject_lora(model: nn.Module, settings: LoraSettings, *, seed: int = 0) -> list[str]:
    """Freeze the model and put trainable adapters on its matching linear layers; names of base weights change
    to `NAME.base_layer.weight`.

    Args:
        model: the whole vision-language model, on CPU.
        settings: size and place.
        seed: of the initial values.

    Returns:
        The adapted modules' names.

    Raises:
        UsageError: the pattern matches nothing, or something outside the language model.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = [name for name in linear if re.fullmatch(settings.targets, name)]
    outside = [name for name in chosen if ".language_model." not in f".{name}."]
    if outside or not chosen:
        found = (
            f"matches {outside[0]!r}, outside the language model" if outside else "matches no linear layer"
        )
        raise UsageError(f"LoraSettings.targets: {settings.targets!r} {found}; example {LANGUAGE_TARGETS!r}")
    model.requires_grad_(False)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number works
        lora_dropout=settings.dropout,
        target_modules=chosen,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    return chosen


def save_adapter(
    out: Path, *, settings: LoraSettings, weights: Mapping[str, Tensor], modules: list[str], base: str
) -> None:
    """Write an adapter folder that PEFT, vLLM and memer.merge read.

    Args:
        out: an existing folder.
        settings: of the adapter.
        weights: trainable parameters by module name, as `named_parameters` gives them.
        modules: the adapted modules.
        base: hub id or hash of the base, never a local path.
    """
    prefix = "base_model.model."
    tensors = {
        prefix + name.replace(f".{_ADAPTER}.", "."): tensor.detach().float().cpu().contiguous()
        for name, tensor in weights.items()
    }
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def lora_seed(seed: int, *, rank: int, batch: int) -> None:
    """Make a batch's dropout a function of (seed, rank, batch), so that a resumed run draws the same."""
    torch.manual_seed((seed * 1_000_003 + rank) * 1_000_000_007 + batch)
