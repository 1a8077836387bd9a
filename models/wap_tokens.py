"""The executor's tokens: groups, positions, flow times, and who sees whom.

    query\\key  P  O  F  A  R      P plan prefix, O present observation (clean, video expert)
      P         x  .  .  .  .      F imagined future (noisy, video expert; absent at run time)
      O         x  x  .  .  .      A actions, R progress (noisy, own experts, one flow time)
      F         x  x  x  .  .
      A         x  x  .  x  x      P sees nothing that changes within a segment: its keys and values are
      R         x  x  .  x  x      kept for the segment, O's for a chunk; A and R run at every Euler step.

Source: MaP-WAM (arXiv 2609.11561), specification sections 8 and 11.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.mot import Call, Expert, Group, Stream
from models.wan import TIME_SCALE, CausalWan, Rope, RopeTables, rope_1d, rope_rows, time_embedding
from models.wap_settings import WapSettings


class VideoPart(NamedTuple):
    """Latent frames of one group.

    Attributes:
        group: name.
        latents: float32[B, C, F, h, w].
        position: of the first frame in time.
        text: number of first text tokens that they see.
        t: float32[B], flow time; None = clean.
    """

    group: str
    latents: Tensor
    position: int
    text: int
    t: Tensor | None = None


def sees(settings: WapSettings) -> dict[str, str]:
    """Groups that a group sees, by name; H (earlier history, in the cache) stands before P."""
    table = {"P": "HP", "O": "HPO", "F": "HPOF", "A": "HPOAR", "R": "HPOAR"}
    if settings.action_progress == "separate":
        table |= {"A": "HPOA", "R": "HPOR"}
    if settings.progress_mode == "classification":
        # The classifier's token is read alone at run time, so nothing may depend on it.
        table |= {"A": "HPOA", "R": "HPOR"}
    return table


def visibility(sizes: Mapping[str, int], table: Mapping[str, str]) -> Tensor:
    """The mask of one attention over all groups: bool[S, S], True = see.

    Args:
        sizes: tokens per group, in order.
        table: of `sees`.
    """
    rows = [
        torch.cat([torch.full((n, m), key in table[query]) for key, m in sizes.items()], dim=1)
        for query, n in sizes.items()
    ]
    return torch.cat(rows)


def history_mask(frames: int, tokens: int, *, cached: int = 0) -> Tensor:
    """Frames see themselves and earlier ones: bool[frames * tokens, (cached + frames) * tokens]."""
    frame = torch.arange(cached + frames).repeat_interleave(tokens)
    return frame[None, :] <= frame[cached * tokens :, None]


def attention_calls(
    streams: Mapping[str, Stream], settings: WapSettings, *, cached: Mapping[str, int] | None = None
) -> tuple[Call, ...]:
    """Attention calls of every layer for the groups at hand.

    Args:
        streams: of this pass.
        settings: switches, and the form: one unmasked call per set of visible groups, or one masked call.
        cached: tokens per cached group.
    """
    table = sees(settings)
    sizes = dict(cached or {})
    asking = {group.name: group.stop - group.start for s in streams.values() for group in s.groups}
    names = sorted({*sizes, *asking}, key="HPOFAR".index)
    if settings.attention == "masked" and not sizes and len(asking) > 1:
        mask = visibility({name: asking[name] for name in names}, table)
        if settings.executor_context == "full_history":
            mask[: asking["P"], : asking["P"]] = _history(asking["P"], settings)
        mask = mask.to(next(iter(streams.values())).time.device)
        return (Call(tuple(names), tuple(names), mask),)
    keys = {name: tuple(key for key in names if key in table[name]) for name in names if name in asking}
    calls = []
    for seen, group in itertools.groupby(keys, key=keys.__getitem__):
        mask = None
        if seen[-1] == "P" and settings.executor_context == "full_history":
            device = streams["video"].time.device
            mask = _history(asking["P"], settings, cached=sizes.get("H", 0)).to(device)
        calls.append(Call(tuple(group), seen, mask))
    return tuple(calls)


def _history(tokens: int, settings: WapSettings, *, cached: int = 0) -> Tensor:
    n = settings.frame_tokens
    return history_mask(tokens // n, n, cached=cached // n)


def video_stream(
    video: CausalWan, parts: Sequence[VideoPart], context: Tensor
) -> tuple[Tensor, Stream, Tensor]:
    """Tokens of latent frames, their stream and the time embeddings that the head needs.

    Args:
        video: patches, embedders and head of the video expert.
        parts: in the order of the mask.
        context: float32[B, M, T], text before the text MLP.

    Returns:
        tokens [B, S, H], the stream, and temb [B, F, H] per latent frame ([1, 1, H] if all are clean).
    """
    latents = torch.cat([part.latents for part in parts], dim=2) if len(parts) > 1 else parts[0].latents
    grid = video.grid(latents)
    per_frame = grid[0] * grid[1]
    groups, positions, stop = [], [], 0
    for part in parts:
        frames = part.latents.shape[2]
        groups.append(Group(part.group, stop, stop + frames * per_frame, part.text))
        positions.extend(range(part.position, part.position + frames))
        stop += frames * per_frame
    if all(part.t is None for part in parts):
        t = latents.new_zeros(1, 1)
    else:
        rows = [
            (latents.new_zeros(latents.shape[0]) if part.t is None else TIME_SCALE * part.t)
            .unsqueeze(1)
            .expand(-1, part.latents.shape[2])
            for part in parts
        ]
        t = torch.cat(rows, dim=1)
    temb, time = time_embedding(video.condition_embedder, t)
    rope = _frame_rope(video.rope_tables, tuple(positions), grid, latents.device)
    dtype = video.patch_embedding.weight.dtype
    stream = Stream(groups=tuple(groups), time=time, rope=rope, text=video.embed_text(context.to(dtype)))
    return video.embed(latents.to(dtype)), stream, temb


def line_stream(
    expert: Expert, group: str, length: int, context: Tensor, *, t: Tensor, head_dim: int
) -> Stream:
    """Stream of tokens on a line: actions, progress.

    Args:
        expert: whose embedders are used.
        group: name.
        length: tokens.
        context: float32[B, M, T], text before the text MLP.
        t: float32[B or 1, R], flow times; R must divide the tokens of the pass that uses the stream.
        head_dim: of the attention.
    """
    embedder = expert.condition_embedder
    _, time = time_embedding(embedder, TIME_SCALE * t)
    rope = _line_rope(RopeTables(head_dim), length, context.device)
    groups = (Group(group, 0, length, context.shape[1]),)
    return Stream(groups=groups, time=time, rope=rope, text=embedder.text_embedder(context))


@functools.lru_cache(maxsize=32)
def _frame_rope(
    tables: RopeTables, positions: tuple[int, ...], grid: tuple[int, int], device: torch.device
) -> Rope:
    return rope_rows(tables, torch.tensor(positions), *grid, device=device)


@functools.lru_cache(maxsize=32)
def _line_rope(tables: RopeTables, length: int, device: torch.device) -> Rope:
    return rope_1d(tables, torch.arange(length), device=device)
