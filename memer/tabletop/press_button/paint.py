"""The two cameras of press button; nothing in them tells a pressed button from a released one."""

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from memer.tabletop import painting
from memer.tabletop.painting import Canvas, Color, project
from memer.tabletop.press_button.layout import BUTTON_COLORS

if TYPE_CHECKING:
    from memer.tabletop.press_button.world import PressButtonWorld

PANEL: Final[Color] = (92, 96, 104)
#: Half size of a button as painted.
CAP: Final[tuple[float, float]] = (0.095, 0.07)


def base_view(world: "PressButtonWorld", size: int) -> NDArray[np.uint8]:
    """Panel, three buttons, gripper and its shadow."""
    factor = painting.oversampling(size)
    canvas = Canvas.filled(size * factor, painting.TABLE)
    u, v = project(*world.button_position("middle"), 0.0)
    canvas.box(u, v, 0.44, 0.13, PANEL)
    for name, color in BUTTON_COLORS.items():
        u, v = project(*world.button_position(name), 0.0)
        canvas.framed(u, v, *CAP, color, edge=0.015, rim=painting.DARK)
    x, y, z = world.gripper
    painting.paint_shadow(canvas, x, y, 0.0)
    painting.paint_gripper(canvas, x, y, z, world.grip)
    return painting.shrink(canvas.pixels, factor)


def wrist_view(world: "PressButtonWorld", size: int) -> NDArray[np.uint8]:
    """The button under the gripper above, fingers below."""
    below = world.button_below()
    canvas = Canvas.filled(size, painting.TABLE if below is None else PANEL)
    if below is not None:
        canvas.framed(0.5, 0.28, 0.3, 0.22, BUTTON_COLORS[below], edge=0.05, rim=painting.DARK)
    painting.paint_wrist_fingers(canvas, world.grip, None)
    return canvas.pixels
