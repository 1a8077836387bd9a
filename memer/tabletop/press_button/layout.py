"""Furniture and timing of press button; lengths in table widths, times in frames."""

from typing import Final

from memer.tabletop.painting import COLORS, Color

#: Centres of the buttons before the panel's jitter.
BUTTONS: Final[dict[str, tuple[float, float]]] = {
    "left": (0.20, 0.34),
    "middle": (0.50, 0.34),
    "confirm": (0.80, 0.34),
}
BUTTON_COLORS: Final[dict[str, Color]] = {
    "left": COLORS["red"],
    "middle": COLORS["blue"],
    "confirm": COLORS["green"],
}
#: Greatest shift of the whole panel, per axis.
JITTER: Final[float] = 0.015
#: A press this far from a button's centre still counts.
BUTTON_HALF: Final[float] = 0.11
#: At or below this height a button is pressed ...
PRESS_Z: Final[float] = 0.16
#: ... if the gripper was at or above this one since the press before.
RELEASE_Z: Final[float] = 0.29
#: Where the controller presses.
BOTTOM_Z: Final[float] = 0.10
#: Presses per button that an instruction asks for.
PRESSES: Final[tuple[int, int]] = (1, 3)
#: Fraction of the usual speed on the way down and up.
PRESS_SPEED: Final[float] = 0.5
#: Frames from the moment a press counts until the gripper rises.
DWELL_FRAMES: Final[int] = 6
#: Frames in the raised pose before a press is over.
REST_FRAMES: Final[int] = 4
