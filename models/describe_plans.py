"""The figures of world models and executors: parameters per expert, tokens per group, memory of training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memer.contract import CameraLayout, Contract
from memer.plan_settings import LATENT_PATCH, PlanSettings
from models.footprint import TrainingPlan, training_memory
from models.wap import WapModel
from models.wap_weights import meta_counts

#: Modules that are described here, with the field that names their initial weights.
FLOW_TARGETS = {
    "models.lit.cwm.WorldModelModule": "base",
    "models.lit.wap.ExecutorModule": "video_base",
}

#: Layers that may be computed again in the backward pass.
_LAYERS = r"(transformer\.blocks|mot\.layers)\..*"

#: Segments of an episode for which the world model's sequence is told.
_SEGMENTS = 16


def describe_flow(
    cfg: dict[str, Any], *, plan: TrainingPlan, instantiate: Callable[..., Any]
) -> dict[str, Any]:
    """The figures of a composed training config whose module is in FLOW_TARGETS.

    Args:
        cfg: the config.
        plan: how it trains.
        instantiate: `conf.instantiate.instantiate`, which this package may not import.

    Raises:
        UsageError: a setting does not fit.
        SourceUnavailableError: the shards that were named are not there.
    """
    node = cfg["model"]["module"]
    base = node[FLOW_TARGETS[node["_target_"]]]
    contract, sizes_from = _contract(cfg)
    assert contract.plan is not None
    # Sizes come from the settings; the initial weights are not needed, nor looked for.
    module = instantiate(
        {**node, FLOW_TARGETS[node["_target_"]]: None}, where="model.module", contract=contract
    )
    with torch.device("meta"):
        model = module.build_model()
    return {
        "experiment": cfg["name"],
        "base": base or "random weights",
        "dimensions_from": sizes_from,
        "parameters": _parameters(model),
        "shapes": _shapes(model, contract.plan),
        "memory_per_device": {
            **plan.describe(),
            **training_memory(model, plan, layers=_LAYERS),
            "activations": "left out: they depend on the attention kernel; measure them in the first steps",
            "frozen_models": "left out: codec and text encoder, unless feature shards hold their results",
        },
    }


def _contract(cfg: dict[str, Any]) -> tuple[Contract, str]:
    """The contract of the run, and where the sizes of state and action are from."""
    roots = [node["root"] for node in cfg["data"]["train"].values() if node and node["root"]]
    if roots:
        return Contract.load(Path(roots[0])).updated(cfg["contract"]), str(roots[0])
    layout = {**cfg["cameras"]}
    plan = cfg["contract"].get("plan")
    if plan:
        layout["camera_keys"] = [region["camera"] for region in plan["canvas"]["regions"]]
    ones = {
        name: {key: [1.0] * size for key in ("mean", "std", "min", "max")}
        for name, size in cfg["dimensions"].items()
    }
    # No figure here depends on the frame rate, nor on the numbers of the statistics.
    contract = Contract(fps=1.0, cameras=CameraLayout(**layout), statistics=ones)
    return contract.updated(cfg["contract"]), "dimensions"


def _parameters(model: nn.Module) -> dict[str, int]:
    counts = meta_counts(model.settings) if isinstance(model, WapModel) else {}
    total = sum(p.numel() for p in model.parameters())
    counts = counts or {"video": total}
    return {**counts, "trainable": total, "frozen": 0, "total": total}


def _shapes(model: nn.Module, plan: PlanSettings) -> dict[str, Any]:
    """Latents, tokens per group, and for the world model the sequence of a long episode."""
    per_frame = plan.latent_height * plan.latent_width // LATENT_PATCH**2
    latent = [plan.codec.channels, plan.latent_height, plan.latent_width]
    shapes: dict[str, Any] = {
        "canvas_px": [plan.canvas.width, plan.canvas.height],
        "latent_frame": latent,
        "latent_frame_tokens": per_frame,
        "token_values": plan.codec.channels * LATENT_PATCH**2,
        "text": [plan.text.max_tokens, plan.text.dim],
    }
    if not isinstance(model, WapModel):
        clean, noisy = 1 + plan.plan_latents * (_SEGMENTS - 1), plan.plan_latents * _SEGMENTS
        return {
            **shapes,
            "plan_latents": [plan.codec.channels, plan.plan_latents, *latent[1:]],
            f"training_tokens_{_SEGMENTS}_segments": (clean + noisy) * per_frame,
        }
    s = model.settings
    tokens = {
        "plan": s.plan_latents * per_frame if s.has_plan else 0,
        "observation": per_frame,
        "future": s.future_latents * per_frame,
        "actions": s.action_horizon,
        "progress": s.progress_tokens,
    }
    return {
        **shapes,
        "actions": [s.action_horizon, s.action_dim],
        "state": [s.state_dim],
        **{f"{name}_tokens": count for name, count in tokens.items()},
        "training_tokens": sum(tokens.values()),
        "text_tokens_of_plan": s.context_tokens,
        "text_tokens_of_others": s.context_tokens + 1 + s.progress_condition,
    }
