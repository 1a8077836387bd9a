"""Furniture and timing of object search; lengths in table widths, times in frames."""

from typing import Final

BINS: Final[dict[str, tuple[float, float]]] = {
    "left": (0.17, 0.70),
    "center": (0.50, 0.70),
    "right": (0.83, 0.70),
}
WHITE_BIN: Final[tuple[float, float]] = (0.74, 0.22)
BIN_HALF: Final[float] = 0.13
WHITE_HALF: Final[tuple[float, float]] = (0.20, 0.14)
SLOT_OFFSETS: Final[tuple[float, float]] = (-0.06, 0.06)
SLOT_Z: Final[float] = 0.10
#: Below this height over a bin its contents show.
REVEAL_Z: Final[float] = 0.285
LOOK_Z: Final[float] = 0.25
RELEASE_Z: Final[float] = 0.31

NUM_TARGETS: Final[int] = 3
#: Colours of the blocks, keys of `memer.tabletop.painting.COLORS`; six that nobody mistakes for each other.
BLOCK_COLORS: Final[tuple[str, ...]] = ("red", "yellow", "green", "cyan", "blue", "purple")
#: Frames with visible contents before a look ends: the prediction horizon of 10 frames and as many again, so
#: that two frames of the window show them when the next subtask is due. Nearly constant, so that the end can
#: be told from the window.
DWELL_FRAMES: Final[tuple[int, int]] = (19, 21)
#: Frames that a take goes on after the release: the prediction horizon h*s at its defaults, so that the label
#: that far ahead changes exactly when the new instruction can be read.
RETREAT_FRAMES: Final[int] = 10
#: Fraction of the usual speed at which the gripper comes down for a look. It keeps two looks in a row further
#: apart than votes of one cluster may be (25 frames at the defaults of memer.contract.WindowSettings).
LOOK_DESCENT: Final[float] = 0.18
