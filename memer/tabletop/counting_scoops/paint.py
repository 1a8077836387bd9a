"""The two cameras of counting scoops."""

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from memer.tabletop import painting
from memer.tabletop.counting_scoops.layout import (
    BOWL_HALF,
    BOWLS,
    CONTAINER_HALF,
    CONTAINERS,
    INGREDIENTS,
    REST,
)
from memer.tabletop.painting import Canvas, Color, project

if TYPE_CHECKING:
    from memer.tabletop.counting_scoops.world import CountingScoopsWorld

BOWL_RIMS: Final[dict[str, Color]] = {"left": (40, 120, 140), "right": (150, 70, 110)}
BOWL_INSIDE: Final[Color] = (70, 66, 72)
MAT: Final[Color] = (120, 122, 118)
SCOOPER: Final[Color] = (60, 70, 120)
SCOOPER_EMPTY: Final[Color] = (150, 160, 200)


@lru_cache(maxsize=64)
def _background(size: int, west: str, east: str) -> NDArray[np.uint8]:
    canvas = Canvas.filled(size, painting.TABLE)
    for ingredient, (x, y) in zip((west, east), CONTAINERS.values(), strict=True):
        u, v = project(x, y, 0.0)
        canvas.framed(
            u, v, CONTAINER_HALF, 0.11, INGREDIENTS[ingredient], edge=0.025, rim=painting.STEEL_LIGHT
        )
    u, v = project(*REST, 0.0)
    canvas.box(u, v, 0.1, 0.06, MAT)
    for name, (x, y) in BOWLS.items():
        u, v = project(x, y, 0.0)
        canvas.box(u, v + 0.03, BOWL_HALF - 0.03, 0.11, painting.SHADOW)
        canvas.framed(u, v, BOWL_HALF, 0.1, BOWL_INSIDE, edge=0.03, rim=BOWL_RIMS[name])
    canvas.pixels.setflags(write=False)
    return canvas.pixels


def _by_container(world: "CountingScoopsWorld") -> tuple[str, str]:
    at = {container: ingredient for ingredient, container in world.stock.items()}
    return at["west"], at["east"]


def _paint_scooper(canvas: Canvas, u: float, v: float, load: str | None) -> None:
    canvas.rect(u - 0.02, v - 0.06, u + 0.02, v + 0.02, SCOOPER)
    color = SCOOPER_EMPTY if load is None else INGREDIENTS[load]
    canvas.framed(u, v + 0.05, 0.06, 0.04, color, edge=0.014, rim=SCOOPER)


def base_view(world: "CountingScoopsWorld", size: int) -> NDArray[np.uint8]:
    """Containers, bowls (their depth hides what is in them), scooper, gripper, grains while they fall."""
    canvas = Canvas(_background(size, *_by_container(world)).copy())
    x, y, z = world.gripper
    if world.held is None:
        u, v = project(world.scooper.position[0], world.scooper.position[1], 0.0)
        _paint_scooper(canvas, u, v, None)
    painting.paint_shadow(canvas, x, y, 0.0)
    u, v = project(x, y, z)
    if world.poured_here is not None:
        canvas.rect(u - 0.04, v + 0.02, u + 0.04, v + 0.14, INGREDIENTS[world.poured_here[0]])
    if world.held is not None:
        _paint_scooper(canvas, u, v + 0.03, world.load)
    painting.paint_gripper(canvas, x, y, z, world.grip)
    return canvas.pixels


def wrist_view(world: "CountingScoopsWorld", size: int) -> NDArray[np.uint8]:
    """What lies under the gripper above; fingers, scooper and its load below."""
    ingredient, bowl = world.container_below(), world.bowl_below()
    if ingredient is not None:
        canvas = Canvas.filled(size, painting.STEEL_LIGHT)
        canvas.rect(0.06, 0.06, 0.94, 0.94, INGREDIENTS[ingredient])
    elif bowl is not None:
        canvas = Canvas.filled(size, BOWL_RIMS[bowl])
        canvas.rect(0.1, 0.1, 0.9, 0.9, BOWL_INSIDE)
    else:
        canvas = Canvas.filled(size, painting.TABLE)
        offset = world.scooper.position[:2] - world.gripper[:2]
        if world.held is None and np.abs(offset).max() < 0.15:
            u, v = 0.5 + 2.0 * offset[0], 0.3 - 1.2 * offset[1]
            canvas.box(u, v, 0.16, 0.16, SCOOPER)
            canvas.box(u, v, 0.11, 0.11, SCOOPER_EMPTY)
    if world.poured_here is not None:
        canvas.rect(0.18, 0.02, 0.82, 0.5, INGREDIENTS[world.poured_here[0]])
    painting.paint_wrist_fingers(canvas, world.grip, SCOOPER if world.held is not None else None)
    if world.held is not None:
        color = SCOOPER_EMPTY if world.load is None else INGREDIENTS[world.load]
        canvas.rect(0.3, 0.56, 0.7, 0.84, color)
    return canvas.pixels
