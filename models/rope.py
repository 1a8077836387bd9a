"""Rotary positions of the Wan transformer by explicit position ids.

The stock table has 1024 rows, follows the model's dtype and is garbage after a build on the meta device; here
rows are selected by position id from tables that are built on demand, as long as needed, always float32.

Source: MaP-WAM (arXiv 2609.11561); diffusers 0.42 WanRotaryPosEmbed.
"""

import functools
from typing import NamedTuple

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor

#: cos and sin, float32[1 or B, S, 1, head_dim / 2]: one value per rotated pair of channels.
Rope = tuple[Tensor, Tensor]


class RopeTables(NamedTuple):
    """What a rotary table depends on; the values are built on demand, float32 whatever the model's dtype."""

    head_dim: int
    theta: float = 10_000.0

    @property
    def splits(self) -> tuple[int, int, int]:
        """Channels for time, rows and columns (128: 44, 42, 42)."""
        spatial = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * spatial, spatial, spatial


@functools.lru_cache(maxsize=64)
def _table(dim: int, length: int, theta: float, device: torch.device) -> Rope:
    """Rows 0..length-1 for `dim` channels: cos and sin float32[length, dim / 2]."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    cos, sin = get_1d_rotary_pos_embed(
        dim, length, theta, use_real=True, repeat_interleave_real=True, freqs_dtype=dtype
    )
    return cos[:, 0::2].contiguous().to(device), sin[:, 1::2].contiguous().to(device)


def _length(largest: int) -> int:
    """Table rows for positions up to `largest`: a power of two from 1024 on, so that few are built."""
    return max(1024, 1 << largest.bit_length())


def rope_rows(
    tables: RopeTables,
    positions: Tensor,
    height: int,
    width: int,
    *,
    device: torch.device | str = "cpu",
) -> Rope:
    """Rotations of the tokens of latent frames at the given positions.

    Args:
        tables: `RopeTables(head_dim)`.
        positions: int64[F] or int64[B, F] on the CPU, index of each latent frame in the episode, any order.
        height: token rows of a latent frame.
        width: token columns of a latent frame.
        device: of the result.

    Returns:
        cos, sin: float32[1 or B, F * height * width, 1, head_dim / 2].

    Raises:
        ValueError: a negative position.
    """
    if positions.numel() and int(positions.min()) < 0:
        raise ValueError(f"positions count from 0, got {positions.tolist()}")
    rows = positions.unsqueeze(0) if positions.dim() == 1 else positions
    largest = max(int(rows.max()) if rows.numel() else 0, height, width)
    device = torch.device(device)
    dim_t, dim_h, dim_w = tables.splits
    time = _table(dim_t, _length(largest), tables.theta, device)
    down = _table(dim_h, _length(largest), tables.theta, device)
    across = _table(dim_w, _length(largest), tables.theta, device)
    rows = rows.to(device)
    shape = (*rows.shape, height, width, -1)

    def join(part: int) -> Tensor:
        pieces = (
            time[part][rows][:, :, None, None].expand(shape),
            down[part][:height][None, None, :, None].expand(shape),
            across[part][:width][None, None, None].expand(shape),
        )
        return torch.cat(pieces, dim=-1).flatten(1, 3).unsqueeze(2)

    return join(0), join(1)


def rope_1d(tables: RopeTables, positions: Tensor, *, device: torch.device | str = "cpu") -> Rope:
    """Rotations of tokens on a line, over all head_dim channels (actions and progress).

    Args:
        tables: `RopeTables(head_dim)`.
        positions: int64[S] on the CPU.
        device: of the result.

    Returns:
        cos, sin: float32[1, S, 1, head_dim / 2].
    """
    largest = int(positions.max()) if positions.numel() else 0
    device = torch.device(device)
    table = _table(tables.head_dim, _length(largest), tables.theta, device)
    rows = positions.to(device)
    return table[0][rows][None, :, None], table[1][rows][None, :, None]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the pairs of neighbouring channels of x [B, S, heads, head_dim], in float32.

    One complex product instead of four real ones and their sums: equal to the last bit, several times faster.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(*rope)).flatten(-2).type_as(x)
