"""Stacked frames of episodes, decoded once while they are in use."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memer.cameras import stacked_frames
from memer.contract import CameraLayout
from memer.episode import Episode
from memer.sample import FrameKey


class FrameProvider(Protocol):
    """Gives stacked frames of an episode."""

    def fetch(
        self, episode: Episode, indices: Sequence[int], *, layout: CameraLayout
    ) -> dict[int, NDArray[np.uint8]]:
        """Frame number -> uint8[H, W, 3] for ascending `indices`."""
        ...


class FrameCache:
    """Least recently used frames up to a number of bytes; one per process.

    Args:
        max_bytes: bytes of stacked frames kept at most; 0 keeps none.

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

    def fetch(
        self, episode: Episode, indices: Sequence[int], *, layout: CameraLayout
    ) -> dict[int, NDArray[np.uint8]]:
        """The stacked frames of `indices`, ascending; missing ones are decoded in one pass per camera.

        Returns:
            frame number -> uint8[H, W, 3], read-only because several samples share it.
        """
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
        for index, frame in zip(missing, stacked_frames(episode, layout, missing), strict=True):
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
