"""Training of the causal world model: the next visual plan from all earlier ones, by flow matching.

Evidence are latents of real frames (teacher forcing); the latents of an episode come from one encoding of all
its plan frames, so that training and run time, which encodes as a stream, see the same numbers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memer.canvas import to_pixels
from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.plan_settings import LATENT_PATCH
from memer.sample import VisualPlannerSample
from memer.settings import check_count
from models.codec import plan_psnr
from models.collate_plans import VisualPlannerBatch, VisualPlannerCollator
from models.cwm import CausalWorldModel
from models.cwm_files import read_world_model, save_world_model
from models.lit.flow import SAMPLING, VALIDATION_LOG, FlowModule
from models.masks import Attention
from models.optim import OptimSettings
from models.wan import CausalWan
from models.wan_files import base_name, check_equal, load_transformer, transformer_hash

#: Fields of a transformer's configuration that the contract fixes.
_FIXED = ("patch_size", "in_channels", "out_channels", "text_dim")
#: Where torch 2.13 has the forward pass of FlexAttention only.
_NO_FLEX_BACKWARD = ("cpu", "mps")


class WorldModelModule(FlowModule[VisualPlannerBatch]):
    """Trains the whole transformer.

    Args:
        contract: of the data, with plan settings.
        optim: optimizer and schedule.
        transformer: sizes as in the transformer's config.json; those that the contract fixes are left out.
        base: initial weights: an exported world model, a diffusers transformer or a hub id; None for random
            ones. Its sizes must be the given ones.
        prediction: what the network gives, `velocity` or `data`.
        method: further arguments of CausalWorldModel.
        attention: `sdpa`, or `flex`, which skips what the mask hides and trains on CUDA alone. Checkpoints
            and exports do not name it: weights move freely between both.
        activation_checkpointing: recompute layer by layer in the backward pass.
        max_sampled: validation plans per rank that are generated, each time.
        sample_steps: Euler steps of these.
        seed: of initial values, noise and flow times.
    """

    planner = "models.map_planners:ModelVisualPlanner"
    own_settings = ("transformer", "base", "prediction", "method")

    def __init__(
        self,
        *,
        contract: Contract | Mapping[str, Any],
        optim: OptimSettings | Mapping[str, Any],
        transformer: Mapping[str, Any],
        base: str | None = None,
        prediction: Literal["velocity", "data"] = "velocity",
        method: Mapping[str, Any] | None = None,
        attention: Attention = "sdpa",
        activation_checkpointing: bool = False,
        max_sampled: int = 8,
        sample_steps: int = 10,
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
        fixed = [name for name in _FIXED if name in transformer]
        if fixed:
            raise UsageError(f"transformer.{fixed[0]}: fixed by contract.plan, leave it out")
        _check_names("transformer", transformer, CausalWan.__init__)
        _check_names("method", method or {}, CausalWorldModel.__init__)
        for name, value in transformer.items():
            if name.startswith("num_") or name.endswith("_dim"):
                check_count(f"transformer.{name}", value, least=1)
        if (head_dim := transformer.get("attention_head_dim", 2)) % 2:
            raise UsageError(f"transformer.attention_head_dim: {head_dim}, must be even")
        self.transformer = dict(transformer)
        self.base = None if base is None else str(base)
        self.prediction = prediction
        self.method = dict(method or {})
        self.attention: Attention = attention
        self.remember_settings()

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of the transformer."""
        return {
            **self.transformer,
            "patch_size": (1, LATENT_PATCH, LATENT_PATCH),
            "in_channels": self.plan.codec.channels,
            "out_channels": self.plan.codec.channels,
            "text_dim": self.plan.text.dim,
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the world model besides its transformer."""
        return {
            "plan_frames": self.plan.plan_frames,
            "target_text": self.plan.target_text,
            "visual_plan": self.plan.visual_plan,
            "prediction": self.prediction,
            **self.method,
        }

    @property
    def base_name(self) -> str:
        """Initial weights, for the provenance."""
        return base_name(self.base)

    @property
    def base_hash(self) -> str:
        """Content hash of these weights."""
        return "" if self.base is None else transformer_hash(self.base)

    def build_model(self) -> CausalWorldModel:
        """The world model with random weights, or those of the base.

        Raises:
            UsageError: the base has other sizes.
        """
        if self.base is None:
            transformer = CausalWan(**self.config)
        else:
            transformer = load_transformer(self.base)
            for name, value in self.config.items():
                found = transformer.config[name]
                if (tuple(found) if isinstance(found, list) else found) != value:
                    raise UsageError(f"model.module.base {self.base}: {name} is {found}, not {value}")
        if self.activation_checkpointing:
            transformer.enable_gradient_checkpointing()
        return CausalWorldModel(transformer, attention=self.attention, **self.arguments)

    def setup(self, stage: str) -> None:
        """Also refuse FlexAttention where it cannot train, before anything is built."""
        super().setup(stage)
        device = self.trainer.strategy.root_device.type
        if stage == "fit" and self.attention == "flex" and device in _NO_FLEX_BACKWARD:
            raise UsageError(
                f"model.module.attention: flex has no backward pass on {device}; train on a GPU, or with "
                "model.module.attention=sdpa"
            )

    def make_collator(self) -> VisualPlannerCollator:
        """The collate function for this model's data."""
        return VisualPlannerCollator(self.plan)

    def losses(
        self, batch: VisualPlannerBatch, *, generator: torch.Generator
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Flow loss of the plans of all segments, and figures."""
        latents, text_global, text_plan = self.inputs(batch)
        loss, figures = self.model.loss(
            latents, batch.num_segments, text_global, text_plan, generator=generator
        )
        return loss, figures

    def inputs(self, batch: VisualPlannerBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [B, C, 1 + 2 K, h, w], global texts [B, M, T] and texts of the segments [B, K, M, T]."""
        device = batch.num_segments.device
        latents = batch.latents
        if latents is None:
            assert batch.frames is not None, "a sample has frames or latents"
            latents = self.frozen.latents(batch.frames)
        text_global, text_plan = batch.instruction_features, batch.text_features
        if text_global is None:
            text_global = self.frozen.embeddings(batch.instructions, device=device)
        if text_plan is None:
            flat = self.frozen.embeddings([text for texts in batch.texts for text in texts], device=device)
            text_plan = flat.unflatten(0, (len(batch), -1))
        return latents, text_global, text_plan

    def generate(self, batch: VisualPlannerBatch, count: int, *, generator: torch.Generator) -> None:
        """Draw plans as at run time and compare them with the real frames.

        Logged: `plan_psnr` over all frames, per frame `plan_psnr_1` .., and `plan_last_error`, the mean
        absolute difference of the last frame in -1..1.
        """
        latents, text_global, text_plan = self.inputs(batch)
        for row in range(count):
            one = slice(row, row + 1)
            known, most = generator.device, int(batch.num_segments[row])
            number = int(torch.randint(most, (1,), generator=generator, device=known))
            drawn = self.draw(
                latents[one], text_global[one], text_plan[one], number=number, generator=generator
            )
            real = self._decoded(latents[one], number=number)
            psnr = plan_psnr(drawn, real)[0]
            figures = {"plan_psnr": psnr.mean(), "plan_last_error": (drawn - real)[:, :, -1].abs().mean()}
            figures |= {f"plan_psnr_{k + 1}": value for k, value in enumerate(psnr)}
            for name, value in figures.items():
                self.log(f"val/{name}", value, batch_size=1, **VALIDATION_LOG)

    @torch.no_grad()
    def draw(
        self,
        latents: Tensor,
        text_global: Tensor,
        text_plan: Tensor,
        *,
        number: int,
        generator: torch.Generator,
    ) -> Tensor:
        """The model's plan of one segment, from the real frames before it.

        Args:
            latents: float32[1, C, 1 + 2 K, h, w].
            text_global: float32[1, M, T].
            text_plan: float32[1, K, M, T].
            number: of the segment, from 0.
            generator: of the noise.

        Returns:
            float32[1, 3, N, H, W] in -1..1.
        """
        both = self.plan.target_text == "plan+global"
        evidence = text_global
        if self.plan.visual_plan == "current_only":
            evidence = torch.cat((text_plan[:, number], text_global), 1) if both else text_plan[:, number]
        # One pass whatever the number: sharded ranks must enter every layer equally often.
        known = latents[:, :, : 1 + self.plan.plan_latents * number]
        cache = self.model.prefill(known, evidence)
        plan = self.model.sample(
            cache,
            text_plan[:, number],
            text_global=text_global,
            steps=self.sample_steps,
            generator=generator,
        )
        return self._decoded(torch.cat([known, plan], dim=2), number=number)

    def _decoded(self, latents: Tensor, *, number: int) -> Tensor:
        """The frames of one segment, decoded behind all that precede it: float32[1, 3, N, H, W]."""
        end = 1 + self.plan.plan_latents * (number + 1)
        with torch.no_grad():
            frames = self.frozen.codec(latents.device).decode(latents[:, :, :end].float())
        return frames[:, :, -self.plan.plan_frames :]

    def draw_plans(self, samples: Sequence[VisualPlannerSample]) -> list[NDArray[np.uint8] | None]:
        """The model's plan of the last segment of each sample, uint8[N, H, W, 3].

        None while the weights are split over ranks, because one rank alone is asked.
        """
        if self._trainer is not None and type(self._trainer.strategy).__name__ == "FSDPStrategy":
            return [None] * len(samples)
        plans: list[NDArray[np.uint8] | None] = []
        for k, sample in enumerate(samples):
            batch = self.make_collator()([sample]).to(self.device)
            drawn = self.draw(
                *self.inputs(batch),
                number=len(sample.texts) - 1,
                generator=self.generator(SAMPLING, k),
            )
            plans.append(to_pixels(drawn[0].transpose(0, 1)))
        return plans

    def save_model(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write transformer/ and world_model.json."""
        save_world_model(folder, self.model.transformer, own_weights(weights), self.arguments)

    def check_saved(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Load a folder and compare settings and every tensor; so its outputs are the trained ones.

        Raises:
            MemerError: it does not load, or is another model.
        """
        loaded = read_world_model(folder)
        for name in ("plan_latents", "prediction", "shift", "target_text", "visual_plan", "text_drop"):
            if getattr(loaded, name) != getattr(self.model, name):
                raise MemerError(f"{folder}: {name} is not what was trained")
        check_equal(loaded.transformer, own_weights(weights), folder=folder)


def own_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's state under the transformer's own names."""
    return {name.removeprefix("model.transformer."): tensor for name, tensor in weights.items()}


def _check_names(group: str, values: Mapping[str, Any], target: Callable[..., Any]) -> None:
    """Refuse arguments that `target` does not take, before anything is built; attention is the module's."""
    known = set(inspect.signature(target).parameters) - {"self", "transformer", "attention"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(f"{group}.{unknown[0]}: unknown; known: {', '.join(sorted(known))}")
