"""Mixture of transformers: experts of different widths joined by one self-attention per layer.

Every expert has its own projections, norms, feed-forward, text and time embedders; only queries, keys and
values meet, so experts must agree in layers, heads and head_dim and in nothing else. A layer is one module
that owns the blocks of all experts and is entered through `forward` alone: what FSDP and ZeRO-3 can wrap.

Tokens come in named groups ("P", "O", ...). A pass says which groups ask and which they see; groups whose
keys and values are at hand from an earlier pass take part as cached ones. So the joint training pass, the
reference with one masked attention, every prefill and every sampling step are the same forward.

Letters in shapes: B batch, S tokens, R rows of a modulation, H hidden, M text tokens.

Source: MaP-WAM (arXiv 2609.11561), specification section 8.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanTimeTextImageEmbedding,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memer.errors import UsageError
from memer.settings import require_counts
from models.wan import KeyValue, Modulation, Rope, TextGroup, attend, modulation, post, qkv, text_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSize:
    """Sizes of one expert.

    Attributes:
        hidden: H, width of its tokens.
        ffn: inner width of its feed-forward.
        num_layers: blocks; equal in all experts.
        num_heads: attention heads; equal in all experts.
        head_dim: channels of a head; equal in all experts.
        eps: of the norms.
    """

    hidden: int
    ffn: int
    num_layers: int
    num_heads: int
    head_dim: int
    eps: float = 1e-6

    def __post_init__(self) -> None:
        require_counts(self, hidden=1, ffn=1, num_layers=1, num_heads=1, head_dim=6)

    @property
    def attention_dim(self) -> int:
        """Channels of all heads together."""
        return self.num_heads * self.head_dim


class Group(NamedTuple):
    """Neighbouring tokens of a stream: name, [start, stop), number of first text tokens that they see."""

    name: str
    start: int
    stop: int
    text: int


class Call(NamedTuple):
    """One attention call: `queries` see all of `keys`, or what `mask` bool[Q, K] allows (True = see)."""

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one expert's tokens are, in one pass.

    Attributes:
        groups: cover the tokens in order; borders lie between rows of `time`.
        time: [B or 1, R, 6, H], projected flow times; every row serves S / R tokens.
        rope: of the tokens.
        text: [B, M, H], after the expert's text MLP.
    """

    groups: tuple[Group, ...]
    time: Tensor
    rope: Rope
    text: Tensor


class LayerResult(NamedTuple):
    """Tokens of the groups that asked, by expert; new keys and values, by group; the texts', by expert."""

    tokens: dict[str, Tensor]
    keys: dict[str, KeyValue]
    texts: dict[str, KeyValue]


class ExpertBlock(nn.Module):
    """A Wan block whose attention may be wider than its tokens; sub-modules named as in the stock block."""

    def __init__(self, size: ExpertSize) -> None:
        super().__init__()
        attention = functools.partial(
            WanAttention, dim=size.hidden, heads=size.num_heads, dim_head=size.head_dim, eps=size.eps
        )
        self.norm1 = FP32LayerNorm(size.hidden, size.eps, elementwise_affine=False)
        self.attn1 = attention(processor=WanAttnProcessor(), is_cross_attention=False)
        self.attn2 = attention(processor=WanAttnProcessor(), is_cross_attention=True)
        self.norm2 = FP32LayerNorm(size.hidden, size.eps, elementwise_affine=True)
        self.ffn = FeedForward(size.hidden, inner_dim=size.ffn, activation_fn="gelu-approximate")
        self.norm3 = FP32LayerNorm(size.hidden, size.eps, elementwise_affine=False)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, size.hidden) / size.hidden**0.5)


class Expert(nn.Module):
    """What a narrow expert has beside its blocks: linear input and output, time and text embedders.

    Args:
        size: of the expert.
        token_dim: values of a token, in and out.
        text_dim: values of a text token.
        freq_dim: size of the sinusoid of a flow time.
        learned_token: one learned vector instead of the linear input.
    """

    def __init__(
        self, size: ExpertSize, *, token_dim: int, text_dim: int, freq_dim: int, learned_token: bool = False
    ) -> None:
        super().__init__()
        self.token = (
            nn.Parameter(torch.randn(1, 1, size.hidden) / size.hidden**0.5) if learned_token else None
        )
        self.proj_in = None if learned_token else nn.Linear(token_dim, size.hidden)
        self.condition_embedder = WanTimeTextImageEmbedding(
            dim=size.hidden,
            time_freq_dim=freq_dim,
            time_proj_dim=6 * size.hidden,
            text_embed_dim=text_dim,
        )
        self.proj_out = nn.Linear(size.hidden, token_dim)

    def embed(self, x: Tensor, *, batch: int) -> Tensor:
        """Values [B, S, token_dim] to tokens [B, S, H]; the learned token [B, 1, H] where there is one."""
        if self.proj_in is None:
            return self.token.expand(batch, -1, -1)
        return self.proj_in(x.to(self.proj_in.weight.dtype))


