"""The two cameras of swap blocks."""

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from memer.tabletop import painting
from memer.tabletop.painting import COLORS, Canvas, Color, project
from memer.tabletop.swap_blocks.layout import MIDDLE, PADS, PLACES

if TYPE_CHECKING:
    from memer.tabletop.swap_blocks.world import SwapBlocksWorld

PAD: Final[Color] = (120, 122, 118)
SPOT: Final[Color] = (226, 228, 232)
#: Half sizes of a pad and of a block as painted.
PAD_HALF: Final[tuple[float, float]] = (0.115, 0.09)
BLOCK_HALF: Final[tuple[float, float]] = (0.07, 0.06)


@lru_cache(maxsize=8)
def _background(size: int) -> NDArray[np.uint8]:
    canvas = Canvas.filled(size, painting.TABLE)
    for place in PADS.values():
        u, v = project(*place, 0.0)
        canvas.framed(u, v, *PAD_HALF, PAD, edge=0.02, rim=painting.SHADOW)
    u, v = project(*MIDDLE, 0.0)
    canvas.box(u, v, *PAD_HALF, SPOT)
    canvas.pixels.setflags(write=False)
    return canvas.pixels


def base_view(world: "SwapBlocksWorld", size: int) -> NDArray[np.uint8]:
    """Pads, spot, blocks, gripper and what it holds."""
    factor = painting.oversampling(size)
    canvas = Canvas(_background(size * factor).copy())
    for thing in world.things.values():
        if thing is not world.held:
            x, y, _ = thing.position
            painting.paint_lying_block(canvas, x, y, BLOCK_HALF, COLORS[thing.color])
    held = None if world.held is None else COLORS[world.held.color]
    painting.paint_carrying_gripper(canvas, world.gripper, world.grip, half=BLOCK_HALF, held=held)
    return painting.shrink(canvas.pixels, factor)


def wrist_view(world: "SwapBlocksWorld", size: int) -> NDArray[np.uint8]:
    """What lies under the gripper above; fingers and held block below."""
    below = world.place_below()
    canvas = Canvas.filled(size, painting.TABLE)
    if below is not None:
        offset = np.asarray(PLACES[below]) - world.gripper[:2]
        canvas.box(0.5 + 2.0 * offset[0], 0.3 - 1.2 * offset[1], 0.3, 0.25, PAD if below in PADS else SPOT)
    for thing in world.things.values():
        offset = thing.position[:2] - world.gripper[:2]
        if thing is not world.held and np.abs(offset).max() < 0.15:
            canvas.box(0.5 + 2.0 * offset[0], 0.3 - 1.2 * offset[1], 0.16, 0.16, COLORS[thing.color])
    painting.paint_wrist_fingers(canvas, world.grip, None if world.held is None else COLORS[world.held.color])
    return canvas.pixels
