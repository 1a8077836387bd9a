"""Pictures to patches: the image processor's arithmetic, from sizes alone where that is enough."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from memer.errors import MemerError

MAX_ASPECT_RATIO = 200

#: (height, width) of a picture, px.
Size = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelGeometry:
    """How a picture becomes patches: the image processor's numbers, with the contract's area bounds.

    Attributes:
        min_pixels: lower area bound, px.
        max_pixels: upper area bound, px.
        patch_size: side of a patch, px.
        merge_size: patches per token along each side.
        temporal_patch_size: copies of the picture in one patch.
        mean: per channel, of pictures scaled to 0 .. 1.
        std: per channel.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def resized(self, size: Size) -> Size:
        """(height, width) after resizing: multiples of one token's side, area within the bounds, px.

        Raises:
            MemerError: one side is more than 200 times the other.

        >>> PixelGeometry(min_pixels=50_176, max_pixels=115_200).resized((360, 320))
        (352, 320)
        """
        height, width = size
        if max(size) > MAX_ASPECT_RATIO * min(size):
            raise MemerError(f"picture of {width} x {height} px: aspect ratio above {MAX_ASPECT_RATIO}")
        unit = self.patch_size * self.merge_size
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif rows * columns * unit**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        return rows * unit, columns * unit

    def grid(self, size: Size) -> tuple[int, int]:
        """(rows, columns) of patches of a picture."""
        height, width = self.resized(size)
        return height // self.patch_size, width // self.patch_size

    def num_tokens(self, size: Size) -> int:
        """Tokens that a picture of this size takes, from its size alone."""
        rows, columns = self.grid(size)
        return rows * columns // self.merge_size**2

    def patches(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Resize and cut a picture, in the tower's order: merged cells row by row, patches within a cell.

        Args:
            frame: uint8[H, W, 3].

        Returns:
            uint8[rows * columns, 3 * patch_size**2], channel first within a patch.
        """
        height, width = self.resized(frame.shape[:2])
        if frame.shape[:2] != (height, width):
            frame = np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))
        patch, merge = self.patch_size, self.merge_size
        cells = frame.reshape(
            height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3
        )
        return np.ascontiguousarray(cells.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3 * patch * patch)


def normalized(patches: Tensor, geometry: PixelGeometry) -> Tensor:
    """Scale to 0 .. 1 and normalise per channel; the copies in time are left to the tower's embedding.

    Args:
        patches: uint8[P, 3 * patch_size**2], from `PixelGeometry.patches`.
        geometry: mean and std.

    Returns:
        float32[P, 3 * patch_size**2], on the device of `patches`.
    """
    mean, std = (
        patches.new_tensor(v, dtype=torch.float32).view(3, 1) * 255 for v in (geometry.mean, geometry.std)
    )
    return (patches.view(len(patches), 3, -1) - mean).mul_(1 / std).view(len(patches), -1)
