"""Furniture and timing of swap blocks; lengths in table widths, times in frames."""

from typing import Final

#: Pads that all look alike. No two in one column, so that the arm hides none while it reaches for another.
PADS: Final[dict[str, tuple[float, float]]] = {
    "far_left": (0.17, 0.58),
    "far_right": (0.83, 0.58),
    "near_left": (0.28, 0.14),
    "near_right": (0.72, 0.14),
}
MIDDLE: Final[tuple[float, float]] = (0.50, 0.38)
#: Where a block can stand: the pads and the spot in the middle.
PLACES: Final[dict[str, tuple[float, float]]] = {**PADS, "middle": MIDDLE}
#: A block let go this far from the centre of a pad or of the middle slides into its centre.
PLACE_HALF: Final[float] = 0.10
#: Colours of the blocks, keys of `memer.tabletop.painting.COLORS`.
BLOCK_COLORS: Final[tuple[str, ...]] = ("red", "yellow", "green", "blue")
GRASP_Z: Final[float] = 0.07
TRAVEL_Z: Final[float] = 0.26
#: Where the controller lets go.
RELEASE_Z: Final[float] = 0.09
#: Frames in the raised pose before a move is over.
REST_FRAMES: Final[int] = 4