class MoTLayer(nn.Module):
    """One layer of all experts.

    Args:
        experts: size by name.

    Raises:
        UsageError: experts differ in heads or head_dim.
    """

    def __init__(self, experts: Mapping[str, ExpertSize]) -> None:
        super().__init__()
        check_agreement(experts, "num_heads", "head_dim")
        self.experts = nn.ModuleDict({name: ExpertBlock(size) for name, size in experts.items()})

    def forward(
        self,
        tokens: Mapping[str, Tensor],
        *,
        streams: Mapping[str, Stream],
        calls: Sequence[Call],
        cached: Mapping[str, KeyValue],
        texts: Mapping[str, KeyValue],
        room: KeyValue | None,
    ) -> LayerResult:
        """Run the layer.

        Args:
            tokens: [B, S, H] by expert; experts without tokens in this pass are left out.
            streams: of the same experts.
            calls: groups that ask in no call end in this layer; the asking ones of a stream must be its last.
            cached: keys and values of groups that are not among the tokens.
            texts: keys and values of the text as an earlier pass over the same text returned them.
            room: keys and values of all groups of the one call, in order; this pass fills its last rows in
                place instead of joining the parts anew. Without gradient only.
        """
        spans = {name: (kv, 0, kv[0].shape[1]) for name, kv in cached.items()}
        asked: dict[str, tuple[Tensor, int, int]] = {}
        mods: dict[str, Modulation] = {}
        fresh: dict[str, KeyValue] = {}
        for name, x in tokens.items():
            block, stream = self.experts[name], streams[name]
            mods[name] = modulation(block, stream.time)
            q, k, v = qkv(block, x, mods[name], stream.rope)
            for group, start, stop, _ in stream.groups:
                asked[group] = (q, start, stop)
                spans[group] = ((k, v), start, stop)
                fresh[group] = (k[:, start:stop], v[:, start:stop])

        answers: dict[str, Tensor] = {}
        for call in calls:
            query = _join([asked[group] for group in call.queries])
            if room is None:
                seen = [spans[group] for group in call.keys]
                key = _join([(kv[0], start, stop) for kv, start, stop in seen])
                value = _join([(kv[1], start, stop) for kv, start, stop in seen])
            else:
                key, value = _filled(room, [fresh[group] for group in call.keys if group in fresh])
            lengths = [asked[group][2] - asked[group][1] for group in call.queries]
            pieces = attend(query, key, value, call.mask).split(lengths, dim=1)
            answers.update(zip(call.queries, pieces, strict=True))

        out: dict[str, Tensor] = {}
        new_texts = dict(texts)
        for name, x in tokens.items():
            block, stream = self.experts[name], streams[name]
            groups = tuple(group for group in stream.groups if group.name in answers)
            if not groups:
                continue
            assert groups == stream.groups[-len(groups) :], "the groups that ask must be the last ones"
            if name not in new_texts:
                new_texts[name] = text_keys(block, stream.text)
            x, mod = _last(x, mods[name], start=groups[0].start)
            answer = _cat([answers[group.name] for group in groups])
            out[name] = post(block, x, answer, mod, _text_groups(groups, new_texts[name]))
        return LayerResult(out, fresh, new_texts)


