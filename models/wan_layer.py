"""One layer of the Wan transformer as plain functions over the stock sub-modules.

The stock block's forward takes no mask, cache, positions or texts by token. Here they are arguments; without
them the result equals the stock block to the last bit. Nothing is kept in a module between calls, which
checkpointing and compilation need. Used by the causal world model and by every expert of the executor.

Letters in shapes: B batch, F latent frames, S tokens, H hidden, M text tokens.

Source: MaP-WAM (arXiv 2609.11561); diffusers 0.42 WanTransformerBlock.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from models.flex import attend_flex
from models.masks import Mask
from models.rope import Rope, rotate

#: Keys (after norm and rotation) and values of one layer, [B, S, heads, head_dim].
KeyValue = tuple[Tensor, Tensor]

#: Tokens (a slice of S) and the text that they see, after the text MLP: [B, M, H], or [B, G, M, H] when the
#: slice consists of G equal runs with a text of their own; or the keys and values of such a text [B, M, H].
TextGroup = tuple[slice, Tensor | KeyValue]


class Modulation(NamedTuple):
    """Shifts, scales and gates of one block, float32[B, R, H] each; a row serves S / R tokens in turn."""

    shift_sa: Tensor
    scale_sa: Tensor
    gate_sa: Tensor
    shift_ff: Tensor
    scale_ff: Tensor
    gate_ff: Tensor


def time_embedding(condition_embedder: nn.Module, t: Tensor) -> tuple[Tensor, Tensor]:
    """Embed flow times, one per latent frame (or one for all tokens with F = 1), autocast or not in the
    weights' own precision.

    Args:
        condition_embedder: `WanTimeTextImageEmbedding`.
        t: float32[B, F] in [0, 1000].

    Returns:
        temb [B, F, H] for the output head and its projection [B, F, 6, H] for the blocks.
    """
    with torch.autocast(t.device.type, enabled=False):  # times of 0..1000 and modulation need their digits
        rows = condition_embedder.timesteps_proj(t.flatten()).unflatten(0, t.shape)
        rows = rows.to(next(condition_embedder.time_embedder.parameters()).dtype)
        temb = condition_embedder.time_embedder(rows).to(condition_embedder.time_proj.weight.dtype)
        return temb, condition_embedder.time_proj(condition_embedder.act_fn(temb)).unflatten(2, (6, -1))


def modulation(block: nn.Module, time: Tensor) -> Modulation:
    """The block's own table plus the projected time: one row per latent frame, spread over its tokens later.

    Args:
        block: has `scale_shift_table` [1, 6, H].
        time: [B, F, 6, H].
    """
    return Modulation(*(block.scale_shift_table.unsqueeze(0) + time.float()).unbind(2))


def _per_row(x: Tensor, rows: Tensor) -> Tensor:
    """View x [B, S, H] as [B, R, S / R, H] for rows [B, R, H]."""
    if x.shape[1] % rows.shape[1]:
        raise ValueError(f"{x.shape[1]} tokens cannot share {rows.shape[1]} modulation rows evenly")
    return x.unflatten(1, (rows.shape[1], -1))


def modulate(norm: nn.Module, x: Tensor, *, shift: Tensor, scale: Tensor) -> Tensor:
    """norm(x) (1 + scale) + shift in float32 with rows [B, R, H], in the type of x [B, S, H]."""
    y = _per_row(norm(x.float()), shift)
    return (y * (1 + scale.unsqueeze(2)) + shift.unsqueeze(2)).flatten(1, 2).type_as(x)


def _gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return (x.float() + (_per_row(y.float(), gate) * gate.unsqueeze(2)).flatten(1, 2)).type_as(x)


def qkv(block: nn.Module, x: Tensor, mod: Modulation, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (normalised over all heads, then rotated) and values of a block's self-attention.

    Args:
        block: `WanTransformerBlock` or modules of the same names (`norm1`, `attn1`).
        x: [B, S, H].
        mod: of this block.
        rope: of these tokens, None for no rotation.

    Returns:
        q, k, v: [B, S, heads, head_dim].
    """
    attn = block.attn1
    y = modulate(block.norm1, x, shift=mod.shift_sa, scale=mod.scale_sa)
    q = attn.norm_q(attn.to_q(y)).unflatten(2, (attn.heads, -1))
    k = attn.norm_k(attn.to_k(y)).unflatten(2, (attn.heads, -1))
    v = attn.to_v(y).unflatten(2, (attn.heads, -1))
    return (q, k, v) if rope is None else (rotate(q, rope), rotate(k, rope), v)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
    """Scaled dot-product attention: SDPA, or FlexAttention where the mask is made for it.

    Args:
        q: [B, Q, heads, head_dim].
        k: [B, K, heads, head_dim].
        v: as k.
        mask: bool[Q, K] or bool[B, Q, K], True = may attend; None = all. Every row must allow something. Or a
            BlockMask over Q = K tokens.

    Returns:
        [B, Q, heads * head_dim].
    """
    if isinstance(mask, BlockMask):
        return attend_flex(q, k, v, mask).type_as(q)
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    return y.transpose(1, 2).flatten(2).type_as(q)


