"""Furniture and timing of observe and pick up; lengths in table widths, times in frames."""

from typing import Final

#: Where the block that is shown stands, behind the wall later on.
STAND: Final[tuple[float, float]] = (0.20, 0.78)
#: Places of the blocks to choose from.
SPOTS: Final[tuple[tuple[float, float], ...]] = ((0.14, 0.22), (0.38, 0.22), (0.62, 0.22), (0.86, 0.22))
#: Greatest distance of a block from its place at the start, per axis.
JITTER: Final[float] = 0.01
#: Colours of the blocks, keys of `memer.tabletop.painting.COLORS`; one block of each.
BLOCK_COLORS: Final[tuple[str, ...]] = ("red", "yellow", "green", "blue")
GRASP_Z: Final[float] = 0.07
TRAVEL_Z: Final[float] = 0.28
#: At or above this height a block counts as picked up.
LIFTED_Z: Final[float] = 0.22
#: Frames until the wall begins to move, and until it stands in front of the block.
WALL_STARTS: Final[tuple[int, int]] = (12, 18)
WALL_FRAMES: Final[int] = 6
#: Frames that the demonstrator goes on waiting then: no less than the prediction horizon, so that a planner
#: that names the subtask of ten frames ahead does not set off before the wall stands.
WAIT_AFTER_WALL: Final[int] = 12
#: A gripper further than this from where it started, before the wall stands, has not waited.
STILL: Final[float] = 0.10
#: Frames with the lifted block until the demonstration is over.
HOLD_FRAMES: Final[int] = 8
