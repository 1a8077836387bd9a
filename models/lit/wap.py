"""Training of the World-Action-Progress executor: flow matching of actions, progress and imagined future.

The plan is the real one of the demonstration; the executor learns to follow it from every step of its
segment.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.flow import masked_mse
from memer.progress import gate_window as largest_gate_window
from memer.progress import shortest_for_gate
from models.collate_plans import ExecutorBatch, ExecutorCollator, normalizers
from models.lit.flow import VALIDATION_LOG, FlowModule
from models.mot import ExpertSize
from models.optim import OptimSettings
from models.wan_files import base_name, check_equal, load_transformer, transformer_hash
from models.wap import WapBatch, WapModel
from models.wap_files import read_executor, save_executor
from models.wap_settings import WapSettings
from models.wap_weights import interpolate_experts, load_stock_video

log = logging.getLogger(__name__)

EXPERT_INITS = ("interpolate", "random")


class ExecutorModule(FlowModule[ExecutorBatch]):
    """Trains all three experts.

    Args:
        contract: of the data, with plan settings and statistics.
        optim: optimizer and schedule.
        video: sizes of the video expert.
        action: sizes of the action expert.
        progress: sizes of the progress expert.
        freq_dim: size of the sinusoid of a flow time.
        settings: further fields of WapSettings that the contract does not fix.
        video_base: initial weights of the video expert: a world model's export, a diffusers transformer or a
            hub id; None for random ones.
        expert_init: of the narrow experts: `interpolate` the video's weights, or `random`.
        activation_checkpointing: recompute layer by layer in the backward pass.
        max_sampled: validation chunks per rank that are generated, each time.
        sample_steps: Euler steps of these.
        gate_tau: threshold of the progress gate at run time, for the warning about short segments.
        gate_window: its window, actions.
        seed: of initial values, noise and flow times.
    """

    planner = "models.map_planners:ModelExecutor"
    own_settings = ("video", "action", "progress", "freq_dim", "settings", "video_base", "expert_init")

    def __init__(
        self,
        *,
        contract: Contract | Mapping[str, Any],
        optim: OptimSettings | Mapping[str, Any],
        video: ExpertSize | Mapping[str, Any],
        action: ExpertSize | Mapping[str, Any],
        progress: ExpertSize | Mapping[str, Any],
        freq_dim: int,
        settings: Mapping[str, Any] | None = None,
        video_base: str | None = None,
        expert_init: Literal["interpolate", "random"] = "interpolate",
        activation_checkpointing: bool = False,
        max_sampled: int = 32,
        sample_steps: int = 10,
        gate_tau: float = 0.95,
        gate_window: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(
            contract=contract,
            optim=optim,
            activation_checkpointing=activation_checkpointing,
            max_sampled=max_sampled,
            sample_steps=sample_steps,
            seed=seed,
        )
        if expert_init not in EXPERT_INITS:
            raise UsageError(f"expert_init: {expert_init!r}, must be {' or '.join(EXPERT_INITS)}")
        self.video, self.action, self.progress = (
            size if isinstance(size, dict) else asdict(size)  # type: ignore[call-overload]
            for size in (video, action, progress)
        )
        self.freq_dim = freq_dim
        self.settings = dict(settings or {})
        self.video_base = None if video_base is None else str(video_base)
        self.expert_init = expert_init
        self.gate_tau = gate_tau
        self.gate_window = gate_window
        states, actions = normalizers(self.contract)
        self.wap_settings = WapSettings.from_plan(
            self.plan,
            action_dim=actions.dim,
            state_dim=states.dim,
            video=ExpertSize(**self.video),
            action=ExpertSize(**self.action),
            progress=ExpertSize(**self.progress),
            freq_dim=freq_dim,
            **self.settings,
        )
        self.actions = actions
        self.remember_settings()

    @property
    def base_name(self) -> str:
        """Initial weights of the video expert, for the provenance."""
        return base_name(self.video_base)

    @property
    def base_hash(self) -> str:
        """Content hash of these weights."""
        return "" if self.video_base is None else transformer_hash(self.video_base)

    def build_model(self) -> WapModel:
        """The executor with random weights, or those of the video base."""
        model = WapModel(self.wap_settings, checkpointing=self.activation_checkpointing)
        if self.video_base is not None:
            load_stock_video(model, load_transformer(self.video_base).state_dict())
            if self.expert_init == "interpolate":
                interpolate_experts(model)
        return model

    def make_collator(self) -> ExecutorCollator:
        """The collate function for this model's data."""
        return ExecutorCollator(self.contract)

    def on_fit_start(self) -> None:
        """Look whether the gate could ever fire."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.plan.progress_mode == "modality" and hasattr(data, "describe"):
            lengths = data.describe()["train"].get("segment_frames", {})
            if "least" in lengths:
                self.check_gate(lengths["least"])

    def check_gate(self, shortest: int) -> bool:
        """Warn where the gate cannot fire on supervised steps.

        Args:
            shortest: steps of the shortest training segment.

        Returns:
            Whether it can.
        """
        fits = largest_gate_window(shortest, self.gate_tau, largest=self.gate_window)
        if fits >= self.gate_window:
            return True
        log.warning(
            "the shortest segment has %d frames, a progress gate of window %d and threshold %g needs %d to "
            "fire within a segment: evaluate with a window of %d (or auto), or train with "
            "view.progress_pad=one",
            shortest,
            self.gate_window,
            self.gate_tau,
            shortest_for_gate(self.gate_window, self.gate_tau),
            fits,
        )
        return False

    def losses(
        self, batch: ExecutorBatch, *, generator: torch.Generator
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Weighted sum of the three flow losses, and each of them."""
        loss, figures = self.model.loss(self.inputs(batch), generator=generator)
        return loss, figures

    def inputs(self, batch: ExecutorBatch) -> WapBatch:
        """The batch with frames and texts encoded."""
        device = batch.actions.device
        plan, clip = batch.plan_latents, batch.clip_latents
        if plan is None and batch.plan_frames is not None:
            plan = self.frozen.latents(batch.plan_frames)
        if clip is None:
            assert batch.clip_frames is not None, "a sample has frames or latents"
            clip = self.frozen.latents(batch.clip_frames)
        text, instruction = batch.text_features, batch.instruction_features
        if text is None:
            text = self.frozen.embeddings(batch.texts, device=device)
        if instruction is None and self.plan.target_text == "plan+global":
            instruction = self.frozen.embeddings(batch.instructions, device=device)
        return WapBatch(
            z_plan=plan,
            z_clip=clip,
            text_plan=text,
            text_global=instruction if self.plan.target_text == "plan+global" else None,
            state=batch.state,
            progress=batch.progress,
            actions=batch.actions,
            action_valid=batch.action_valid,
            progress_target=batch.progress_target,
            progress_valid=batch.progress_valid,
            latent_valid=batch.latent_valid,
            finished=batch.finished,
        )

    def generate(self, batch: ExecutorBatch, count: int, *, generator: torch.Generator) -> None:
        """Sample chunks as at run time and compare them with the demonstration, where it goes on.

        Logged: `action_mse` (normalised), `progress_mae` and `progress_error` (mean of predicted minus true
        progress: above 0 the gate fires early). In `classification` the share of right answers.
        """
        inputs = self.inputs(batch)
        rows = slice(count)
        text = self.model.context(
            inputs.text_plan[rows], None if inputs.text_global is None else inputs.text_global[rows]
        )
        state = inputs.state[rows]
        progress = inputs.progress[rows] if self.plan.progress_condition else None
        z_plan = None if inputs.z_plan is None else inputs.z_plan[rows]
        plan = self.model.prefill_plan(z_plan, text)
        seen = self.model.prefill_obs(plan, inputs.z_clip[rows, :, :1], text, state, progress)
        chunk = self.model.sample(
            plan, seen, text, state, progress, steps=self.sample_steps, generator=generator
        )
        valid = inputs.action_valid[rows]
        figures = {"action_mse": masked_mse(chunk.actions, inputs.actions[rows], valid)}
        if chunk.progress is not None:
            error = (chunk.progress.clamp(0, 1) - inputs.progress_target[rows]) * valid
            count_valid = valid.sum().clamp(min=1)
            figures["progress_mae"] = error.abs().sum() / count_valid
            figures["progress_error"] = error.sum() / count_valid
        else:
            said = self.model.finished(plan, seen, text, state) > 0.5
            figures["finished_accuracy"] = (said == inputs.finished[rows].bool()).float().mean()
        for name, value in figures.items():
            self.log(f"val/{name}", value, batch_size=count, **VALIDATION_LOG)

    def save_model(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write executor.json and model.safetensors."""
        save_executor(folder, self.wap_settings, own_weights(weights))

    def check_saved(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Load a folder and compare settings and every tensor; so its outputs are the trained ones.

        Raises:
            MemerError: it does not load, or is another model.
        """
        loaded = read_executor(folder)
        if loaded.settings != self.wap_settings:
            raise MemerError(f"{folder}: its settings are not those that were trained")
        check_equal(loaded, own_weights(weights), folder=folder)


def own_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's state under the model's own names."""
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}
