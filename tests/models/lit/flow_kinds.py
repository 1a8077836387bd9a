"""Both models that are trained by flow matching, small, with samples."""

from collections.abc import Callable
from typing import Any

import torch

from models.lit.flow import FlowModule
from tests.models.plan_samples import chunks, executor_module, memories, world_module

Make = Callable[..., FlowModule[Any]]

KINDS: dict[str, tuple[Make, Callable[..., list[Any]]]] = {
    "world model": (world_module, memories),
    "executor": (executor_module, chunks),
}


def state(module: FlowModule[Any]) -> dict[str, torch.Tensor]:
    module.configure_model()
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
