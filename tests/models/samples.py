"""Small questions with random pictures, and the tiny base they are asked of."""

from pathlib import Path

import numpy as np

from memer.contract import CameraLayout, Contract, PromptSettings, WindowSettings
from memer.sample import FrameKey, PlannerQuestion, PlannerSample
from models.tiny import TinySize, make_tiny_base, planner_corpus

SUBTASKS = ("look inside the left bin", "look inside the right bin", "ask the assistant for help")
INSTRUCTION = "find the red block"
PROMPT = PromptSettings(
    system_text="Name the current subtask as JSON.", memory_header="Memory:", recent_header="Recent:"
)


def tiny_contract(**changes: object) -> Contract:
    values: dict[str, object] = {
        "fps": 15.0,
        "cameras": CameraLayout(camera_keys=("base", "wrist"), view_width=64, view_height=64),
        "windows": WindowSettings(recent_frames_length=4, keyframes_length=4),
        "prompt": PROMPT,
        "min_pixels": 1_024,
        "max_pixels": 9_216,
    }
    return Contract(**(values | changes))  # type: ignore[arg-type]


def tiny_base(out: Path, *, seed: int = 0, size: TinySize | None = None) -> Path:
    corpus = planner_corpus(subtasks=SUBTASKS, instructions=(INSTRUCTION,), prompt=PROMPT)
    return make_tiny_base(out, corpus=corpus, seed=seed, size=size)


def frame(key: FrameKey, *, height: int = 128, width: int = 64) -> np.ndarray:
    rng = np.random.default_rng(abs(hash(key[1:])) % 2**32)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def question(
    *,
    episode: int = 0,
    step: int = 60,
    recent: int = 4,
    memory: int = 2,
    height: int = 128,
    width: int = 64,
    instruction: str = INSTRUCTION,
    history: tuple[str, ...] = (),
) -> PlannerQuestion:
    source = "made"
    recent_keys = tuple((source, episode, step - 5 * i) for i in reversed(range(recent)))
    memory_keys = tuple((source, episode, i) for i in range(memory))
    return PlannerQuestion(
        instruction=instruction,
        memory_keys=memory_keys,
        recent_keys=recent_keys,
        frames={key: frame(key, height=height, width=width) for key in memory_keys + recent_keys},
        history=history,
    )


def sample(
    *,
    episode: int = 0,
    step: int = 60,
    subtask: str = SUBTASKS[0],
    positions: tuple[int, ...] = (2,),
    **kwargs,
) -> PlannerSample:
    return PlannerSample(
        sample_id=f"episode_{episode:06d}_t{step:06d}",
        source="made",
        episode_index=episode,
        step=step,
        question=question(episode=episode, step=step, **kwargs),
        subtask=subtask,
        positions=positions,
    )


def mixed_samples() -> list[PlannerSample]:
    """Different lengths, picture counts and sizes, shared frames, one episode twice."""
    return [
        sample(episode=0, step=60),
        sample(episode=0, step=65, subtask=SUBTASKS[2], positions=()),
        sample(episode=1, step=40, recent=1, memory=0, subtask=SUBTASKS[1]),
        sample(episode=2, step=40, recent=3, memory=3, height=64, positions=(1, 3)),
    ]
