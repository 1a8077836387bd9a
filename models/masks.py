"""Who may attend to whom, as bool masks, True = may attend: pure functions of the blocks of latent frames."""

from collections.abc import Sequence

from torch import Tensor


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
    query, key = block.unsqueeze(-1), block.unsqueeze(-2)
    target = is_target.expand(block.shape)
    query_target, key_target = target.unsqueeze(-1), target.unsqueeze(-2)
    clean = ~key_target & (key < query + (~query_target).long())
    mask = clean | (key_target & query_target & (key == query))
    return _per_token(mask, tokens_per_frame)


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
