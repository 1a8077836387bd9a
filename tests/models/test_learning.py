"""Can the language model learn from a frozen random tower? It has to recall a colour shown earlier."""

from pathlib import Path

import numpy as np
import pytest
import torch

from memer.contract import WindowSettings
from memer.sample import PlannerQuestion, PlannerSample
from models.lit.planner import PlannerModule
from models.optim import OptimSettings, learning_rate_factor
from tests.models.samples import tiny_base, tiny_contract

COLOURS = {
    "look inside the left bin": (200, 40, 40),
    "look inside the right bin": (40, 180, 60),
    "ask the assistant for help": (50, 70, 210),
    "find the red block": (210, 190, 40),
}
STEPS, BATCH = 150, 16


def recall_sample(number: int, rng: np.random.Generator) -> PlannerSample:
    """Three memory images, one of them with a coloured patch at a random place; the window shows noise."""
    keys = [("recall", number, i) for i in range(4)]
    frames = {key: rng.integers(90, 160, (64, 64, 3), dtype=np.uint8) for key in keys}
    label = list(COLOURS)[rng.integers(len(COLOURS))]
    top, left = rng.integers(0, 32, 2)
    frames[keys[rng.integers(3)]][top : top + 32, left : left + 32] = COLOURS[label]
    asked = PlannerQuestion(
        instruction="find the red block",
        memory_keys=tuple(keys[:3]),
        recent_keys=(keys[3],),
        frames=frames,
    )
    return PlannerSample(
        sample_id=f"episode_{number:06d}_t000003",
        source="recall",
        episode_index=number,
        step=3,
        question=asked,
        subtask=label,
        positions=(),
    )


def recall_accuracy(base: Path) -> float:
    """Share of 128 unseen samples answered right to the last token."""
    settings = OptimSettings(total_steps=STEPS, learning_rate=2e-3, warmup_ratio=0.1)
    contract = tiny_contract(windows=WindowSettings(recent_frames_length=1, keyframes_length=3))
    module = PlannerModule(str(base), contract=contract, optim=settings, pack_tokens=0)
    module.configure_model()
    collate = module.make_collator()
    optimizer = torch.optim.AdamW(module.trainable().values(), lr=2e-3, betas=(0.9, 0.98))
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * learning_rate_factor(step, settings=settings)
        batch = collate([recall_sample(step * BATCH + i, rng) for i in range(BATCH)])
        losses, _ = module.answer_losses(batch)
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(module.trainable().values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    rng = np.random.default_rng(1)
    unseen = collate([recall_sample(100_000 + i, rng) for i in range(128)])
    with torch.no_grad():
        _, hits = module.answer_losses(unseen)
    sample_of = torch.searchsorted(unseen.cu_seq_lens.long(), unseen.target_index, right=True) - 1
    wrong = torch.zeros(128).index_add_(0, sample_of, (~hits).float())
    return float((wrong == 0).float().mean())


@pytest.mark.slow
def test_a_scaled_random_tower_can_be_learned_from(tmp_path: Path) -> None:
    accuracy = recall_accuracy(tiny_base(tmp_path / "base"))
    assert accuracy > 0.6, f"{accuracy:.2f} of the colours recalled; chance is 0.25"
