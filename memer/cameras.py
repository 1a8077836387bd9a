"""Cameras: from the views of one time step to the one image that a planner sees.

Every view goes through `prepare_view` (its slot's size) and one JPEG coding; the prepared views are stacked
from top to bottom. Shards store exactly the prepared JPEG, so a training frame and a live frame are equal bit
for bit:

    live      raw view -> prepare_view -> encode_jpeg -> decode_jpeg -.
    shards    raw view -> prepare_view -> encode_jpeg (stored) ... decode_jpeg -> stack_views
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from memer.contract import CameraLayout
from memer.episode import Episode
from memer.errors import MemerError, SourceUnavailableError, UsageError

Pixels = NDArray[np.uint8]


def as_rgb(array: ArrayLike | Image.Image) -> Pixels:
    """Any usual form of a picture as uint8[H, W, 3] RGB.

    Args:
        array: [H, W], [H, W, C] or [C, H, W] with 1 (gray), 2 (gray, alpha), 3 or 4 (alpha) channels; uint8,
            or floats in 0..1, scaled by 255 and rounded; a PIL image. Alpha is dropped. Where both readings
            are possible, channels are last.

    Raises:
        ValueError: another shape or number type, or floats outside 0..1.

    >>> as_rgb(np.array([[0.0, 1.0]])).tolist()
    [[[0, 0, 0], [255, 255, 255]]]
    """
    if isinstance(array, Image.Image):
        if array.mode.startswith(("I", "F")):
            raise ValueError(f"picture of mode {array.mode}: must be an 8-bit picture")
        return np.array(array.convert("RGB"))
    pixels: NDArray[Any] = np.asarray(array)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or 0 in pixels.shape:
        raise ValueError(f"picture of shape {pixels.shape}: must be [H, W], [H, W, C] or [C, H, W]")
    if pixels.shape[2] > 4 and pixels.shape[0] <= 4:
        pixels = np.moveaxis(pixels, 0, 2)
    channels = pixels.shape[2]
    if channels > 4:
        raise ValueError(f"picture of shape {pixels.shape}: must have 1 to 4 channels, first or last")
    pixels = np.repeat(pixels[:, :, :1], 3, axis=2) if channels < 3 else pixels[:, :, :3]
    if np.issubdtype(pixels.dtype, np.floating):
        low, high = float(pixels.min()), float(pixels.max())
        if not (low >= -1e-3 and high <= 1 + 1e-3):  # also refuses NaN
            raise ValueError(f"picture of floats in {low:g}..{high:g}: must be in 0..1, or uint8")
        pixels = np.clip(np.rint(pixels.astype(np.float32) * 255), 0, 255).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ValueError(f"picture of {pixels.dtype}: must be uint8, or floats in 0..1")
    return np.ascontiguousarray(pixels)


def prepare_view(view: ArrayLike | Image.Image, layout: CameraLayout) -> Pixels:
    """One view in its slot's size, as stored in shards.

    Args:
        view: see `as_rgb`.
        layout: `per_view` resizes (bicubic) to view_width x view_height, stretched or letterboxed; `public`
            leaves the size alone, because there the whole stack is resized once.

    Returns:
        uint8[view_height, view_width, 3], or uint8[H, W, 3] in `public` mode.
    """
    pixels = as_rgb(view)
    if layout.stack_mode == "public":
        return pixels
    return _fit(pixels, width=layout.view_width, height=layout.view_height, fit=layout.fit)


def code_view(
    view: ArrayLike | Image.Image, layout: CameraLayout, *, key: str, prepared: bool = False
) -> Pixels:
    """One view as training sees it: its slot's size and one JPEG coding; one from shards has both already.

    Args:
        view: see `as_rgb`.
        layout: sizes and quality.
        key: camera, for the message.
        prepared: the view comes from shards.

    Raises:
        MemerError: a prepared view does not have its slot's size.
    """
    if prepared:
        return _checked(as_rgb(view), layout, key=key)
    pixels = prepare_view(view, layout)
    return decode_jpeg(encode_jpeg(pixels, layout)) if layout.jpeg_round_trip else pixels


def encode_jpeg(view: Pixels, layout: CameraLayout) -> bytes:
    """JPEG bytes of one prepared view, in the contract's quality; the same view gives the same bytes."""
    buffer = io.BytesIO()
    Image.fromarray(view).save(buffer, format="JPEG", quality=layout.jpeg_quality)
    return buffer.getvalue()