def text_keys(block: nn.Module, text: Tensor) -> KeyValue:
    """Keys and values of a block's cross-attention for text [B, M, H] (after the text MLP)."""
    attn = block.attn2
    k = attn.norm_k(attn.to_k(text)).unflatten(2, (attn.heads, -1))
    return k, attn.to_v(text).unflatten(2, (attn.heads, -1))


def _cross(block: nn.Module, x: Tensor, text_groups: Sequence[TextGroup]) -> Tensor:
    """Cross-attention of every token to the text of its group; the groups must cover x in order."""
    attn = block.attn2
    q = attn.norm_q(attn.to_q(x)).unflatten(2, (attn.heads, -1))
    pieces, end = [], 0
    for tokens, text in text_groups:
        start, stop, _ = tokens.indices(x.shape[1])
        if start != end:
            raise ValueError(
                f"text groups must follow each other: one ends at {end}, the next starts at {start}"
            )
        end = stop
        part = q[:, start:stop]
        if isinstance(text, Tensor) and text.dim() == 4:  # G runs of their own text, folded into the batch
            part = part.unflatten(1, (text.shape[1], -1)).flatten(0, 1)
            text = text.flatten(0, 1)
        k, v = text_keys(block, text) if isinstance(text, Tensor) else text
        pieces.append(attend(part, k, v).reshape(x.shape[0], stop - start, -1))
    if end != x.shape[1]:
        raise ValueError(f"text groups end at token {end} of {x.shape[1]}")
    return attn.to_out[1](attn.to_out[0](pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)))


def post(
    block: nn.Module, x: Tensor, attn: Tensor, mod: Modulation, text_groups: Sequence[TextGroup]
) -> Tensor:
    """What follows the self-attention: output projection and gate, cross-attention, feed-forward.

    Args:
        block: `WanTransformerBlock` or modules of the same names.
        x: [B, S, H], the block's input.
        attn: [B, S, heads * head_dim] of `attend`.
        mod: of this block.
        text_groups: which tokens see which text; together all tokens, in order.
    """
    x = _gated(x, block.attn1.to_out[1](block.attn1.to_out[0](attn)), mod.gate_sa)
    x = x + _cross(block, block.norm2(x.float()).type_as(x), text_groups)
    y = block.ffn(modulate(block.norm3, x, shift=mod.shift_ff, scale=mod.scale_ff))
    return _gated(x, y, mod.gate_ff)


def self_attention(
    block: nn.Module,
    x: Tensor,
    mod: Modulation,
    rope: Rope,
    mask: Mask | None,
    past: KeyValue | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Self-attention of new tokens to `past` ones and themselves: its output, and the new keys and values."""
    q, k, v = qkv(block, x, mod, rope)
    if past is None:
        return attend(q, k, v, mask), k, v
    return attend(q, torch.cat((past[0], k), dim=1), torch.cat((past[1], v), dim=1), mask), k, v
