"""Observe and pick up: a block is shown on a stand, a wall hides it, and the one like it is to be picked up.

To be remembered: the colour shown. Once the wall stands nothing in the picture tells it.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memer.tabletop.observe_and_pick_up import paint
from memer.tabletop.observe_and_pick_up.layout import (
    BLOCK_COLORS,
    GRASP_Z,
    HOLD_FRAMES,
    JITTER,
    LIFTED_Z,
    SPOTS,
    STILL,
    TRAVEL_Z,
    WAIT_AFTER_WALL,
    WALL_FRAMES,
    WALL_STARTS,
)
from memer.tabletop.world import Measures, Thing, World

WAIT = "wait for the wall to appear"
PICK_UP = "pick up the block that was shown"


class ObserveAndPickUpWorld(World):
    """The world of observe and pick up; see the module.

    To move away before the wall stands, or to lift another block, ends the episode as a failure.
    """

    task: ClassVar[str] = "observe_and_pick_up"
    time_limit: ClassVar[int] = 170
    travel_z: ClassVar[float] = TRAVEL_Z
    grasp_reach: ClassVar[tuple[float, float]] = (0.07, 0.08)
    lets_go_below: ClassVar[float] = 0.5
    home: ClassVar[tuple[float, float, float]] = (0.60, 0.46, TRAVEL_Z)

    def _build(self, rng: np.random.Generator) -> None:
        for color, spot in zip(rng.permutation(BLOCK_COLORS), SPOTS, strict=True):
            name = f"{color} block"
            position = np.array([*(np.asarray(spot) + rng.uniform(-JITTER, JITTER, 2)), GRASP_Z])
            self.things[name] = Thing(name, str(color), position, "mat", "mat")
        #: The block like the one shown.
        self.target = self.things[f"{rng.choice(BLOCK_COLORS)} block"]
        self.wall_start = int(rng.integers(WALL_STARTS[0], WALL_STARTS[1] + 1))
        self.moved_early = False
        self.picked: str | None = None
        self.hold_frames = 0

    # Texts and measures.

    @property
    def instruction(self) -> str:
        """Never changes, and names no colour."""
        return "look at the block on the stand, wait for the wall to appear, then pick up the same block"

    @property
    def wall(self) -> float:
        """How far the wall has come, 0..1; at 1 it hides the block shown."""
        return float(np.clip((self.step_count - self.wall_start) / WALL_FRAMES, 0.0, 1.0))

    @property
    def finished(self) -> bool:
        """A block was lifted, or the gripper did not wait."""
        return self.moved_early or self.picked is not None

    @property
    def demonstration_finished(self) -> bool:
        """The lifted block was held for a moment."""
        return self.hold_frames >= HOLD_FRAMES

    @property
    def progress(self) -> float:
        """1 for the right block lifted."""
        return float(self.measures()["success"])

    def measures(self) -> Measures:
        """Success: waited, then lifted the block shown and no other one."""
        return {
            "success": self.picked == self.target.name and not self.moved_early,
            "moved_early": self.moved_early,
            "wrong_block": self.picked is not None and self.picked != self.target.name,
        }

    @property
    def segment_id(self) -> int:
        """0 while waiting, then 1."""
        return int(self.step_count >= self.wall_start + WALL_FRAMES + WAIT_AFTER_WALL)

    def expert_subtask(self) -> str:
        """Wait, then pick up."""
        return PICK_UP if self.segment_id else WAIT

    # Physics of wall and blocks.

    def _land(self, thing: Thing, *, slipped: bool) -> None:
        thing.place = "table"
        thing.position = np.array([*self.gripper[:2], GRASP_Z])

    def _after_step(self) -> None:
        if self.wall < 1.0 and not self.finished:
            distance = float(np.abs(self.gripper - np.asarray(self.home)).max())
            self.moved_early = distance > STILL
        lifted = self.held is not None and self.gripper[2] >= LIFTED_Z
        if lifted and not self.finished:
            assert self.held is not None
            self.picked = self.held.name
        self.hold_frames += lifted

    def displace(self, rng: np.random.Generator) -> bool:
        """A block that lies about is pushed by a few centimetres."""
        lying = [thing for thing in self.things.values() if thing is not self.held]
        thing = lying[int(rng.integers(len(lying)))]
        thing.position[:2] = np.clip(thing.position[:2] + rng.uniform(-0.03, 0.03, 2), 0.05, 0.95)
        return True

    def paint(self, size: int) -> dict[str, NDArray[np.uint8]]:
        """Both cameras."""
        return {"base": paint.base_view(self, size), "wrist": paint.wrist_view(self, size)}
