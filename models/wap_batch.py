"""What goes into the executor and what comes out: batches, network outputs, chunks.

Letters in shapes: B batch, C channels, n future latents, h x w latent pixels, M text tokens, T their size.

Source: MaP-WAM (arXiv 2609.11561), specification section 8.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from memer.errors import MemerError
from models.wap_settings import WapSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WapBatch:
    """Samples of the executor.

    Attributes:
        z_plan: float32[B, C, 3, h, w], latents of start frame and plan; None without a visual plan.
        z_clip: float32[B, C, 1 + n, h, w], latents of the present frame and the n future ones.
        text_plan: float32[B, M, T], the segment's text.
        state: float32[B, D_s], normalised.
        progress: float32[B] in [0, 1], of the present frame.
        actions: float32[B, horizon, D], normalised; padded after the segment.
        action_valid: bool[B, horizon], True = inside the segment, supervised.
        progress_target: float32[B, horizon] in [0, 1], after each action.
        latent_valid: bool[B, n], True = some of the latent's frames lie inside the segment.
        finished: float32[B] or bool[B], label of the classification.
        text_global: float32[B, M, T], the task's text; needed by target_text=plan+global alone.
        dim_valid: bool[B, D], True = the embodiment has this action; None: all.
        progress_valid: bool[B, horizon], True = supervised progress; None: where action_valid is.
    """

    z_plan: Tensor | None
    z_clip: Tensor
    text_plan: Tensor
    state: Tensor
    progress: Tensor
    actions: Tensor
    action_valid: Tensor
    progress_target: Tensor
    latent_valid: Tensor
    finished: Tensor
    text_global: Tensor | None = None
    progress_valid: Tensor | None = None
    dim_valid: Tensor | None = None

    def to(self, device: torch.device | str) -> "WapBatch":
        """The same on another device."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return WapBatch(**{k: v if v is None else v.to(device) for k, v in moved.items()})


class WapOutput(NamedTuple):
    """What the heads give: video [B, C, n, h, w], action [B, horizon, D], progress [B, horizon or 1, 1]."""

    video: Tensor | None
    action: Tensor
    progress: Tensor


class Chunk(NamedTuple):
    """A sampled chunk.

    Attributes:
        actions: float32[B, horizon, D], normalised.
        progress: float32[B, horizon], about [0, 1], not clipped; None in the classification variant.
        future: float32[B, C, n, h, w], None where no future was imagined.
    """

    actions: Tensor
    progress: Tensor | None
    future: Tensor | None


def check_batch(batch: WapBatch, settings: WapSettings) -> None:
    """Compare every shape with the settings.

    Raises:
        MemerError: names the field, its shape and the one that the executor was made for.
    """
    s, size = settings, batch.actions.shape[0]
    frame = (s.latent_height, s.latent_width)
    check_plan(batch.z_plan, s, batch=size)
    _same("z_clip", batch.z_clip, (size, s.channels, 1 + s.future_latents, *frame))
    _same("state", batch.state, (size, s.state_dim))
    _same("progress", batch.progress, (size,))
    _same("actions", batch.actions, (size, s.action_horizon, s.action_dim))
    _same("action_valid", batch.action_valid, (size, s.action_horizon))
    _same("progress_target", batch.progress_target, (size, s.action_horizon))
    if batch.progress_valid is not None:
        _same("progress_valid", batch.progress_valid, (size, s.action_horizon))
    if batch.dim_valid is not None:
        _same("dim_valid", batch.dim_valid, (size, s.action_dim))
    _same("latent_valid", batch.latent_valid, (size, s.future_latents))
    _same("finished", batch.finished, (size,))


def check_plan(z_plan: Tensor | None, settings: WapSettings, *, batch: int) -> None:
    """Compare a plan's latents with the settings; a history may have any length.

    Raises:
        MemerError: as `check_batch`.
    """
    s = settings
    if s.visual_plan == "none":
        if z_plan is not None:
            raise MemerError(f"z_plan: {tuple(z_plan.shape)}, but visual_plan=none has no plan; leave it out")
    elif s.has_plan:
        _same("z_plan", z_plan, (batch, s.channels, s.plan_latents, s.latent_height, s.latent_width))
    elif z_plan is not None:
        _same("z_plan", z_plan, (batch, s.channels, z_plan.shape[2], s.latent_height, s.latent_width))


def _same(name: str, value: Tensor | None, shape: tuple[int, ...]) -> None:
    given = None if value is None else tuple(value.shape)
    if given != shape:
        raise MemerError(
            f"{name}: shape {given}, the executor was made for {shape}; check contract and codec"
        )
