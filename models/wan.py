"""The Wan video transformer with masks, caches, positions and texts as arguments.

The stock block's forward takes none of them, so the layer is written here once as plain functions over the
stock sub-modules and used by the causal world model and by every expert of the executor. With a full mask and
one text the result equals the stock forward to the last bit. Nothing is kept in a module between calls, which
checkpointing and compilation need.

Letters in shapes: B batch, F latent frames, n tokens per latent frame, S = F n, H hidden, M text tokens.

Source: MaP-WAM (arXiv 2609.11561) sections on world model and executor; diffusers 0.42 transformer_wan.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memer.errors import UsageError
from models.rope import Rope, RopeTables, rope_1d, rope_rows, rotate

__all__ = [
    "CausalBlock",
    "CausalWan",
    "KeyValue",
    "Modulation",
    "Rope",
    "RopeTables",
    "TextGroup",
    "attend",
    "full_config",
    "modulation",
    "post",
    "qkv",
    "rope_1d",
    "rope_rows",
    "rotate",
    "text_keys",
    "time_embedding",
    "tiny_config",
]

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


def tiny_config(*, channels: int = 192) -> dict[str, Any]:
    """Arguments of a transformer that two CPU cores can train: 2 694 336 parameters at 192 channels."""
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 6,
        "attention_head_dim": 32,
        "in_channels": channels,
        "out_channels": channels,
        "text_dim": 32,
        "freq_dim": 64,
        "ffn_dim": 576,
        "num_layers": 4,
    }


def full_config() -> dict[str, Any]:
    """Arguments of Wan2.2-TI2V-5B's transformer: 4 999 787 712 parameters (as published)."""
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "in_channels": 48,
        "out_channels": 48,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 14336,
        "num_layers": 30,
    }


# -- one layer over stock sub-modules --------------------------------------------------------------------


def time_embedding(condition_embedder: nn.Module, t: Tensor) -> tuple[Tensor, Tensor]:
    """Embed flow times, one per latent frame (or one for all tokens with F = 1).

    Args:
        condition_embedder: `WanTimeTextImageEmbedding`.
        t: float32[B, F] in [0, 1000].

    Returns:
        temb [B, F, H] for the output head and its projection [B, F, 6, H] for the blocks.
    """
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


