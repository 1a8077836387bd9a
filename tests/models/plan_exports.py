"""Tiny world models and executors with random weights, alone and as exported folders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memer.artifact import write_provenance
from memer.contract import CameraLayout, Contract
from memer.plan_settings import CanvasLayout, CanvasRegion, PlanSettings
from models.cwm import CausalWorldModel
from models.cwm_files import save_world_model
from models.wan import CausalWan, tiny_config
from models.wap import WapModel
from models.wap_files import save_executor
from models.wap_settings import WapSettings, tiny_settings

SIZE = 32
CANVAS = CanvasLayout(
    height=SIZE,
    width=SIZE,
    regions=(CanvasRegion(camera="base", y=0, x=0, height=SIZE, width=SIZE),),
)


def plan_contract(**switches: Any) -> Contract:
    """The tiny contract of the tabletop, with made-up statistics."""
    numbers = {"mean": (0.0,) * 4, "std": (1.0,) * 4, "min": (-1.0,) * 4, "max": (1.0,) * 4}
    return Contract(
        fps=15.0,
        cameras=CameraLayout(camera_keys=("base",), view_width=SIZE, view_height=SIZE),
        plan=PlanSettings(canvas=CANVAS, **switches),
        statistics={"state": numbers, "action": numbers},
    )


def tiny_world_model(contract: Contract, *, seed: int = 0) -> CausalWorldModel:
    """Random weights of one layer's fourth: two layers are enough to test caches."""
    torch.manual_seed(seed)
    plan = contract.plan
    assert plan is not None
    return CausalWorldModel(CausalWan(**{**tiny_config(), "num_layers": 2}), **world_arguments(plan)).eval()


def world_arguments(plan: PlanSettings) -> dict[str, Any]:
    """Arguments of the world model besides its transformer."""
    kind = "current_only" if plan.visual_plan == "current_only" else "memory"
    return {
        "plan_frames": plan.plan_frames,
        "prediction": "data",
        "visual_plan": kind,
        "target_text": plan.target_text,
    }


def executor_settings(contract: Contract, *, action_dim: int = 4) -> WapSettings:
    """Tiny sizes, two layers, the contract's switches."""
    plan = contract.plan
    assert plan is not None
    tiny = tiny_settings()
    return WapSettings.from_plan(
        plan,
        action_dim=action_dim,
        state_dim=action_dim,
        video=replace(tiny.video, num_layers=2),
        action=replace(tiny.action, num_layers=2),
        progress=replace(tiny.progress, num_layers=2),
        freq_dim=tiny.freq_dim,
        video_prediction="data",
    )


def tiny_executor(contract: Contract, *, action_dim: int = 4, seed: int = 0) -> WapModel:
    """Random weights."""
    torch.manual_seed(seed)
    return WapModel(executor_settings(contract, action_dim=action_dim)).eval()


def export_world_model(folder: Path, contract: Contract) -> Path:
    """As the training's export writes it."""
    folder.mkdir(parents=True)
    model = tiny_world_model(contract)
    assert contract.plan is not None
    save_world_model(
        folder, model.transformer, model.transformer.state_dict(), world_arguments(contract.plan)
    )
    _seal(folder, contract, planner="models.map_planners:ModelVisualPlanner")
    return folder


def export_executor(folder: Path, contract: Contract, *, action_dim: int = 4) -> Path:
    """As the training's export writes it."""
    folder.mkdir(parents=True)
    model = tiny_executor(contract, action_dim=action_dim)
    save_executor(folder, model.settings, model.state_dict())
    _seal(folder, contract, planner="models.map_planners:ModelExecutor")
    return folder


def _seal(folder: Path, contract: Contract, *, planner: str) -> None:
    contract.save(folder)
    write_provenance(folder, planner=planner, base_name="", base_hash="", alpha=1.0, step=0)
