"""Furniture and timing of dust and replace; lengths in table widths, times in frames."""

from dataclasses import dataclass
from typing import Final

from memer.tabletop.world import TRAVEL_Z


@dataclass(frozen=True, slots=True)
class Shelf:
    """A board: its line y, its height z, where things stand on it."""

    y: float
    z: float


#: The upper board stands further back, so that both can be reached from above.
SHELVES: Final[dict[str, Shelf]] = {"bottom": Shelf(0.58, 0.10), "top": Shelf(0.85, 0.20)}
SHELF_X: Final[tuple[float, float]] = (0.22, 0.94)
SHELF_HALF_Y: Final[float] = 0.10
#: Height above a board up to which the gripper counts as being at it.
SHELF_ZONE: Final[float] = 0.14
#: Cells that have to be swept in one go, centres.
CELLS: Final[tuple[float, ...]] = (0.30, 0.40, 0.50, 0.60, 0.70, 0.80, 0.88)
CELL_HALF: Final[float] = 0.05
SWEEP_Z: Final[float] = 0.03
SWEEP_TOLERANCE: Final[float] = 0.03
SWEEP_SPEED: Final[float] = 0.6
#: Fraction of the usual speed at which the duster is fetched. It keeps the keyframe of taking it up further
#: from the one before than votes of one cluster may be (25 frames at the defaults of the window settings).
FETCH_SPEED: Final[float] = 0.6
#: Where a thing put on a board goes: the first free of these.
STANDS: Final[tuple[float, ...]] = (0.58, 0.40, 0.76)
THING_Z: Final[float] = 0.06
#: Two places on the table for things taken off; which thing gets which is drawn per episode.
SPOTS: Final[tuple[tuple[float, float], ...]] = ((0.34, 0.22), (0.56, 0.22))
DUSTER_REST: Final[tuple[float, float]] = (0.82, 0.22)
RESET: Final[tuple[float, float, float]] = (0.10, 0.55, TRAVEL_Z)
#: Frames that a subtask goes on after its release or last sweep: the prediction horizon at its defaults.
RETREAT_FRAMES: Final[int] = 10
RESET_FRAMES: Final[int] = 5
