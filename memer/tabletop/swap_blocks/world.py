"""Swap blocks: two blocks on two of four equal pads are to change places, by way of a spot in the middle.

To be remembered: where the blocks stood. Once a block is gone its pad looks like every other one.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memer.tabletop.swap_blocks import paint
from memer.tabletop.swap_blocks.layout import (
    BLOCK_COLORS,
    GRASP_Z,
    PADS,
    PLACE_HALF,
    PLACES,
    REST_FRAMES,
    TRAVEL_Z,
)
from memer.tabletop.world import Measures, Thing, World


def to_middle_text(block: str) -> str:
    """The subtask of moving a block out of the way."""
    return f"move the {block} to the middle"


def to_place_of_text(block: str, other: str) -> str:
    """The subtask of moving a block to where the other one stood at first."""
    return f"move the {block} to where the {other} was"


class SwapBlocksWorld(World):
    """The world of swap blocks; see the module.

    A block let go over a pad or over the middle slides to its centre; where another block stands already it
    comes to rest beside it, on the table. To set a block down on a pad that is neither its first one nor its
    goal ends the episode as a failure; a block that slips does not.
    """

    task: ClassVar[str] = "swap_blocks"
    time_limit: ClassVar[int] = 300
    travel_z: ClassVar[float] = TRAVEL_Z
    grasp_reach: ClassVar[tuple[float, float]] = (0.07, 0.08)
    lets_go_below: ClassVar[float] = 0.5
    home: ClassVar[tuple[float, float, float]] = (0.50, 0.38, TRAVEL_Z)

    def _build(self, rng: np.random.Generator) -> None:
        colors = [str(c) for c in rng.permutation(BLOCK_COLORS)[:2]]
        pads = [str(p) for p in rng.permutation(list(PADS))[:2]]
        for color, pad in zip(colors, pads, strict=True):
            name = f"{color} block"
            self.things[name] = Thing(name, color, np.array([*PADS[pad], GRASP_Z]), pad, pad)
        #: The block moved first and last, and the other one.
        self.blocks = (f"{colors[0]} block", f"{colors[1]} block")
        #: Block -> pad where it stood at first.
        self.start = dict(zip(self.blocks, pads, strict=True))
        #: Block -> pad where it belongs.
        self.goal = dict(zip(self.blocks, reversed(pads), strict=True))
        self.wrong_pads = 0
        self.stage = 0
        self.rest_frames = 0

    # Texts and measures.

    @property
    def instruction(self) -> str:
        """Names both blocks; never changes."""
        return f"swap the {self.blocks[0]} and the {self.blocks[1]}"

    @property
    def placed(self) -> int:
        """Blocks that stand where they belong."""
        return sum(self.things[block].place == pad for block, pad in self.goal.items())

    @property
    def finished(self) -> bool:
        """Both blocks stand where they belong, or one was set down on a wrong pad."""
        return self.placed == len(self.goal) or self.wrong_pads > 0

    @property
    def demonstration_finished(self) -> bool:
        """All moves are over."""
        return self.stage >= len(self.script)

    @property
    def progress(self) -> float:
        """Blocks that stand where they belong."""
        return float(self.placed)

    def measures(self) -> Measures:
        """Success: both blocks on each other's pad."""
        return {
            "success": self.placed == len(self.goal) and self.wrong_pads == 0,
            "placed": self.placed,
            "wrong_pads": self.wrong_pads,
            "moves": self.stage,
        }

    @property
    def script(self) -> tuple[tuple[str, str, str], ...]:
        """(text, block, place) of the moves in order."""
        first, second = self.blocks
        return (
            (to_middle_text(first), first, "middle"),
            (to_place_of_text(second, first), second, self.goal[second]),
            (to_place_of_text(first, second), first, self.goal[first]),
        )

    @property
    def segment_id(self) -> int:
        """Moves that are over: the block stands, and the gripper was raised for a moment, or moved on."""
        return min(self.stage, len(self.script) - 1)

    def expert_subtask(self) -> str:
        """The move in hand, or the next one."""
        return self.script[self.segment_id][0]

    # Physics of blocks and pads.

    def place_below(self) -> str | None:
        """The pad or the middle under the gripper, at any height."""
        for name, (x, y) in PLACES.items():
            if abs(self.gripper[0] - x) <= PLACE_HALF and abs(self.gripper[1] - y) <= PLACE_HALF:
                return name
        return None

    def occupant(self, place: str) -> Thing | None:
        """The block that stands on a pad or in the middle."""
        return next((thing for thing in self.things.values() if thing.place == place), None)

    def _land(self, thing: Thing, *, slipped: bool) -> None:
        place = self.place_below()
        x, y = (float(c) for c in self.gripper[:2])
        if place is not None and self.occupant(place) is None:
            thing.place = place
            thing.position = np.array([*PLACES[place], GRASP_Z])
            known = (self.start[thing.name], self.goal[thing.name], "middle")
            if not slipped and place not in known:
                self.wrong_pads += 1
            return
        if place is not None:
            # Beside the block that stands there, towards the middle of the table.
            x = PLACES[place][0] + (0.16 if PLACES[place][0] < 0.5 else -0.16)
        thing.place = "table"
        thing.position = np.array([np.clip(x, 0.05, 0.95), np.clip(y, 0.05, 0.95), GRASP_Z])

    def _after_step(self) -> None:
        if self.stage >= len(self.script):
            return
        _, block, place = self.script[self.stage]
        if self.things[block].place != place:
            self.rest_frames = 0
            return
        moved_on = self.held is not None or self.place_below() != place
        self.rest_frames += self.held is None and self.gripper[2] >= self.travel_z - 0.02
        if moved_on or self.rest_frames >= REST_FRAMES:
            self.stage += 1
            self.rest_frames = 0

    def displace(self, rng: np.random.Generator) -> bool:
        """A block that stands about is pushed by a few centimetres; on a pad it stays on the pad."""
        standing = [thing for thing in self.things.values() if thing is not self.held]
        thing = standing[int(rng.integers(len(standing)))]
        centre = thing.position[:2] if thing.place == "table" else np.asarray(PLACES[thing.place])
        thing.position[:2] = np.clip(centre + rng.uniform(-0.03, 0.03, 2), 0.05, 0.95)
        return True

    def paint(self, size: int) -> dict[str, NDArray[np.uint8]]:
        """Both cameras."""
        return {"base": paint.base_view(self, size), "wrist": paint.wrist_view(self, size)}