def _modulate(norm: nn.Module, x: Tensor, *, shift: Tensor, scale: Tensor) -> Tensor:
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
    y = _modulate(block.norm1, x, shift=mod.shift_sa, scale=mod.scale_sa)
    q = attn.norm_q(attn.to_q(y)).unflatten(2, (attn.heads, -1))
    k = attn.norm_k(attn.to_k(y)).unflatten(2, (attn.heads, -1))
    v = attn.to_v(y).unflatten(2, (attn.heads, -1))
    return (q, k, v) if rope is None else (rotate(q, rope), rotate(k, rope), v)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention.

    Args:
        q: [B, Q, heads, head_dim].
        k: [B, K, heads, head_dim].
        v: as k.
        mask: bool[Q, K] or bool[B, Q, K], True = may attend; None = all. Every row must allow something.

    Returns:
        [B, Q, heads * head_dim].
    """
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
    y = block.ffn(_modulate(block.norm3, x, shift=mod.shift_ff, scale=mod.scale_ff))
    return _gated(x, y, mod.gate_ff)


# -- the transformer -------------------------------------------------------------------------------------


class CausalBlock(WanTransformerBlock):
    """The stock block; given text groups instead of one text it runs the functional layer.

    The layer runs inside the block's own forward, as sharded training (FSDP, ZeRO-3) gathers weights there.
    """

    def forward(
        self,
        hidden_states: Tensor,
        text: Tensor | Sequence[TextGroup],
        time: Tensor,
        rope: Rope,
        *,
        mask: Tensor | None = None,
        past: KeyValue | None = None,
        checkpointing: bool = False,
    ) -> Any:
        """Stock: hidden states. With text groups: tokens [B, S, H], and the new keys and values."""
        if isinstance(text, Tensor):
            return super().forward(hidden_states, text, time, rope)
        mod = modulation(self, time)
        call = functools.partial(checkpoint, use_reentrant=False) if checkpointing else _plain
        attn, k, v = call(_self_attention, self, hidden_states, mod, rope, mask, past)
        return call(post, self, hidden_states, attn, mod, text), k, v


def _plain(function: Any, *args: Any) -> Any:
    return function(*args)


class CausalWan(WanTransformer3DModel):
    """`WanTransformer3DModel` plus a forward pass with mask, cache, positions and texts as arguments.

    Same parameters under the same names, so stock checkpoints load with `from_pretrained` and `save_stock`
    writes one. The inherited `forward` is untouched.

    Raises:
        UsageError: the configuration is an image-to-video one (its attention splits the text by position).
    """

    @functools.wraps(WanTransformer3DModel.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.blocks:
            block.__class__ = CausalBlock  # same parameters and constructor, built by the stock class
        for name in ("added_kv_proj_dim", "image_dim"):
            if self.config[name] is not None:
                raise UsageError(
                    f"the transformer's config has {name}={self.config[name]}: image-to-video models are not "
                    "supported, take a text-and-image one such as Wan2.2-TI2V-5B"
                )
        if self.config.patch_size[0] != 1:
            raise UsageError(f"patch_size={self.config.patch_size}: patches must not span latent frames")

    @property
    def hidden(self) -> int:
        """Width H of the tokens."""
        return self.config.num_attention_heads * self.config.attention_head_dim

    @property
    def token_size(self) -> int:
        """Numbers in one token: channels times patch area."""
        return self.config.in_channels * math.prod(self.config.patch_size)

    @property
    def rope_tables(self) -> RopeTables:
        """Rotary tables of this model's heads."""
        return RopeTables(self.config.attention_head_dim)

    def grid(self, latents: Tensor) -> tuple[int, int]:
        """Token rows and columns of a latent frame of latents [B, C, F, h, w]."""
        _, ph, pw = self.config.patch_size
        h, w = latents.shape[-2:]
        if h % ph or w % pw:
            raise ValueError(f"latents of {h}x{w} do not divide into {ph}x{pw} patches")
        return h // ph, w // pw

    def embed(self, latents: Tensor) -> Tensor:
        """Latents [B, C, F, h, w] to tokens [B, F n, H]."""
        self.grid(latents)
        return self.patch_embedding(latents).flatten(2).transpose(1, 2).contiguous()

    def embed_text(self, text: Tensor) -> Tensor:
        """Text [..., M, T] through the text MLP: [..., M, H]."""
        return self.condition_embedder.text_embedder(text)

    def head(self, tokens: Tensor, temb: Tensor, *, grid: tuple[int, int]) -> Tensor:
        """Tokens [B, F n, H] to the network's output [B, C, F, h, w].

        Args:
            tokens: after the last block.
            temb: [B, F, H] of `time_embedding`.
            grid: token rows and columns of a latent frame.
        """
        rows = self.scale_shift_table.unsqueeze(0) + temb.unsqueeze(2)
        shift, scale = rows.unbind(2)
        y = self.proj_out(_modulate(self.norm_out, tokens, shift=shift, scale=scale))
        (_, ph, pw), (gh, gw) = self.config.patch_size, grid
        y = y.unflatten(2, (ph, pw, -1)).unflatten(1, (-1, gh, gw))
        return y.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)

    def run(
        self,
        tokens: Tensor,
        time: Tensor,
        *,
        rope: Rope,
        text_groups: Sequence[TextGroup],
        mask: Tensor | None = None,
        cache: Sequence[KeyValue] | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """All blocks.

        Args:
            tokens: [B, S, H].
            time: [B, F, 6, H] of `time_embedding`; F divides S.
            rope: of these tokens.
            text_groups: over these tokens.
            mask: bool[S, K] or bool[B, S, K] with K = cached tokens + S, True = may attend; None = all.
            cache: per layer keys and values of earlier tokens, seen before the new ones; left unchanged.

        Returns:
            Tokens [B, S, H] and per layer the keys and values of the new tokens alone.
        """
        new: list[KeyValue] = []
        checkpointing = self.gradient_checkpointing and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            tokens, *kept = block(
                tokens,
                text_groups,
                time,
                rope,
                mask=mask,
                past=None if cache is None else cache[i],
                checkpointing=checkpointing,
            )
            new.append((kept[0], kept[1]))
        return tokens, new

    def predict(
        self,
        latents: Tensor,
        t: Tensor,
        *,
        text_groups: Sequence[TextGroup],
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Sequence[KeyValue] | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """The whole network: the output for every latent frame, and the new keys and values.

        Args:
            latents: [B, C, F, h, w].
            t: float32[B, F] in [0, 1000], one flow time per latent frame, or float32[B, 1] for all.
            text_groups: texts already through `embed_text`.
            positions: int64[F] or int64[B, F] on the CPU, index of each latent frame in the episode.
            mask: as `run`.
            cache: as `run`.
        """
        grid = self.grid(latents)
        rope = rope_rows(self.rope_tables, positions, *grid, device=latents.device)
        temb, time = time_embedding(self.condition_embedder, t)
        tokens, new = self.run(
            self.embed(latents), time, rope=rope, text_groups=text_groups, mask=mask, cache=cache
        )
        return self.head(tokens, temb, grid=grid), new

    def save_stock(self, folder: str | Path) -> None:
        """Write config.json and weights as diffusers writes `WanTransformer3DModel`."""
        with torch.device("meta"):
            stock = WanTransformer3DModel.from_config(self.config)
        stock.load_state_dict(self.state_dict(), assign=True)
        stock.save_pretrained(folder)


def _self_attention(
    block: nn.Module,
    x: Tensor,
    mod: Modulation,
    rope: Rope,
    mask: Tensor | None,
    past: KeyValue | None,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv(block, x, mod, rope)
    if past is None:
        return attend(q, k, v, mask), k, v
    return attend(q, torch.cat((past[0], k), dim=1), torch.cat((past[1], v), dim=1), mask), k, v
