"""What a robot may hand in as one observation, turned into the stacked frame that the contract describes.

Layout is declared, never guessed: arrays and tensors are HWC RGB, uint8 or floats in 0..1.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from memer.cameras import as_rgb, decode_jpeg, prepare_frame
from memer.contract import CameraLayout
from memer.errors import MemerError

#: Views by camera key, or one view: array, tensor, picture, encoded bytes, or {"bytes": ...}.
Observation = Any


def stacked_observation(
    observation: Observation, layout: CameraLayout, *, prepared: bool = False
) -> NDArray[np.uint8]:
    """One stacked frame, resized, coded and stacked as in training.

    Args:
        observation: a mapping from camera key to view, or a single view where the layout has one camera. A
            view is an array or tensor (HWC, RGB, uint8 or float 0..1), a PIL picture, an encoded image as
            bytes, or a mapping {"bytes": encoded}. Further cameras in a mapping are ignored.
        layout: from the contract.
        prepared: the observation is a stacked frame that went through the layout already; only its size is
            checked.

    Returns:
        uint8[H, W, 3], owned by the caller: environments may reuse their arrays.

    Raises:
        MemerError: the observation does not fit the layout or cannot be decoded.
    """
    if prepared:
        frame = np.array(observation, copy=True)
        width, height = layout.stacked_size
        public_single = layout.stack_mode == "public" and len(layout.camera_keys) == 1
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] != 3:
            raise MemerError(f"prepared frame: {frame.dtype}{list(frame.shape)}, must be uint8[H, W, 3]")
        if frame.shape[:2] != (height, width) and not public_single:
            raise MemerError(
                f"prepared frame: {frame.shape[1]} x {frame.shape[0]} px, "
                f"the contract's layout is {width} x {height}"
            )
        return frame
    views = _views(observation, layout)
    pixels = {key: _pixels(view, where=key) for key, view in views.items()}
    return np.array(prepare_frame(pixels, layout), copy=True)


def _views(observation: Observation, layout: CameraLayout) -> Mapping[str, Any]:
    encoded = isinstance(observation, Mapping) and isinstance(observation.get("bytes"), bytes)
    if isinstance(observation, Mapping) and not encoded:
        missing = [key for key in layout.camera_keys if key not in observation]
        if missing:
            raise MemerError(
                f"observation: camera {missing[0]} is missing; "
                f"available: {', '.join(map(str, observation)) or 'none'}"
            )
        return {key: observation[key] for key in layout.camera_keys}
    if len(layout.camera_keys) != 1:
        raise MemerError(
            f"observation: one view given, the layout stacks {', '.join(layout.camera_keys)}; "
            "give a mapping from camera key to view"
        )
    return {layout.camera_keys[0]: observation}


def _pixels(view: Any, *, where: str) -> NDArray[np.uint8]:
    """One view as uint8[H, W, 3]; faults name the camera."""
    if isinstance(view, Mapping):
        view = view.get("bytes")
    if isinstance(view, bytes | bytearray | memoryview):
        return decode_jpeg(bytes(view), where=f"observation, camera {where}")
    if isinstance(view, torch.Tensor):
        view = view.detach().cpu().numpy()
    if not isinstance(view, np.ndarray | Image.Image):
        raise MemerError(
            f"observation, camera {where}: {type(view).__name__}, must be an array, a tensor, a PIL picture "
            "or encoded bytes"
        )
    try:
        return as_rgb(view)
    except ValueError as error:
        raise MemerError(f"observation, camera {where}: {error}") from None


def resample(
    observations: Iterable[tuple[float, Observation]], *, fps: float
) -> Iterator[tuple[int, Observation]]:
    """Put a camera of another rate on the contract's clock.

    For every tick k / fps the newest observation at or before it; an observation repeats where the camera is
    slower and is left out where it is faster.

    Args:
        observations: (time in seconds, observation), times not falling.
        fps: the contract's clock.

    Yields:
        (step, observation), steps 0, 1, 2, ... counted from the first time.

    >>> list(resample([(0.0, "a"), (0.21, "b"), (0.3, "c")], fps=10.0))
    [(0, 'a'), (1, 'a'), (2, 'a'), (3, 'c')]
    """
    start: float | None = None
    step, previous, last_time = 0, None, 0.0
    for time_s, observation in observations:
        if start is None:
            start = time_s
        elif time_s < last_time:
            raise MemerError(f"observation at {time_s} s after {last_time} s: times must not fall")
        else:
            while start + step / fps < time_s - 1e-9:
                yield step, previous
                step += 1
        previous, last_time = observation, time_s
    if start is not None:
        while start + step / fps <= last_time + 1e-9:
            yield step, previous
            step += 1
