"""Short trainings of the tiny planner."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from memer.sample import PlannerSample
from models.lit.planner import PlannerModule
from models.optim import OptimSettings
from tests.models.lit.stream import Stream
from tests.models.samples import SUBTASKS, sample, tiny_contract

OPTIM = OptimSettings(total_steps=20, learning_rate=1e-3)


def make_module(base: Path, **changes: Any) -> PlannerModule:
    module = PlannerModule(
        str(base), **({"contract": tiny_contract(), "optim": OPTIM, "pack_tokens": 512} | changes)
    )
    module.configure_model()
    return module


def trainer(**changes: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 1.0,
    }
    return pl.Trainer(**(settings | changes))


def many_samples() -> list[PlannerSample]:
    return [
        sample(
            episode=i % 5,
            step=60 + 5 * i,
            subtask=SUBTASKS[i % 3],
            positions=tuple(range(1, 1 + i % 4)),
            recent=3,
        )
        for i in range(11)
    ]


def fit(
    module: PlannerModule, samples: Sequence[PlannerSample], *, batch_size: int = 4, **changes: Any
) -> pl.Trainer:
    ckpt_path = changes.pop("ckpt_path", None)
    running = trainer(**changes)
    running.fit(module, Stream(module.make_collator(), samples, batch_size=batch_size), ckpt_path=ckpt_path)
    return running


def state(module: PlannerModule) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
