"""A small executor, its variants, and batches of random samples for the tests of models/wap.py."""

from typing import Any

import torch
from torch import nn

from models.mot import ExpertSize
from models.wap import WapBatch, WapModel, WapOutput, WapSettings

#: Every row of the specification's table of switches, and the executor's own options.
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "without visual plan": {"visual_plan": "none"},
    "without visual memory": {"visual_plan": "current_only"},
    "classification": {"progress_mode": "classification", "progress_condition": False},
    "without progress condition": {"progress_condition": False},
    "full history": {"executor_context": "full_history"},
    "plan+global": {"target_text": "plan+global"},
    "shared positions": {"rope": "shared"},
    "separate": {"action_progress": "separate"},
    "episodic plan": {"plan_latents": 2},
    "one masked attention": {"attention": "masked"},
}


def small_settings(**changes: Any) -> WapSettings:
    """Two layers, two heads of 12 channels, 4 tokens per latent frame, 8 actions, 2 future latents."""
    attention = {"num_layers": 2, "num_heads": 2, "head_dim": 12}
    values: dict[str, Any] = {
        "video": ExpertSize(hidden=24, ffn=48, **attention),
        "action": ExpertSize(hidden=16, ffn=32, **attention),
        "progress": ExpertSize(hidden=8, ffn=16, **attention),
        "channels": 6,
        "latent_height": 4,
        "latent_width": 4,
        "text_dim": 10,
        "text_tokens": 5,
        "freq_dim": 16,
        "action_dim": 3,
        "state_dim": 2,
        "action_horizon": 8,
        "future_latents": 2,
    }
    return WapSettings(**{**values, **changes})


def small_model(settings: WapSettings | None = None, *, seed: int = 0, **changes: Any) -> WapModel:
    """Random weights far from small, so that every path carries something."""
    torch.manual_seed(seed)
    model = WapModel(settings or small_settings(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.8 / parameter.shape[-1] ** 0.5)
    return model.eval()


def random_batch(settings: WapSettings, *, size: int = 2, seed: int = 1, history: int = 3) -> WapBatch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    s, frame = settings, (settings.latent_height, settings.latent_width)
    plan = s.plan_latents if s.executor_context == "plan" else history
    return WapBatch(
        z_plan=None if s.visual_plan == "none" else normal(size, s.channels, plan, *frame),
        z_clip=normal(size, s.channels, 1 + s.future_latents, *frame),
        text_plan=normal(size, s.text_tokens, s.text_dim),
        state=normal(size, s.state_dim),
        progress=torch.rand(size, generator=generator),
        actions=normal(size, s.action_horizon, s.action_dim),
        action_valid=torch.ones(size, s.action_horizon, dtype=torch.bool),
        progress_target=torch.rand(size, s.action_horizon, generator=generator),
        latent_valid=torch.ones(size, s.future_latents, dtype=torch.bool),
        finished=torch.arange(size) % 2 == 0,
        text_global=normal(size, s.text_tokens, s.text_dim) if s.target_text == "plan+global" else None,
    )


def joint(model: WapModel, batch: WapBatch, *, future: bool = True, **changes: Any) -> WapOutput:
    """The training pass at fixed times on the batch's own values as noisy ones."""
    inputs: dict[str, Any] = {
        "z_plan": batch.z_plan,
        "z_obs": batch.z_clip[:, :, :1],
        "text": model.context(batch.text_plan, batch.text_global),
        "state": batch.state,
        "progress": batch.progress,
        "noisy_actions": batch.actions,
        "noisy_progress": batch.progress_target.unsqueeze(2),
        "t_chunk": torch.full((len(batch.state),), 0.6),
        "noisy_future": batch.z_clip[:, :, 1:] if future else None,
        "t_video": torch.full((len(batch.state),), 0.3),
    }
    return model(**{**inputs, **changes})


def caches(model: WapModel, batch: WapBatch, **changes: Any) -> tuple[Any, ...]:
    """Plan, observation, text, state and progress as `sample` takes them."""
    values = {"state": batch.state, "progress": batch.progress, **changes}
    text = model.context(batch.text_plan, batch.text_global)
    plan = model.prefill_plan(batch.z_plan, text)
    obs = model.prefill_obs(plan, batch.z_clip[:, :, :1], text, values["state"], values["progress"])
    return plan, obs, text, values["state"], values["progress"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
