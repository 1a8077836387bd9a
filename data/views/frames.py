"""Frames of episodes as models see them, decoded and drawn once while they are in use.

A frame is the stack of its views (planners), or with a canvas layout the canvas of a visual plan.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memer.cameras import stacked_frames
from memer.canvas import canvases
from memer.contract import CameraLayout
from memer.episode import Episode
from memer.errors import MemerError
from memer.plan_settings import CanvasLayout
from memer.sample import FrameKey


class FrameProvider(Protocol):
    """Gives frames of an episode."""

    def fetch(
        self,
        episode: Episode,
        indices: Sequence[int],
        *,
        layout: CameraLayout,
        canvas: CanvasLayout | None = None,
    ) -> dict[int, NDArray[np.uint8]]:
        """Frame number -> uint8[H, W, 3] for ascending `indices`: stacked views, or canvases."""
        ...


class FrameCache:
    """Least recently used frames up to a number of bytes; one per process, for one way of drawing.

    Args:
        max_bytes: bytes of drawn frames kept at most; 0 keeps none.

    Attributes:
        decoded: frames decoded so far.
        served: frames asked for so far.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.decoded = 0
        self.served = 0
        self._frames: OrderedDict[FrameKey, NDArray[np.uint8]] = OrderedDict()
        self._drawing: tuple[CameraLayout, CanvasLayout | None] | None = None

    def fetch(
        self,
        episode: Episode,
        indices: Sequence[int],
        *,
        layout: CameraLayout,
        canvas: CanvasLayout | None = None,
    ) -> dict[int, NDArray[np.uint8]]:
        """The frames of `indices`, ascending; missing ones are decoded in one pass per camera.

        Args:
            episode: whose frames.
            indices: raw frames, strictly ascending.
            layout: of the cameras; without `canvas` their views are stacked.
            canvas: draws the views where it says instead.

        Returns:
            frame number -> uint8[H, W, 3], read-only because several samples share it.

        Raises:
            MemerError: a camera is missing or ends early, or a picture is none.
            ValueError: the kept frames were drawn in another way.
        """
        if self._drawing is None:
            self._drawing = (layout, canvas)
        elif self._drawing != (layout, canvas):
            raise ValueError("a cache keeps frames of one camera layout and canvas; make another cache")
        found: dict[int, NDArray[np.uint8]] = {}
        missing: list[int] = []
        for index in indices:
            key = (episode.source, episode.episode_index, index)
            frame = self._frames.get(key)
            if frame is None:
                missing.append(index)
            else:
                self._frames.move_to_end(key)
                found[index] = frame
        for index, frame in _drawn(episode, missing, layout=layout, canvas=canvas):
            frame.flags.writeable = False
            found[index] = frame
            self._keep((episode.source, episode.episode_index, index), frame)
        self.decoded += len(missing)
        self.served += len(indices)
        return found

    def _keep(self, key: FrameKey, frame: NDArray[np.uint8]) -> None:
        self._frames[key] = frame
        self.num_bytes += frame.nbytes
        while self.num_bytes > self.max_bytes and self._frames:
            _, oldest = self._frames.popitem(last=False)
            self.num_bytes -= oldest.nbytes


def _drawn(
    episode: Episode, indices: Sequence[int], *, layout: CameraLayout, canvas: CanvasLayout | None
) -> Iterable[tuple[int, NDArray[np.uint8]]]:
    if canvas is None:
        return zip(indices, stacked_frames(episode, layout, indices), strict=True)
    try:
        return canvases(episode, indices, canvas=canvas, cameras=layout).items()
    except ValueError as error:  # a picture of another shape or number type
        raise MemerError(f"episode {episode.episode_index} of {episode.source}: frames: {error}") from None
