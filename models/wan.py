"""The Wan video transformer with masks, caches, positions and texts as arguments (layer: `models.wan_layer`).

With a full mask and one text the result equals the stock forward to the last bit.

Letters in shapes: B batch, F latent frames, n tokens per latent frame, S = F n, H hidden, M text tokens.

Source: MaP-WAM (arXiv 2609.11561) sections on world model and executor; diffusers 0.42 transformer_wan.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memer.errors import UsageError
from models.masks import Mask
from models.rope import Rope, RopeTables, rope_1d, rope_rows, rotate
from models.wan_layer import (
    KeyValue,
    Modulation,
    TextGroup,
    attend,
    modulate,
    modulation,
    post,
    qkv,
    self_attention,
    text_keys,
    time_embedding,
)

__all__ = [
    "TIME_SCALE",
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

#: The network receives the flow time in [0, 1] times this.
TIME_SCALE = 1000.0


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
        mask: Mask | None = None,
        past: KeyValue | None = None,
        checkpointing: bool = False,
    ) -> Any:
        """Stock: hidden states. With text groups: tokens [B, S, H], and the new keys and values."""
        if isinstance(text, Tensor):
            return super().forward(hidden_states, text, time, rope)
        mod = modulation(self, time)
        call = functools.partial(checkpoint, use_reentrant=False) if checkpointing else _plain
        attn, k, v = call(self_attention, self, hidden_states, mod, rope, mask, past)
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
        y = self.proj_out(modulate(self.norm_out, tokens, shift=shift, scale=scale))
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
        mask: Mask | None = None,
        cache: Sequence[KeyValue] | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """All blocks.

        Args:
            tokens: [B, S, H].
            time: [B, F, 6, H] of `time_embedding`; F divides S.
            rope: of these tokens.
            text_groups: over these tokens.
            mask: bool[S, K] or bool[B, S, K] with K = cached tokens + S, True = may attend; None = all.
                Or, without a cache, a BlockMask over S tokens.
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
        mask: Mask | None = None,
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