def decode_jpeg(data: bytes, *, where: str = "picture") -> Pixels:
    """uint8[H, W, 3] of encoded bytes.

    Raises:
        MemerError: the bytes are no complete picture; `where` names them.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.array(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MemerError(f"{where}: cannot be decoded ({error}); make it again from its source") from None


def stack_views(views: Mapping[str, ArrayLike | Image.Image], layout: CameraLayout) -> Pixels:
    """The views of one time step as one image, top to bottom in the layout's order.

    Args:
        views: by camera key; keys that the layout does not name are ignored.
        layout: `per_view` concatenates slots (views of another size are fitted first); `public` pads the
            views on black to the widest, left-aligned, concatenates and resizes once (not a single view).

    Returns:
        uint8[view_height * cameras, view_width, 3]; a single view in `public` mode keeps its size.

    Raises:
        MemerError: a camera is missing; lists those that exist.
    """
    check_cameras(views, layout.camera_keys)
    prepared = [prepare_view(views[key], layout) for key in layout.camera_keys]
    if layout.stack_mode == "per_view":
        return np.concatenate(prepared, axis=0) if len(prepared) > 1 else prepared[0]
    if len(prepared) == 1:
        return prepared[0]
    widest = max(view.shape[1] for view in prepared)
    padded = [np.pad(view, ((0, 0), (0, widest - view.shape[1]), (0, 0))) for view in prepared]
    width, height = layout.stacked_size
    return _fit(np.concatenate(padded, axis=0), width=width, height=height, fit=layout.fit)


def prepare_frame(
    views: Mapping[str, ArrayLike | Image.Image], layout: CameraLayout, *, prepared: bool = False
) -> Pixels:
    """The stacked image of one time step, as training sees it: slots, JPEG coding per view, stack.

    Args:
        views: by camera key; raw, or prepared ones.
        layout: sizes, order, quality; without `jpeg_round_trip` the coding is left out.
        prepared: the views come from shards and are only stacked.

    Raises:
        MemerError: a camera is missing, or a prepared view does not have its slot's size.
    """
    check_cameras(views, layout.camera_keys)
    ready = {key: code_view(views[key], layout, key=key, prepared=prepared) for key in layout.camera_keys}
    return stack_views(ready, layout)


def stacked_frames(
    episode: Episode, layout: CameraLayout, indices: Sequence[int] | None = None
) -> Iterator[Pixels]:
    """Stacked images of an episode, every camera read in one forward pass.

    Args:
        episode: its prepared cameras are only stacked, the others prepared and coded like live ones.
        layout: see `prepare_frame`.
        indices: strictly ascending raw frames; None: all.

    Raises:
        MemerError: a camera is missing or ends early, or a prepared view does not have its slot's size.
    """
    where = f"episode {episode.episode_index} of {episode.source}"
    check_cameras(episode.cameras, layout.camera_keys, where=where)
    wanted = range(episode.num_frames) if indices is None else indices
    for before, after in pairwise(wanted):
        if before >= after:
            raise ValueError(f"indices: {before}, {after}; must be strictly ascending")
    sources = [episode.cameras[key] for key in layout.camera_keys]
    streams = [source.frames(indices) for source in sources]
    for k in wanted:
        views: dict[str, ArrayLike | Image.Image] = {}
        for key, source, stream in zip(layout.camera_keys, sources, streams, strict=True):
            view = next(stream, None)
            if view is None:
                raise MemerError(f"{where}: camera {key} ends before frame {k}; check its video")
            views[key] = code_view(view, layout, key=key, prepared=source.prepared)
        yield stack_views(views, layout)


def layout_from_file(path: Path | str, **overrides: Any) -> CameraLayout:
    """Read a layout file: a JSON object with `camera_keys`, optionally view_width, view_height, notes.

    Args:
        path: the file.
        **overrides: fields of CameraLayout that such a file does not hold (stack_mode, fit, ...).

    Raises:
        SourceUnavailableError: no such file.
        MemerError: any other shape.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceUnavailableError(
            f"{path}: cannot read the camera layout ({error.strerror or error})"
        ) from None
    except ValueError as error:
        raise MemerError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(value, dict):
        raise MemerError(f"{path}: must be an object with camera_keys")
    unknown = sorted(set(value) - {"camera_keys", "view_width", "view_height", "notes"})
    if unknown:
        raise MemerError(
            f"{path}: unknown key {unknown[0]!r}; known: camera_keys, view_width, view_height, notes"
        )
    keys = value.get("camera_keys")
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) and key for key in keys):
        raise MemerError(f"{path}: camera_keys {keys!r}, must be a non-empty list of camera keys")
    sizes = {name: value[name] for name in ("view_width", "view_height") if name in value}
    for name, size in sizes.items():
        if type(size) is not int:
            raise MemerError(f"{path}: {name} {size!r}, must be a whole number of pixels")
    try:
        return CameraLayout(camera_keys=tuple(keys), **{**sizes, **overrides})
    except UsageError as error:
        raise MemerError(f"{path}: {error}") from None


def _checked(view: Pixels, layout: CameraLayout, *, key: str) -> Pixels:
    """`view`, if its size is that of a prepared one; it was made with another layout otherwise."""
    height, width = view.shape[:2]
    if layout.stack_mode == "per_view" and (width, height) != (layout.view_width, layout.view_height):
        raise MemerError(
            f"camera {key}: prepared view of {width}x{height} px, the layout asks for "
            f"{layout.view_width}x{layout.view_height}; build the shards again with this layout"
        )
    return view


def _fit(pixels: Pixels, *, width: int, height: int, fit: str) -> Pixels:
    """Bicubic resize to width x height, px; `letterbox` keeps the aspect ratio, centred on black."""
    old_height, old_width = pixels.shape[:2]
    if (old_width, old_height) == (width, height):
        return pixels
    if fit == "stretch":
        return _resize(pixels, width=width, height=height)
    scale = min(width / old_width, height / old_height)
    inner_width = min(width, max(1, round(old_width * scale)))
    inner_height = min(height, max(1, round(old_height * scale)))
    boxed = np.zeros((height, width, 3), dtype=np.uint8)
    left, top = (width - inner_width) // 2, (height - inner_height) // 2
    boxed[top : top + inner_height, left : left + inner_width] = _resize(
        pixels, width=inner_width, height=inner_height
    )
    return boxed


def _resize(pixels: Pixels, *, width: int, height: int) -> Pixels:
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def check_cameras(
    available: Mapping[str, object], keys: Iterable[str], *, where: str = "observation"
) -> None:
    """Raise a MemerError that names the first missing camera and those that exist."""
    missing = [key for key in keys if key not in available]
    if missing:
        raise MemerError(
            f"{where}: no camera {missing[0]!r}; available: {', '.join(sorted(available)) or 'none'}"
        )
