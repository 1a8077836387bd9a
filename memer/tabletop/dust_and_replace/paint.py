"""The two cameras of dust and replace."""

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from memer.tabletop import painting
from memer.tabletop.dust_and_replace.layout import DUSTER_REST, SHELF_X, SHELVES, SPOTS
from memer.tabletop.painting import COLORS, Canvas, Color, project
from memer.tabletop.world import Thing

if TYPE_CHECKING:
    from memer.tabletop.dust_and_replace.world import DustAndReplaceWorld

BOARDS: Final[dict[str, Color]] = {"bottom": (140, 98, 60), "top": (176, 170, 160)}
WALL: Final[Color] = (214, 208, 196)
MAT: Final[Color] = (120, 122, 118)
HANDLE: Final[Color] = (90, 60, 40)
FEATHERS: Final[Color] = (20, 20, 24)


@lru_cache(maxsize=8)
def _background(size: int) -> NDArray[np.uint8]:
    canvas = Canvas.filled(size, painting.TABLE)
    canvas.rect(SHELF_X[0] - 0.04, 0.0, SHELF_X[1] + 0.04, 0.56, WALL)
    for name, shelf in SHELVES.items():
        v = project(0.0, shelf.y, shelf.z)[1]
        canvas.rect(SHELF_X[0], v - 0.01, SHELF_X[1], v + 0.07, BOARDS[name])
        canvas.rect(SHELF_X[0], v + 0.05, SHELF_X[1], v + 0.08, painting.SHADOW)
    for x, y in (*SPOTS, DUSTER_REST):
        u, v = project(x, y, 0.0)
        canvas.box(u, v + 0.02, 0.08, 0.06, MAT)
    canvas.pixels.setflags(write=False)
    return canvas.pixels


def _paint_thing(canvas: Canvas, thing: Thing, u: float, v: float) -> None:
    if thing.name == "duster":
        canvas.rect(u - 0.018, v - 0.07, u + 0.018, v, HANDLE)
        canvas.rect(u - 0.06, v, u + 0.06, v + 0.06, FEATHERS)
    else:
        canvas.box(u, v, 0.055, 0.05, COLORS[thing.color])


def base_view(world: "DustAndReplaceWorld", size: int) -> NDArray[np.uint8]:
    """Shelves with what stands on them, table, duster, gripper; dust is not to be seen."""
    canvas = Canvas(_background(size).copy())
    for thing in world.things.values():
        if thing is not world.held:
            _paint_thing(canvas, thing, *project(*thing.position))
    x, y, z = world.gripper
    shelf = world.shelf_below()
    painting.paint_shadow(canvas, x, y, 0.0 if shelf is None else SHELVES[shelf].z)
    u, v = project(x, y, z)
    if world.held is not None:
        _paint_thing(canvas, world.held, u, v + 0.04)
    painting.paint_gripper(canvas, x, y, z, world.grip)
    return canvas.pixels


def wrist_view(world: "DustAndReplaceWorld", size: int) -> NDArray[np.uint8]:
    """What lies under the gripper above; fingers and held thing below."""
    shelf = world.shelf_below()
    canvas = Canvas.filled(size, painting.TABLE if shelf is None else BOARDS[shelf])
    for thing in world.things.values():
        offset = thing.position[:2] - world.gripper[:2]
        if thing is not world.held and np.abs(offset).max() < 0.18:
            u, v = 0.5 + 1.6 * offset[0], 0.27 - 1.2 * offset[1]
            canvas.box(u, v, 0.2, 0.2, FEATHERS if thing.name == "duster" else COLORS[thing.color])
    held = None
    if world.held is not None:
        held = FEATHERS if world.held is world.duster else COLORS[world.held.color]
    painting.paint_wrist_fingers(canvas, world.grip, held)
    return canvas.pixels
