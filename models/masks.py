"""Who may attend to whom, True = may attend: pure functions of the blocks of latent frames."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

#: Which kernel a training pass attends with: SDPA under a dense mask, or FlexAttention under a BlockMask.
Attention = Literal["sdpa", "flex"]

#: bool[Q, K] or bool[B, Q, K]; or the same for FlexAttention, over lengths rounded up to whole tiles.
Mask = Tensor | BlockMask

#: FlexAttention computes or skips squares of this many tokens.
TILE = 128


def visible(query: Tensor, query_is_target: Tensor, key: Tensor, key_is_target: Tensor) -> Tensor:
    """The rule that `cwm_mask` draws: may a frame of block `query` attend to one of block `key`?"""
    clean = ~key_is_target & (key < query + (~query_is_target).long())
    return clean | (key_is_target & query_is_target & (key == query))


def cwm_mask(block: Tensor, is_target: Tensor, *, tokens_per_frame: int = 1) -> Tensor:
    """Block-causal attention over clean evidence and noisy targets.

    A clean frame sees the clean frames of its own and earlier blocks. A target sees the clean frames of
    earlier blocks and the noisy ones of its own, never its clean twin and never another target. So one rule
    serves one target behind its evidence and all targets of an episode at once; with three segments:

        >>> import torch
        >>> block = torch.tensor([0, 1, 1, 2, 2, 1, 1, 2, 2, 3, 3])
        >>> print(picture(cwm_mask(block, torch.arange(11) >= 5), lines=[5]))
        x....|......
        xxx..|......
        xxx..|......
        xxxxx|......
        xxxxx|......
        -----+------
        x....|xx....
        x....|xx....
        xxx..|..xx..
        xxx..|..xx..
        xxxxx|....xx
        xxxxx|....xx

    Args:
        block: int64[..., F], block of each latent frame: 0 for the first frame, k for segment k.
        is_target: bool[F] or bool[..., F], True = noisy.
        tokens_per_frame: n; every entry becomes n x n.

    Returns:
        bool[..., F n, F n], queries in rows.

    Source: MaP-WAM specification, section 7.
    """
    target = is_target.expand(block.shape)
    mask = visible(block.unsqueeze(-1), target.unsqueeze(-1), block.unsqueeze(-2), target.unsqueeze(-2))
    return _per_token(mask, tokens_per_frame)


def cwm_block_mask(block: Tensor, is_target: Tensor, *, tokens_per_frame: int = 1) -> BlockMask:
    """`cwm_mask` for FlexAttention, which skips tiles where nobody sees anything.

    The length is rounded up to whole tiles. Padding is a target of block -1: by the same rule it sees itself,
    so that no row is empty, and no other token sees it.

    Args:
        block: int64[F] or int64[B, F].
        is_target: as in `cwm_mask`.
        tokens_per_frame: n.

    Returns:
        The mask on the device of `block`, [1 or B, 1, S, S] with S = F n rounded up.
    """
    target = is_target.expand(block.shape).repeat_interleave(tokens_per_frame, dim=-1)
    block = block.repeat_interleave(tokens_per_frame, dim=-1)
    padding = (0, -block.shape[-1] % TILE)
    block, target = F.pad(block, padding, value=-1), F.pad(target, padding, value=True)
    batched, size = block.dim() == 2, block.shape[-1]

    def may_attend(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query, key = ((b, q), (b, k)) if batched else (q, k)
        return visible(block[query], target[query], block[key], target[key])

    batch = block.shape[0] if batched else None
    return create_block_mask(may_attend, batch, None, size, size, device=block.device, BLOCK_SIZE=TILE)


def block_mask(block: Tensor, *, tokens_per_frame: int = 1) -> Tensor:
    """Block-causal attention over evidence alone: a frame sees its own and earlier blocks.

    Args:
        block: int64[..., F].
        tokens_per_frame: n.

    Returns:
        bool[..., F n, F n].

    >>> import torch
    >>> print(picture(block_mask(torch.tensor([0, 1, 1, 2, 2]))))
    x....
    xxx..
    xxx..
    xxxxx
    xxxxx
    """
    return _per_token(block.unsqueeze(-2) <= block.unsqueeze(-1), tokens_per_frame)


def picture(mask: Tensor, *, lines: Sequence[int] = ()) -> str:
    """A mask as text, rows are queries, `x` = may attend.

    Args:
        mask: bool[Q, K].
        lines: draw a line before these rows and columns.

    >>> import torch
    >>> print(picture(torch.eye(3, dtype=torch.bool), lines=[1]))
    x|..
    -+--
    .|x.
    .|.x
    """
    rows = []
    for number, row in enumerate(mask.tolist()):
        cells = [("|" if k in lines else "") + ("x" if seen else ".") for k, seen in enumerate(row)]
        rule = [("+" if k in lines else "") + "-" for k in range(len(row))]
        rows += ["".join(rule)] * (number in lines) + ["".join(cells)]
    return "\n".join(rows)


def _per_token(mask: Tensor, tokens_per_frame: int) -> Tensor:
    n = tokens_per_frame
    return mask if n == 1 else mask.repeat_interleave(n, dim=-2).repeat_interleave(n, dim=-1)
