"""Does the world model use what it saw? The square's colour is visible in the first frame alone."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.codec import plan_psnr
from models.cwm import CausalWorldModel
from models.wan import CausalWan, tiny_config
from tests.models.toy_recall import COLORS, ToyRecall, colors_found


def test_the_task_hides_the_colour() -> None:
    """After segment 1 all episodes of a corner look the same; the truth of segment 2 scores perfectly."""
    toy = ToyRecall()
    corners = toy.pairs[:, 1]
    for corner in range(4):
        covered = toy.clips[corners == corner][:, :, 8]
        assert torch.equal(covered, covered[:1].expand_as(covered))
    assert torch.equal(colors_found(toy.clips[:, :, -8:], corners), toy.pairs[:, 0])
    assert len(COLORS) == 8


def trained(model: CausalWorldModel, batch: Any, *, steps: int, lr: float) -> CausalWorldModel:
    """Batches of 8, warm-up and cosine, as the trainings are."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / 30) * (0.505 + 0.495 * math.cos(math.pi * k / steps))
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss, _ = model.loss(*batch(torch.randint(32, (8,), generator=generator)), generator=generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def small_model(**kwargs: Any) -> CausalWorldModel:
    torch.manual_seed(0)
    config = {**tiny_config(), "num_layers": 3, "num_attention_heads": 4, "ffn_dim": 384}
    return CausalWorldModel(CausalWan(**config), prediction="data", **kwargs)


def recall(model: CausalWorldModel, toy: ToyRecall, evidence: Tensor, evidence_text: Tensor) -> tuple:
    """Share of colours found in the plans of segment 2, and their mean PSNR in dB."""
    latents, _, _, text_plan = toy.batch(torch.arange(32))
    cache = model.prefill(evidence, evidence_text)
    z = model.sample(cache, text_plan[:, 1], generator=torch.Generator().manual_seed(1))
    plan = toy.codec.decode(torch.cat((latents[:, :, :3], z), dim=2))[:, :, -8:]
    found = colors_found(plan, toy.pairs[:, 1]) == toy.pairs[:, 0]
    return found.float().mean().item(), plan_psnr(plan, toy.clips[:, :, -8:]).mean().item()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_recalls_what_the_present_cannot() -> None:
    """Chance is 1/8; 600 steps, a minute or two."""
    toy = ToyRecall()
    latents, _, text_global, text_plan = toy.batch(torch.arange(32))
    model = trained(small_model(), toy.batch, steps=600, lr=1e-3)
    with_memory, psnr = recall(model, toy, latents[:, :, :3], text_global)

    # The present alone: clips that begin with the last frame of segment 1.
    clips = toy.codec.encode(toy.clips[:, :, 8:])

    def current(rows: Tensor) -> tuple[Tensor, ...]:
        size = len(rows)
        return clips[rows], torch.ones(size, dtype=torch.long), text_global[:size], text_plan[:size, 1:]

    blind = trained(small_model(visual_plan="current_only"), current, steps=300, lr=1e-3)
    without, _ = recall(blind, toy, clips[:, :, :1], text_plan[:, 1])
    print(f"recall {with_memory:.2f} at {psnr:.1f} dB, without memory {without:.2f}")
    assert with_memory > 0.5
    assert without < 0.4
