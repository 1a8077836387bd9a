"""Furniture and timing of counting scoops; lengths in table widths, times in frames."""

from typing import Final

from memer.tabletop.painting import Color
from memer.tabletop.world import TRAVEL_Z

#: Where the two ingredients stand.
CONTAINERS: Final[dict[str, tuple[float, float]]] = {"west": (0.22, 0.74), "east": (0.78, 0.74)}
BOWLS: Final[dict[str, tuple[float, float]]] = {"left": (0.26, 0.18), "right": (0.74, 0.18)}
CONTAINER_HALF: Final[float] = 0.13
BOWL_HALF: Final[float] = 0.14
REST: Final[tuple[float, float]] = (0.50, 0.80)
RESET: Final[tuple[float, float, float]] = (0.50, 0.46, TRAVEL_Z)
GRASP_Z: Final[float] = 0.10
#: At or below this height over a container the scooper fills, over a bowl it empties.
DIP_Z: Final[float] = 0.16
#: Where the controller dips.
SCOOP_Z: Final[float] = 0.12
#: Above this height over a bowl the pouring is over.
BOWL_ZONE_Z: Final[float] = 0.26

INGREDIENTS: Final[dict[str, Color]] = {
    "beans": (120, 30, 30),
    "rice": (250, 248, 235),
    "peas": (60, 170, 60),
    "corn": (250, 215, 50),
    "lentils": (235, 120, 40),
    "berries": (70, 60, 200),
}
SCOOPS: Final[tuple[int, int]] = (1, 3)
#: Frames that the scooper stays over the bowl after pouring; longer than the prediction horizon.
POUR_FRAMES: Final[tuple[int, int]] = (12, 18)
#: Frames in the reset position before it counts as reset.
RESET_FRAMES: Final[int] = 5
#: Frames after letting the scooper go until the episode is over.
RETREAT_FRAMES: Final[int] = 10
