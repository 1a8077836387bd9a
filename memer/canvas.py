"""The canvas: all camera views of one time step as one image, for plans and their executor.

Every view first goes through the same size and JPEG coding as a stored frame (`memer.cameras.code_view`),
then into its region; so a canvas painted from shards and one painted from a live observation are equal bit
for bit.
Source: MaP-WAM specification, section 3.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from memer.cameras import Pixels, check_cameras, code_view
from memer.contract import CameraLayout
from memer.episode import Episode
from memer.errors import MemerError
from memer.plan_settings import CanvasLayout, CanvasRegion

#: How far decoded values may leave [-1, 1] by rounding.
_SLACK = 1e-3


def paint_canvas(
    views: Mapping[str, ArrayLike | Image.Image],
    *,
    canvas: CanvasLayout,
    cameras: CameraLayout,
    prepared: bool = False,
) -> Pixels:
    """The canvas of one time step.

    Args:
        views: by camera key; keys that the canvas does not name are ignored.
        canvas: where each view goes.
        cameras: size and JPEG coding that every view has been through in the shards.
        prepared: the views come from shards.

    Returns:
        uint8[H, W, 3] RGB; black outside the regions.

    Raises:
        MemerError: a camera is missing, or a prepared view does not have its slot's size.
    """
    check_cameras(views, canvas.cameras)
    coded = {key: code_view(views[key], cameras, key=key, prepared=prepared) for key in canvas.cameras}
    return _compose(coded, canvas)


def canvases(
    episode: Episode, indices: Iterable[int], *, canvas: CanvasLayout, cameras: CameraLayout
) -> dict[int, Pixels]:
    """Canvases of some frames of an episode, every camera read in one forward pass.

    Args:
        episode: its prepared cameras are only composed, the others coded like live ones.
        indices: raw frames in any order, repetitions allowed.
        canvas: see `paint_canvas`.
        cameras: see `paint_canvas`.

    Returns:
        Raw frame -> uint8[H, W, 3].

    Raises:
        MemerError: a camera is missing or ends early, or a frame lies outside the episode.
    """
    where = f"episode {episode.episode_index} of {episode.source}"
    check_cameras(episode.cameras, canvas.cameras, where=where)
    wanted = sorted(set(indices))
    for k in (*wanted[:1], *wanted[-1:]):
        if not 0 <= k < episode.num_frames:
            raise MemerError(f"{where}: frame {k}, the episode has {episode.num_frames}")
    sources = {key: episode.cameras[key] for key in canvas.cameras}
    streams = {key: source.frames(wanted) for key, source in sources.items()}
    painted: dict[int, Pixels] = {}
    for k in wanted:
        coded: dict[str, Pixels] = {}
        for key, stream in streams.items():
            view = next(stream, None)
            if view is None:
                raise MemerError(f"{where}: camera {key} ends before frame {k}; check its video")
            coded[key] = code_view(view, cameras, key=key, prepared=sources[key].prepared)
        painted[k] = _compose(coded, canvas)
    return painted


def crop(frames: NDArray[np.uint8], regions: Iterable[CanvasRegion]) -> list[NDArray[np.uint8]]:
    """The regions' views, cut out of uint8[..., H, W, 3]."""
    return [
        frames[..., region.y : region.y + region.height, region.x : region.x + region.width, :]
        for region in regions
    ]


def to_signed(pixels: NDArray[np.uint8] | torch.Tensor) -> torch.Tensor:
    """uint8[..., H, W, 3] as float32[..., 3, H, W] in [-1, 1], the form that codecs take.

    Raises:
        ValueError: another number type, or channels are not last.

    >>> to_signed(np.array([[[0, 255, 51]]], dtype=np.uint8)).flatten().tolist()
    [-1.0, 1.0, -0.6000000238418579]
    """
    tensor = torch.from_numpy(np.ascontiguousarray(pixels)) if isinstance(pixels, np.ndarray) else pixels
    if tensor.dtype != torch.uint8 or tensor.ndim < 3 or tensor.shape[-1] != 3:
        raise ValueError(
            f"pixels of {tensor.dtype} {tuple(tensor.shape)}: must be uint8 with 3 channels, channels last"
        )
    return tensor.movedim(-1, -3).contiguous().to(torch.float32) / 127.5 - 1.0


def to_pixels(values: torch.Tensor) -> Pixels:
    """float[..., 3, H, W] in [-1, 1] as uint8[..., H, W, 3] on the CPU; the inverse of `to_signed`.

    Raises:
        ValueError: an integer type, other channels, values outside [-1, 1] (codecs clamp) or not a number.

    >>> to_pixels(torch.tensor([-1.0, 1.0, -0.6]).view(3, 1, 1)).tolist()
    [[[0, 255, 51]]]
    """
    if not values.is_floating_point() or values.ndim < 3 or values.shape[-3] != 3:
        raise ValueError(
            f"values of {values.dtype} {tuple(values.shape)}: must be floats [..., 3, height, width]"
        )
    numbers = values.detach().to("cpu", torch.float32)
    if numbers.numel():
        low, high = float(numbers.min()), float(numbers.max())
        if not (low >= -1 - _SLACK and high <= 1 + _SLACK):  # also refuses NaN
            raise ValueError(f"values in {low:g}..{high:g}: must be in -1..1; clamp what a model generated")
    levels = ((numbers + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return np.ascontiguousarray(levels.movedim(-3, -1).numpy())


def _compose(coded: Mapping[str, Pixels], canvas: CanvasLayout) -> Pixels:
    """Coded views in their regions, each resized with antialiased bilinear filtering."""
    painted = np.zeros((canvas.height, canvas.width, 3), dtype=np.uint8)
    for region in canvas.regions:
        view = coded[region.camera]
        if view.shape[:2] != (region.height, region.width):
            size = (region.width, region.height)
            view = np.asarray(Image.fromarray(view).resize(size, Image.Resampling.BILINEAR))
        painted[region.y : region.y + region.height, region.x : region.x + region.width] = view
    return painted
