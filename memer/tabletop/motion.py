"""Motions that expert and controller share: rise, travel, descend, close, open.

Each function looks at the gripper only and returns one action, so a motion can be taken over at any step.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memer.tabletop.world import CLOSED, MAX_STEP, World

Action = NDArray[np.float32]

#: Up to this lateral distance a gripper that is down moves directly, without rising first.
SLIDE = 0.13
REACHED = 0.006


def hold(world: World) -> Action:
    """Stand still and keep the grip."""
    return _action((0.0, 0.0, 0.0), closed=world.held is not None or world.grip > 0.5)


def reached(world: World, target: Sequence[float]) -> bool:
    """Whether the gripper is at `target` (x, y, z)."""
    return bool(np.abs(world.gripper - np.asarray(target)).max() <= REACHED)


def straight(world: World, target: Sequence[float], *, speed: float, closed: bool) -> Action:
    """One step along the straight line to `target`."""
    delta = (np.asarray(target, dtype=np.float64) - world.gripper) / MAX_STEP
    longest = float(np.abs(delta).max())
    if longest > speed:
        delta *= speed / longest
    return _action(delta, closed=closed)


def travel(
    world: World, target: Sequence[float], *, speed: float, closed: bool, slide: float = SLIDE
) -> Action:
    """One step to `target`: rise to travel height, move across, come down; short ways are slid directly."""
    x, y = target[0], target[1]
    lateral = max(abs(x - world.gripper[0]), abs(y - world.gripper[1]))
    below_travel = world.gripper[2] < world.travel_z - REACHED
    if lateral <= REACHED or (lateral <= slide and below_travel):
        return straight(world, target, speed=speed, closed=closed)
    if below_travel:
        return straight(world, (*world.gripper[:2], world.travel_z), speed=speed, closed=closed)
    return straight(world, (x, y, world.travel_z), speed=speed, closed=closed)


def grasp(world: World, target: Sequence[float], *, speed: float) -> Action:
    """One step towards holding what lies at `target`: travel there open, close; after a miss open again."""
    if reached(world, target):
        return _action((0.0, 0.0, 0.0), closed=world.grip < CLOSED)
    return travel(world, target, speed=speed, closed=False)


def release(world: World, target: Sequence[float], *, speed: float) -> Action:
    """One step towards letting go at `target`: travel there closed, then open."""
    if reached(world, target):
        return _action((0.0, 0.0, 0.0), closed=False)
    return travel(world, target, speed=speed, closed=True)


def go_home(world: World, *, speed: float) -> Action:
    """Rise and go to the resting place, then stay; the grip keeps what it holds."""
    return travel(world, world.home, speed=speed, closed=world.held is not None)


def _action(delta: Sequence[float] | NDArray[np.float64], *, closed: bool) -> Action:
    return np.array([*delta, 1.0 if closed else -1.0], dtype=np.float32)
