"""What a model weighs: parameters per part, and the memory of training it, worked out from shapes alone.

Everything here works on the meta device, so the full sizes are checked without their weights.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from memer.errors import UsageError
from models.lora import LoraSettings, inject_lora
from models.qwen_vl import freeze_tower

#: Parts in the order of the table, with the names of their parameters; the first match counts.
PARTS: Mapping[str, str] = {
    "adapters": r".*\.lora_[AB]\..*",
    "projector": r"model\.visual\.(merger|deepstack_merger_list)\..*",
    "vision_tower": r"model\.visual\..*",
    "embeddings": r"model\.language_model\.embed_tokens\..*",
    "language_layers": r"model\.language_model\..*",
    "head": r"lm_head\..*",
}

#: Modules of a planner that may be computed again in the backward pass, and those that have no backward pass.
LANGUAGE_LAYERS = r"model\.language_model\.layers\..*"
_VISION_TOWER = r".*\.visual\..*"

#: Bytes per float of each precision that training accepts.
_FLOAT_BYTES = {"32-true": 4, "64-true": 8, "bf16-mixed": 4}

_GIB = 1024**3


def meta_model(config: PreTrainedConfig, *, lora: LoraSettings | None = None) -> Any:
    """The model that training sees, without storage: tower frozen, adapters in place.

    Args:
        config: of a supported base.
        lora: adapter settings; None trains the whole language model.
    """
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
        if lora is not None:
            inject_lora(model, lora)
    freeze_tower(model)
    return model


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Parameters per part, then trainable, frozen and total; a tied head counts once, as the embedding."""
    counts = dict.fromkeys([*PARTS, "trainable", "frozen", "total"], 0)
    for name, parameter in model.named_parameters():
        part = next((part for part, names in PARTS.items() if re.fullmatch(names, name)), None)
        if part is None:
            raise ValueError(f"{name}: belongs to no part of {', '.join(PARTS)}")
        for key in (part, "trainable" if parameter.requires_grad else "frozen", "total"):
            counts[key] += parameter.numel()
    return counts


def head_is_tied(model: Any) -> bool:
    """Whether the head and the embedding are one tensor."""
    return model.lm_head.weight is model.model.language_model.embed_tokens.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """What decides how weights, gradients and optimizer states are kept.

    Attributes:
        precision: of the trainer.
        strategy: of the trainer, a name or a described object.
        devices: processes that train together.
        activation_checkpointing: whether layers are computed again in the backward pass.
    """

    precision: str
    strategy: str | Mapping[str, Any]
    devices: int
    activation_checkpointing: bool

    def __post_init__(self) -> None:
        if self.precision not in _FLOAT_BYTES:
            raise UsageError(
                f"trainer.precision: {self.precision!r}, must be one of {', '.join(_FLOAT_BYTES)}"
            )

    @property
    def name(self) -> str:
        """Name of the strategy, in lower case."""
        node = self.strategy
        return str(node if isinstance(node, str) else node.get("_target_", "")).lower()

    def describe(self) -> dict[str, Any]:
        """Precision, strategy and devices as plain values."""
        return {"precision": self.precision, "strategy": self.name, "devices": self.devices}

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage, 0 without DeepSpeed."""
        if "deepspeed" not in self.name:
            return 0
        if isinstance(self.strategy, Mapping):
            return int(self.strategy.get("stage", 2))
        found = re.search(r"stage_(\d)", self.name)
        return int(found.group(1)) if found else 2

    @property
    def is_fsdp(self) -> bool:
        """Whether weights, gradients and optimizer states are split (FSDP, fully)."""
        return "fsdp" in self.name

    @property
    def copies_gradients(self) -> bool:
        """Whether gradients lie in communication buckets besides their own storage."""
        several = self.devices > 1 and not self.zero_stage and not self.is_fsdp
        view = isinstance(self.strategy, Mapping) and self.strategy.get("gradient_as_bucket_view", False)
        return several and not view


def training_memory(
    model: nn.Module, plan: TrainingPlan, *, layers: str = LANGUAGE_LAYERS
) -> dict[str, float]:
    """GiB per device that hold weights, gradients and AdamW's two moments, without activations.

    Weights are loaded as float32, so under bf16-mixed they are the master weights themselves; the graph then
    holds bfloat16 copies of the matrices that the backward pass needs. DeepSpeed keeps bfloat16 weights with
    float32 masters of the trained ones and splits them over the devices, stage by stage; FSDP splits all and
    gathers layer by layer. Communication buffers and gathered layers are left out.

    Args:
        model: on any device.
        plan: precision, strategy and devices.
        layers: pattern of the modules that may be computed again in the backward pass.
    """
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = _FLOAT_BYTES[plan.precision]
    stage, share = 3 if plan.is_fsdp else plan.zero_stage, 1 / plan.devices
    halved = plan.zero_stage > 0 and plan.precision == "bf16-mixed"
    kept = {
        "weights": total * (2 if halved else size) * (share if stage == 3 else 1),
        "master_weights": trainable * 4 * share if halved else 0,
        "autocast_copies": 0 if plan.zero_stage else _autocast_bytes(model, plan, layers),
        "gradients": trainable * (2 if halved else size) * (share if stage >= 2 else 1),
        "gradient_buckets": trainable * size if plan.copies_gradients else 0,
        "adamw_moments": 2 * trainable * size * (share if stage else 1),
    }
    kept["sum_without_activations"] = sum(kept.values())
    return {f"{name}_gib": float(f"{value / _GIB:.4g}") for name, value in kept.items()}


def _autocast_bytes(model: nn.Module, plan: TrainingPlan, layers: str) -> int:
    """bfloat16 copies held by the graph; Lightning's autocast keeps no others, and layers that are computed
    again in the backward pass hold none."""
    if plan.precision != "bf16-mixed":
        return 0
    return sum(
        2 * module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not re.fullmatch(_VISION_TOWER, name)
        and not (plan.activation_checkpointing and re.fullmatch(layers, name))
    )
