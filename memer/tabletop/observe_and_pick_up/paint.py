"""The two cameras of observe and pick up."""

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from memer.tabletop import painting
from memer.tabletop.observe_and_pick_up.layout import SPOTS, STAND
from memer.tabletop.painting import COLORS, Canvas, Color, project

if TYPE_CHECKING:
    from memer.tabletop.observe_and_pick_up.world import ObserveAndPickUpWorld

WALL: Final[Color] = (112, 74, 44)
BASE: Final[Color] = (120, 122, 118)
#: Half sizes as painted.
SHOWN_HALF: Final[tuple[float, float]] = (0.095, 0.085)
STAND_HALF: Final[tuple[float, float]] = (0.15, 0.13)
WALL_HALF: Final[tuple[float, float]] = (0.18, 0.17)
BLOCK_HALF: Final[tuple[float, float]] = (0.07, 0.06)
MAT_HALF: Final[float] = 0.11


def base_view(world: "ObserveAndPickUpWorld", size: int) -> NDArray[np.uint8]:
    """The stand with the block shown, the wall as far as it came, blocks, gripper and what it holds."""
    factor = painting.oversampling(size)
    canvas = Canvas.filled(size * factor, painting.TABLE)
    u, v = project(*STAND, 0.0)
    canvas.box(u, v, *STAND_HALF, BASE)
    canvas.box(u, v, *SHOWN_HALF, COLORS[world.target.color])
    if world.wall > 0.0:
        left = -2 * WALL_HALF[0] + world.wall * (u + WALL_HALF[0])
        canvas.rect(left, v - WALL_HALF[1], left + 2 * WALL_HALF[0], v + WALL_HALF[1], WALL)
    _, v = project(*SPOTS[0], 0.0)
    canvas.box(0.5, v, 0.5, MAT_HALF, BASE)
    for thing in world.things.values():
        if thing is not world.held:
            x, y, _ = thing.position
            painting.paint_lying_block(canvas, x, y, BLOCK_HALF, COLORS[thing.color])
    held = None if world.held is None else COLORS[world.held.color]
    painting.paint_carrying_gripper(canvas, world.gripper, world.grip, half=BLOCK_HALF, held=held)
    return painting.shrink(canvas.pixels, factor)


def wrist_view(world: "ObserveAndPickUpWorld", size: int) -> NDArray[np.uint8]:
    """The blocks under the gripper above, never the one shown; fingers and held block below."""
    canvas = Canvas.filled(size, painting.TABLE)
    for thing in world.things.values():
        offset = thing.position[:2] - world.gripper[:2]
        if thing is not world.held and np.abs(offset).max() < 0.15:
            canvas.box(0.5 + 2.0 * offset[0], 0.3 - 1.2 * offset[1], 0.16, 0.16, COLORS[thing.color])
    painting.paint_wrist_fingers(canvas, world.grip, None if world.held is None else COLORS[world.held.color])
    return canvas.pixels
