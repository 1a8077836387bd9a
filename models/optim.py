"""Optimizer groups and schedule; total steps come from the settings, never from the trainer's estimate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memer.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """AdamW with a cosine schedule.

    Attributes:
        total_steps: optimizer steps of the whole run; the schedule ends there.
        learning_rate: peak.
        warmup_ratio: share of the steps with linear warm-up.
        final_ratio: learning rate at the end, as a share of the peak.
        weight_decay: on matrices only.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
    """

    total_steps: int
    learning_rate: float = 6e-5
    warmup_ratio: float = 0.05
    final_ratio: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name, fine, accepted in (
            ("total_steps", self.total_steps >= 1, "at least 1 optimizer step"),
            ("learning_rate", self.learning_rate > 0, "positive"),
            ("warmup_ratio", 0 <= self.warmup_ratio < 1, "in [0, 1)"),
            ("final_ratio", 0 <= self.final_ratio <= 1, "in [0, 1]"),
            ("weight_decay", self.weight_decay >= 0, "not negative"),
        ):
            if not fine:
                raise UsageError(f"OptimSettings.{name}: {getattr(self, name)!r}, must be {accepted}")

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return round(self.warmup_ratio * self.total_steps)


def learning_rate_factor(step: int, *, settings: OptimSettings) -> float:
    """Share of the peak rate at optimizer step `step`, counted from 0: linear up, then half a cosine down.

    >>> settings = OptimSettings(total_steps=10, warmup_ratio=0.2)
    >>> [round(learning_rate_factor(step, settings=settings), 3) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, settings.total_steps - warmup))
    return settings.final_ratio + (1 - settings.final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Trainable parameters in groups with unique names; vectors (norms, biases) get no decay.

    Raises:
        UsageError: nothing is trainable.
    """
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for _, parameter in named:
        if parameter.requires_grad:
            (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [
        {"name": "matrices", "params": matrices, "weight_decay": weight_decay},
        {"name": "vectors", "params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise UsageError("nothing to train: every parameter is frozen")
    return groups


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], settings: OptimSettings
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Fused AdamW over the trainable parameters, with its schedule per optimizer step."""
    optimizer = torch.optim.AdamW(
        parameter_groups(named, weight_decay=settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, settings=settings)
    )
    return optimizer, schedule
