"""Attention by FlexAttention: what a BlockMask hides is not computed, and no dense mask is in memory.

On CUDA alone it trains and pays; on the CPU it has no backward pass and computes everything.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention


@functools.cache
def _kernel(device_type: str) -> Callable[..., Tensor]:
    """Compiled at the first call, once for all layouts: uncompiled, all scores would be in memory at once."""
    kernel: Callable[..., Tensor] = flex_attention
    return torch.compile(kernel) if device_type == "cuda" else kernel


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Attention as `models.wan_layer.attend` gives it.

    Args:
        q: [B, S, heads, head_dim], S up to the length of the mask.
        k: as q.
        v: as q.
        mask: of S tokens, rounded up; see `models.masks.cwm_block_mask`.

    Returns:
        [B, S, heads * head_dim].
    """
    count, size = q.shape[1], mask.shape[-1]
    if torch.is_autocast_enabled(q.device.type):  # it casts for SDPA, not for this
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    padded = (F.pad(x.transpose(1, 2), (0, 0, 0, size - count)) for x in (q, k, v))
    y = _kernel(q.device.type)(*padded, block_mask=mask)
    return y[:, :, :count].transpose(1, 2).flatten(2)
