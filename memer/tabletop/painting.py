"""Drawing with array slices: flat colours, no anti-aliasing, below a millisecond per frame pair."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Color = tuple[int, int, int]

#: Colours of things; far apart, also after JPEG and a resize to a few pixels.
COLORS: Final[dict[str, Color]] = {
    "red": (215, 25, 30),
    "orange": (250, 140, 10),
    "yellow": (250, 235, 40),
    "green": (20, 140, 50),
    "cyan": (50, 215, 225),
    "blue": (30, 60, 215),
    "purple": (130, 35, 165),
    "pink": (255, 130, 195),
}
TABLE: Final[Color] = (196, 176, 148)
SHADOW: Final[Color] = (150, 132, 108)
STEEL: Final[Color] = (62, 66, 74)
STEEL_LIGHT: Final[Color] = (232, 236, 242)
DARK: Final[Color] = (28, 26, 28)
INSIDE: Final[Color] = (98, 94, 92)
WHITE: Final[Color] = (246, 246, 246)


class Canvas:
    """A square image addressed in 0..1 from the top left corner.

    Args:
        pixels: uint8[S, S, 3], drawn into in place.
    """

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self.pixels = pixels
        self._size = pixels.shape[0]

    @classmethod
    def filled(cls, size: int, color: Color) -> "Canvas":
        """A canvas of one colour."""
        pixels = np.empty((size, size, 3), dtype=np.uint8)
        pixels[:] = color
        return cls(pixels)

    def rect(self, left: float, top: float, right: float, bottom: float, color: Color) -> None:
        """Fill a rectangle; parts outside the image are cut."""
        size = self._size
        u0, u1 = max(0, round(left * size)), min(size, round(right * size))
        v0, v1 = max(0, round(top * size)), min(size, round(bottom * size))
        if u0 < u1 and v0 < v1:
            self.pixels[v0:v1, u0:u1] = color

    def box(self, u: float, v: float, half_width: float, half_height: float, color: Color) -> None:
        """Fill a rectangle given by its centre."""
        self.rect(u - half_width, v - half_height, u + half_width, v + half_height, color)

    def framed(
        self,
        u: float,
        v: float,
        half_width: float,
        half_height: float,
        color: Color,
        *,
        edge: float,
        rim: Color,
    ) -> None:
        """A rectangle given by its centre, with a rim of width `edge` inside its outline."""
        self.box(u, v, half_width, half_height, rim)
        self.box(u, v, half_width - edge, half_height - edge, color)


#: Least edge at which pictures that are shrunk afterwards are drawn, px.
FINE_SIZE: Final[int] = 128


def oversampling(size: int) -> int:
    """Factor by which to draw larger than `size`, so that small pictures show motion below a pixel."""
    return max(1, -(-FINE_SIZE // size))


def shrink(pixels: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Mean over squares of `factor` pixels, uint8[S * factor, S * factor, 3] -> uint8[S, S, 3]."""
    if factor == 1:
        return pixels
    size = pixels.shape[0] // factor
    # Rows first, then columns: sums over contiguous memory, several times faster than one mean over both.
    rows = pixels.reshape(size, factor, -1).sum(axis=1, dtype=np.uint32)
    blocks = rows.reshape(size, size, factor, 3).sum(axis=2, dtype=np.uint32)
    small: NDArray[np.uint8] = np.rint(blocks / factor**2).astype(np.uint8)
    return small


def project(x: float, y: float, z: float) -> tuple[float, float]:
    """World to base view (0..1, origin top left): seen from above at a slant, height lifts on the screen."""
    return x, 0.95 - 0.8 * y - 0.45 * z


def paint_gripper(canvas: Canvas, x: float, y: float, z: float, grip: float) -> None:
    """The gripper of the base view: arm to the upper edge, light plate, two fingers."""
    u, v = project(x, y, z)
    canvas.rect(u - 0.025, 0.0, u + 0.025, v - 0.06, STEEL)
    canvas.rect(u - 0.013, 0.0, u + 0.013, v - 0.06, STEEL_LIGHT)
    canvas.framed(u, v - 0.045, 0.095, 0.035, STEEL_LIGHT, edge=0.012, rim=STEEL)
    spread = 0.075 - 0.025 * grip
    for side in (-spread, spread):
        canvas.box(u + side, v + 0.02, 0.015, 0.04, STEEL)


def paint_shadow(canvas: Canvas, x: float, y: float, z: float) -> None:
    """The gripper's shadow at height `z`."""
    u, v = project(x, y, z)
    canvas.box(u, v, 0.07, 0.02, SHADOW)


def paint_lying_block(canvas: Canvas, x: float, y: float, half: tuple[float, float], color: Color) -> None:
    """A block on the table in the base view, `half` its half width and height on the screen."""
    u, v = project(x, y, 0.0)
    canvas.box(u, v - 0.01, *half, color)


def paint_carrying_gripper(
    canvas: Canvas,
    position: NDArray[np.float64],
    grip: float,
    *,
    half: tuple[float, float],
    held: Color | None,
) -> None:
    """The gripper of the base view at `position` (x, y, z), its shadow on the table, the block it holds."""
    x, y, z = position
    paint_shadow(canvas, x, y, 0.0)
    if held is not None:
        u, v = project(x, y, z)
        canvas.box(u, v + 0.03, *half, held)
    paint_gripper(canvas, x, y, z, grip)


def paint_wrist_fingers(canvas: Canvas, grip: float, held: Color | None) -> None:
    """The lower half of the wrist view: two fingers and what they hold."""
    if held is not None:
        canvas.rect(0.27, 0.53, 0.73, 0.92, held)
    spread = 0.34 - 0.1 * grip
    for side in (-spread, spread):
        canvas.rect(0.5 + side - 0.06, 0.6, 0.5 + side + 0.06, 1.0, STEEL)
    canvas.rect(0.1, 0.92, 0.9, 1.0, STEEL)
