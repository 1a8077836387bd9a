"""The two cameras of object search."""

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from memer.tabletop import painting
from memer.tabletop.object_search.layout import BIN_HALF, BINS, WHITE_BIN, WHITE_HALF
from memer.tabletop.painting import COLORS, Canvas, Color, project

if TYPE_CHECKING:
    from memer.tabletop.object_search.world import ObjectSearchWorld

#: Bins differ in material, so that a wrist view alone tells which bin it shows.
RIMS: Final[dict[str, Color]] = {"left": (112, 74, 44), "center": (152, 158, 168), "right": (72, 86, 66)}


@lru_cache(maxsize=8)
def _background(size: int) -> NDArray[np.uint8]:
    canvas = Canvas.filled(size, painting.TABLE)
    for name, (x, y) in BINS.items():
        u, v = project(x, y, 0.0)
        canvas.framed(u, v, BIN_HALF, 0.11, painting.DARK, edge=0.025, rim=RIMS[name])
        canvas.rect(u - BIN_HALF, v + 0.11, u + BIN_HALF, v + 0.17, RIMS[name])
    u, v = project(*WHITE_BIN, 0.0)
    canvas.box(u + 0.01, v + 0.02, WHITE_HALF[0], 0.13, painting.SHADOW)
    canvas.framed(u, v, WHITE_HALF[0], 0.12, (226, 228, 232), edge=0.02, rim=painting.WHITE)
    canvas.pixels.setflags(write=False)
    return canvas.pixels


def base_view(world: "ObjectSearchWorld", size: int) -> NDArray[np.uint8]:
    """Table, bins (never their contents), white bin with contents, gripper and what it holds."""
    canvas = Canvas(_background(size).copy())
    for thing in world.things.values():
        if thing.place in ("white", "table"):
            u, v = project(thing.position[0], thing.position[1], 0.0)
            canvas.box(u, v, 0.032, 0.05, COLORS[thing.color])
    x, y, z = world.gripper
    painting.paint_shadow(canvas, x, y, 0.0)
    if world.held is not None:
        u, v = project(x, y, z)
        canvas.box(u, v + 0.03, 0.05, 0.045, COLORS[world.held.color])
    painting.paint_gripper(canvas, x, y, z, world.grip)
    return canvas.pixels


def wrist_view(world: "ObjectSearchWorld", size: int) -> NDArray[np.uint8]:
    """What lies under the gripper in the upper half, one quarter per slot; fingers and held thing below."""
    below, visible = world.bin_below(), world.visible_bin()
    if below is None and world.over_white_bin():
        canvas = Canvas.filled(size, painting.WHITE)
        for order, thing in enumerate(sorted(world.contents("white"), key=lambda t: t.position[0])):
            canvas.box(0.13 + 0.185 * order, 0.25, 0.08, 0.14, COLORS[thing.color])
    elif below is None:
        canvas = Canvas.filled(size, painting.TABLE)
        for thing in world.contents("table"):
            offset = thing.position[:2] - world.gripper[:2]
            if np.abs(offset).max() < 0.15:
                canvas.box(0.5 + 2.0 * offset[0], 0.3 - 1.2 * offset[1], 0.14, 0.14, COLORS[thing.color])
    else:
        canvas = Canvas.filled(size, RIMS[below])
        floor = painting.DARK if visible is None else painting.INSIDE
        canvas.rect(0.03, 0.03, 0.97, 0.97, floor)
        if visible is not None:
            for thing in world.contents(visible):
                left = thing.position[0] < BINS[visible][0]
                canvas.box(0.25 if left else 0.75, 0.25, 0.215, 0.215, COLORS[thing.color])
    held = None if world.held is None else COLORS[world.held.color]
    painting.paint_wrist_fingers(canvas, world.grip, held)
    return canvas.pixels
