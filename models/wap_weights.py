"""The executor's weights: to and from the stock Wan transformer, experts from the video expert, counts.

Source: MaP-WAM (arXiv 2609.11561), specification section 8.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memer.errors import MemerError
from memer.plan_settings import LATENT_PATCH
from models.wan import CausalWan
from models.wap import WapModel
from models.wap_settings import WapSettings

_LAYER = re.compile(r"mot\.layers\.(\d+)\.experts\.video\.")
_BLOCK = re.compile(r"blocks\.(\d+)\.")


def stock_config(settings: WapSettings) -> dict[str, Any]:
    """Arguments of the stock transformer that has the video expert's weights."""
    s = settings
    return {
        "patch_size": (1, LATENT_PATCH, LATENT_PATCH),
        "num_attention_heads": s.video.num_heads,
        "attention_head_dim": s.video.head_dim,
        "in_channels": s.channels,
        "out_channels": s.channels,
        "text_dim": s.text_dim,
        "freq_dim": s.freq_dim,
        "ffn_dim": s.video.ffn,
        "num_layers": s.video.num_layers,
        "eps": s.video.eps,
    }


def to_stock_name(name: str) -> str | None:
    """Name of an executor's parameter in the stock transformer; None for those of the other experts.

    >>> to_stock_name("mot.layers.3.experts.video.attn1.to_q.weight"), to_stock_name("video.proj_out.bias")
    ('blocks.3.attn1.to_q.weight', 'proj_out.bias')
    >>> to_stock_name("action.proj_out.bias")
    """
    if _LAYER.match(name):
        return _LAYER.sub(r"blocks.\1.", name)
    return name.removeprefix("video.") if name.startswith("video.") else None


def from_stock_name(name: str) -> str:
    """Name of a stock transformer's parameter in the executor.

    >>> from_stock_name("blocks.3.attn1.to_q.weight"), from_stock_name("proj_out.bias")
    ('mot.layers.3.experts.video.attn1.to_q.weight', 'video.proj_out.bias')
    """
    if _BLOCK.match(name):
        return _BLOCK.sub(r"mot.layers.\1.experts.video.", name)
    return f"video.{name}"


def stock_video_state(model: WapModel) -> dict[str, Tensor]:
    """The video expert's weights under the stock transformer's names; the tensors are shared."""
    named = ((to_stock_name(name), tensor) for name, tensor in model.state_dict().items())
    return {name: tensor for name, tensor in named if name is not None}


@torch.no_grad()
def load_stock_video(model: WapModel, state: Mapping[str, Tensor]) -> None:
    """Copy the weights of a stock transformer (or a trained world model) into the video expert.

    Raises:
        MemerError: a tensor is missing, unknown or of another shape; nothing is copied then.
    """
    own = stock_video_state(model)
    for what, names in (("lack", own.keys() - state.keys()), ("hold", state.keys() - own.keys())):
        if names:
            raise MemerError(
                f"the video weights {what} {sorted(names)[0]} (and {len(names) - 1} more): made for another "
                "size; take the executor's video sizes from the world model"
            )
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise MemerError(
                f"the video weights' {name} has shape {tuple(state[name].shape)}, the executor's "
                f"{tuple(tensor.shape)}; take the executor's video sizes from the world model"
            )
    for name, tensor in own.items():
        tensor.copy_(state[name])


def save_stock_video(model: WapModel, folder: str | Path) -> None:
    """Write the video expert as diffusers writes `WanTransformer3DModel`: config.json and weights."""
    with torch.device("meta"):
        stock = CausalWan(**stock_config(model.settings))
    stock.load_state_dict(stock_video_state(model), assign=True)
    stock.save_stock(folder)


@torch.no_grad()
def resize(source: Tensor, shape: Sequence[int]) -> Tensor:
    """`source` stretched to `shape` by linear interpolation along every axis, the end entries aligned.

    A matrix whose last axis (inputs) changes is scaled by sqrt(old / new): its outputs keep their size.

    >>> resize(torch.tensor([0.0, 1.0, 2.0]), (5,)).tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    if source.dim() != len(shape):
        raise ValueError(f"a tensor of {source.dim()} axes cannot be resized to {tuple(shape)}")
    y = source.float()
    for axis, size in enumerate(shape):
        old = y.shape[axis]
        if old == size:
            continue
        at = torch.linspace(0, old - 1, size, dtype=torch.float64, device=y.device)
        low = at.floor().long().clamp(max=max(old - 2, 0))
        high = (low + 1).clamp(max=old - 1)
        weight = (at - low).float().view([-1 if a == axis else 1 for a in range(y.dim())])
        y = torch.lerp(y.index_select(axis, low), y.index_select(axis, high), weight)
    if len(shape) >= 2 and source.shape[-1] != shape[-1]:
        y = y * (source.shape[-1] / shape[-1]) ** 0.5
    return y.to(source.dtype)


@torch.no_grad()
def resize_into(target: nn.Module, source: nn.Module) -> None:
    """Fill every parameter of `target` from the parameter of that name in `source`, resized."""
    given = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        parameter.copy_(resize(given[name], parameter.shape))


def interpolate_experts(model: WapModel) -> None:
    """Initialise action and progress experts from the video expert, all but their input and output layers.

    Every tensor is the video tensor resized by linear interpolation, see `resize`.
    """
    for name in ("action", "progress"):
        expert = getattr(model, name)
        resize_into(expert.condition_embedder, model.video.condition_embedder)
        for layer in model.mot.layers:
            resize_into(layer.experts[name], layer.experts["video"])


def meta_counts(settings: WapSettings) -> dict[str, int]:
    """Parameters per part, from the meta device: full sizes take no memory."""
    with torch.device("meta"):
        model = WapModel(settings)
    counts = {"video": 0, "action": 0, "progress": 0, "conditions": 0}
    for name, parameter in model.named_parameters():
        part = re.sub(r"mot\.layers\.\d+\.experts\.", "", name).split(".")[0]
        counts[part if part in counts else "conditions"] += parameter.numel()
    return counts
