"""A tiny Qwen3.5 and questions about finished segments."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from memer.contract import CameraLayout, Contract, PromptSettings
from memer.plan_settings import CanvasLayout, CanvasRegion, PlanSettings
from memer.plan_windows import next_subtask_question
from memer.planners.base import PlannerRequest
from memer.sample import PlannerQuestion, PlannerSample
from models.qwen_vl import LoadedBase, load_base
from models.tiny import TinySize, make_tiny_base, planner_corpus

SUBTASKS = ("press the left button one time", "press the confirm button")
INSTRUCTION = "press the left button 2 times, then press the confirm button"
PROMPT = PromptSettings(form="segments", segment_whitespace="keep")
CANVAS = CanvasLayout(
    height=32, width=32, regions=(CanvasRegion(camera="base", y=0, x=0, height=32, width=32),)
)
SIZE = TinySize(family="qwen3_5", model_dim=64, feedforward_dim=128, vision_depth=2)


def segments_contract(**changes: Any) -> Contract:
    values: dict[str, Any] = {
        "fps": 15.0,
        "cameras": CameraLayout(camera_keys=("base",), view_width=64, view_height=32),
        "prompt": PROMPT,
        "min_pixels": 1_024,
        "max_pixels": 9_216,
        "plan": PlanSettings(canvas=CANVAS),
        "subtasks": SUBTASKS,
    }
    return Contract(**(values | changes))


def tiny_qwen35(out: Path, *, size: TinySize = SIZE) -> Path:
    corpus = planner_corpus(subtasks=SUBTASKS, instructions=(INSTRUCTION,), prompt=PROMPT)
    return make_tiny_base(out, corpus=corpus, size=size)


def lively(base: Path) -> LoadedBase:
    """Larger language weights and states that last, so that answers of an untrained model differ."""
    loaded = load_base(base)
    with torch.no_grad():
        for name, parameter in loaded.model.model.language_model.layers.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
            elif name.endswith("A_log"):
                parameter.fill_(-3)
    return loaded


def view(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (32, 64, 3), dtype=np.uint8)


def asked(done: int, *, episode: int = 0) -> PlannerQuestion:
    """The question after `done` equal subtasks."""
    return next_subtask_question(
        instruction=INSTRUCTION,
        done=SUBTASKS[:1] * done,
        images=[view(100 * episode + k) for k in range(done + 1)],
        source="made",
        episode_index=episode,
    )


def requests(*done: int) -> list[PlannerRequest]:
    """Sessions with lists of different lengths, so that prompts need left padding."""
    return [
        PlannerRequest(session=f"s{k}", request_id=0, step=0, question=asked(n, episode=k))
        for k, n in enumerate(done)
    ]


def sample(done: int, *, episode: int = 0) -> PlannerSample:
    return PlannerSample(
        sample_id=f"episode_{episode:06d}_k{done + 1:03d}",
        source="made",
        episode_index=episode,
        step=done,
        question=asked(done, episode=episode),
        subtask=SUBTASKS[done >= 2],
        positions=(),
    )
