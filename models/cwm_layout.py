"""Which latent frames a training pass of the causal world model holds, in which order, at which positions."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from models.masks import Attention, Mask, cwm_block_mask, cwm_mask


@dataclass(frozen=True, slots=True)
class Layout:
    """Latent frames of one pass, evidence before targets; on the CPU.

    Attributes:
        positions: int64[F] or int64[B, F], index of each frame in its episode.
        num_clean: the first frames that are evidence.
        plan_latents: r, frames per segment.
        shared: the same for every batch with that many segments, so that its mask is worth keeping.
    """

    positions: Tensor
    num_clean: int
    plan_latents: int
    shared: int | None = None

    def mask(self, tokens_per_frame: int, device: torch.device, *, attention: Attention = "sdpa") -> Mask:
        """bool[F n, F n] or bool[B, F n, F n]; for `flex` the same as a BlockMask."""
        if self.shared is not None:
            return _shared_mask(self.shared, self.plan_latents, tokens_per_frame, device, attention)
        return self._mask(tokens_per_frame, device, attention)

    def _mask(self, tokens_per_frame: int, device: torch.device, attention: Attention) -> Mask:
        build = cwm_block_mask if attention == "flex" else cwm_mask
        # A mask first needed in validation is kept for training, where inference tensors cannot be saved.
        with torch.inference_mode(False):
            is_target = torch.arange(self.positions.shape[-1]) >= self.num_clean
            blocks = block_of(self.positions, self.plan_latents)
            return build(blocks.to(device), is_target.to(device), tokens_per_frame=tokens_per_frame)


def block_of(positions: Tensor, plan_latents: int) -> Tensor:
    """Block of latent frames: 0 for the episode's first, k for the r frames of segment k.

    >>> block_of(torch.arange(6), 2)
    tensor([0, 1, 1, 2, 2, 3])
    """
    return (positions + plan_latents - 1) // plan_latents


@functools.lru_cache(maxsize=64)
def all_targets_layout(num_segments: int, plan_latents: int) -> Layout:
    """[clean 0..K-1 | noisy 1..K]; a noisy frame has the position of its clean twin.

    >>> all_targets_layout(2, 2).positions.tolist()
    [0, 1, 2, 1, 2, 3, 4]
    """
    clean = 1 + plan_latents * (num_segments - 1)
    positions = torch.cat((torch.arange(clean), torch.arange(1, 1 + plan_latents * num_segments)))
    return Layout(positions, clean, plan_latents, num_segments)


def one_target_layout(chosen: Tensor, plan_latents: int) -> Layout:
    """[clean 0..max | noisy k], k of each episode its own; the mask hides clean frames from k on.

    Args:
        chosen: int64[B], target of each episode counted from 0.
        plan_latents: r.

    >>> one_target_layout(torch.tensor([0, 1]), 2).positions.tolist()
    [[0, 1, 2, 1, 2], [0, 1, 2, 3, 4]]
    """
    clean = torch.arange(1 + plan_latents * int(chosen.max())).expand(len(chosen), -1)
    target = plan_latents * chosen[:, None] + 1 + torch.arange(plan_latents)
    return Layout(torch.cat((clean, target), dim=1), clean.shape[1], plan_latents)


@functools.lru_cache(maxsize=32)
def _shared_mask(
    num_segments: int, plan_latents: int, tokens_per_frame: int, device: torch.device, attention: Attention
) -> Mask:
    return all_targets_layout(num_segments, plan_latents)._mask(tokens_per_frame, device, attention)