class MixtureOfTransformers(nn.Module):
    """The layers of all experts.

    Args:
        experts: size by name.
        checkpointing: keep only a layer's inputs for the backward pass.

    Raises:
        UsageError: experts differ in layers, heads or head_dim.
    """

    def __init__(self, experts: Mapping[str, ExpertSize], *, checkpointing: bool = False) -> None:
        super().__init__()
        check_agreement(experts, "num_layers", "num_heads", "head_dim")
        num_layers = next(iter(experts.values())).num_layers
        self.layers = nn.ModuleList(MoTLayer(experts) for _ in range(num_layers))
        self.checkpointing = checkpointing

    def forward(
        self,
        tokens: Mapping[str, Tensor],
        *,
        streams: Mapping[str, Stream],
        calls: Sequence[Call],
        wanted: Sequence[str],
        cached: Mapping[str, Sequence[KeyValue]] | None = None,
        texts: Sequence[Mapping[str, KeyValue]] | None = None,
        rooms: Sequence[KeyValue] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, list[KeyValue]], list[dict[str, KeyValue]]]:
        """Run all layers.

        Args:
            tokens: [B, S, H] by expert.
            streams: of the same experts.
            calls: attention calls of every layer.
            wanted: groups whose tokens are returned; the others end in the last layer with keys and values.
            cached: per group and layer, keys and values of an earlier pass.
            texts: per layer, as an earlier pass over the same texts returned them.
            rooms: per layer, see `MoTLayer.forward`.

        Returns:
            Tokens of the wanted groups by expert; keys and values per new group and layer; those of the texts
            per layer.
        """
        cached = cached or {}
        keys: dict[str, list[KeyValue]] = {group.name: [] for s in streams.values() for group in s.groups}
        new_texts: list[dict[str, KeyValue]] = []
        final = [call for call in (_narrow(call, streams, cached, wanted) for call in calls) if call.queries]
        for i, layer in enumerate(self.layers):
            run = (
                functools.partial(checkpoint, layer, use_reentrant=False)
                if self.checkpointing and torch.is_grad_enabled()
                else layer
            )
            result = run(
                tokens,
                streams=streams,
                calls=calls if i + 1 < len(self.layers) else final,
                cached={name: kvs[i] for name, kvs in cached.items()},
                texts={} if texts is None else texts[i],
                room=None if rooms is None else rooms[i],
            )
            tokens = result.tokens
            for group, kv in result.keys.items():
                keys[group].append(kv)
            new_texts.append(result.texts)
        return dict(tokens), keys, new_texts


def check_agreement(experts: Mapping[str, ExpertSize], *names: str) -> None:
    """Raise a UsageError where experts differ in one of the named sizes."""
    for name in names:
        values = {expert: getattr(size, name) for expert, size in experts.items()}
        if len(set(values.values())) != 1:
            text = ", ".join(f"{expert} {value}" for expert, value in values.items()) or "no expert"
            raise UsageError(f"experts must agree in {name}, one self-attention joins them: {text}")


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _join(parts: Sequence[tuple[Tensor, int, int]]) -> Tensor:
    """Rows [start, stop) of tensors in order; neighbouring rows of one tensor are taken as one view."""
    runs: list[tuple[Tensor, int, int]] = []
    for tensor, start, stop in parts:
        if runs and runs[-1][0] is tensor and runs[-1][2] == start:
            runs[-1] = (tensor, runs[-1][1], stop)
        else:
            runs.append((tensor, start, stop))
    return _cat([tensor[:, start:stop] for tensor, start, stop in runs])


def _filled(room: KeyValue, parts: Sequence[KeyValue]) -> KeyValue:
    """Write the parts to the last rows of the room."""
    end = room[0].shape[1]
    for k, v in reversed(parts):
        start = end - k.shape[1]
        room[0][:, start:end] = k
        room[1][:, start:end] = v
        end = start
    return room


def _last(x: Tensor, mod: Modulation, *, start: int) -> tuple[Tensor, Modulation]:
    """Tokens from `start` on, with their rows of the modulation."""
    if not start:
        return x, mod
    row = start * mod.shift_sa.shape[1] // x.shape[1]
    return x[:, start:], Modulation(*(rows[:, row:] for rows in mod))


def _text_groups(groups: Sequence[Group], text: KeyValue) -> list[TextGroup]:
    """Token slices, from the first group on, with the text that they see; equal neighbours share a slice."""
    first, out = groups[0].start, []
    for visible, same in itertools.groupby(groups, key=lambda group: group.text):
        run = list(same)
        tokens = slice(run[0].start - first, run[-1].stop - first)
        out.append((tokens, (text[0][:, :visible], text[1][:, :visible])))
    return out


def _narrow(
    call: Call,
    streams: Mapping[str, Stream],
    cached: Mapping[str, Sequence[KeyValue]],
    wanted: Sequence[str],
) -> Call:
    """The call with the wanted queries alone."""
    queries = tuple(group for group in call.queries if group in wanted)
    if call.mask is None or queries == call.queries:
        return call._replace(queries=queries)
    sizes = {group.name: group.stop - group.start for s in streams.values() for group in s.groups}
    rows = torch.cat([torch.full((sizes[group],), group in wanted) for group in call.queries])
    return Call(queries, call.keys, call.mask[rows.to(call.mask.device)])
