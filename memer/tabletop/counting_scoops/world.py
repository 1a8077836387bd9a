"""Counting scoops: given numbers of scoops of two ingredients into two bowls.

To be remembered: how many scoops fell. The bowls are deep, they look alike after any number of scoops.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memer.tabletop.counting_scoops import paint
from memer.tabletop.counting_scoops.layout import (
    BOWL_HALF,
    BOWL_ZONE_Z,
    BOWLS,
    CONTAINER_HALF,
    CONTAINERS,
    DIP_Z,
    GRASP_Z,
    INGREDIENTS,
    POUR_FRAMES,
    RESET,
    RESET_FRAMES,
    REST,
    RETREAT_FRAMES,
    SCOOPS,
)
from memer.tabletop.world import TRAVEL_Z, Measures, Thing, World

PICK_UP = "pick up the scooper"
RESET_SCOOPER = "reset scooper position"
DROP = "drop the scooper"


def scoop_text(ingredient: str, bowl: str) -> str:
    """The subtask of bringing one scoop of an ingredient into a bowl."""
    return f"place a scoop of {ingredient} in the {bowl} bowl"


class CountingScoopsWorld(World):
    """The world of counting scoops; see the module."""

    task: ClassVar[str] = "counting_scoops"
    time_limit: ClassVar[int] = 900
    home: ClassVar[tuple[float, float, float]] = (0.08, 0.46, TRAVEL_Z)

    def _build(self, rng: np.random.Generator) -> None:
        names = [str(n) for n in rng.permutation(list(INGREDIENTS))[:2]]
        #: Ingredient -> container.
        self.stock = dict(zip(names, [str(c) for c in rng.permutation(list(CONTAINERS))], strict=True))
        bowls = [str(b) for b in rng.permutation(list(BOWLS))]
        counts = rng.integers(SCOOPS[0], SCOOPS[1] + 1, size=2)
        #: (ingredient, bowl) -> number asked for, in the order of the instruction.
        self.asked = {(n, b): int(c) for n, b, c in zip(names, bowls, counts, strict=True)}
        self.done: dict[tuple[str, str], int] = {}
        self.scooper = Thing("scooper", "", np.array([*REST, GRASP_Z]), "rest", "rest")
        self.things["scooper"] = self.scooper
        self.load: str | None = None
        #: What was poured last, while the scooper has not left that bowl.
        self.poured_here: tuple[str, str] | None = None
        self.frames_since_pour = 0
        self.pour_frames = tuple(int(f) for f in rng.integers(POUR_FRAMES[0], POUR_FRAMES[1] + 1, size=16))
        self.needs_reset = False
        self.reset_frames = 0
        self.lifted = False
        self.dropped_step: int | None = None

    # Texts and measures.

    @property
    def instruction(self) -> str:
        """Names both ingredients, their numbers and bowls; never changes."""
        parts = [
            f"{count} scoop{'s' if count > 1 else ''} of {ingredient} in the {bowl} bowl"
            for (ingredient, bowl), count in self.asked.items()
        ]
        return "put " + " and ".join(parts)

    @property
    def wrong_scoops(self) -> int:
        """Sum of |done - asked| over every ingredient and bowl."""
        pairs = self.asked.keys() | self.done.keys()
        return sum(abs(self.done.get(pair, 0) - self.asked.get(pair, 0)) for pair in pairs)

    @property
    def finished(self) -> bool:
        """The scooper was put down on purpose, and not taken up again for a short time."""
        return self.dropped_step is not None and self.step_count - self.dropped_step >= RETREAT_FRAMES

    @property
    def demonstration_finished(self) -> bool:
        """The same as finished."""
        return self.finished

    @property
    def progress(self) -> float:
        """Scoops asked for, less the wrong ones."""
        return float(sum(self.asked.values()) - self.wrong_scoops)

    def measures(self) -> Measures:
        """Wrong scoops (missing ones count), scoops done and asked for."""
        return {
            "success": self.finished and self.wrong_scoops == 0,
            "wrong_scoops": self.wrong_scoops,
            "scoops": sum(self.done.values()),
            "asked_scoops": sum(self.asked.values()),
            "dropped": self.dropped_step is not None,
        }

    def expert_subtask(self) -> str:
        """Take up the scooper; scoop and reset, first ingredient first; drop it after the last scoop."""
        if self.dropped_step is not None and self.wrong_scoops == 0:
            return DROP
        if self.held is None or not self.lifted:
            return PICK_UP
        wait = self.pour_frames[sum(self.done.values()) % len(self.pour_frames)]
        waiting = self.frames_since_pour < wait and self.command != RESET_SCOOPER
        if self.poured_here is not None and self.needs_reset and waiting:
            return scoop_text(*self.poured_here)
        if self.needs_reset:
            return RESET_SCOOPER
        for pair, count in self.asked.items():
            if self.done.get(pair, 0) < count:
                return scoop_text(*pair)
        return DROP

    # Physics of scooping.

    def _over(self, places: dict[str, tuple[float, float]], half: float) -> str | None:
        for name, (x, y) in places.items():
            if abs(self.gripper[0] - x) <= half and abs(self.gripper[1] - y) <= half:
                return name
        return None

    def container_below(self) -> str | None:
        """Ingredient under the gripper, at any height."""
        place = self._over(CONTAINERS, CONTAINER_HALF)
        return next((name for name, where in self.stock.items() if where == place), None)

    def bowl_below(self) -> str | None:
        """Bowl under the gripper, at any height."""
        return self._over(BOWLS, BOWL_HALF)

    def _land(self, thing: Thing, *, slipped: bool) -> None:
        near_rest = np.abs(self.gripper[:2] - REST).max() <= 0.1
        thing.place = "rest" if near_rest else "table"
        thing.position = np.array([*(REST if near_rest else self.gripper[:2]), GRASP_Z])
        self.load = None
        self.lifted = False
        if not slipped:
            self.dropped_step = self.step_count + 1

    def may_slip(self) -> bool:
        """Not between pouring and leaving the bowl, when a retry would be another scoop."""
        return self.held is not None and self.poured_here is None

    def _after_step(self) -> None:
        z = float(self.gripper[2])
        bowl = self.bowl_below()
        if self.poured_here is not None:
            self.frames_since_pour += 1
            if bowl != self.poured_here[1] or z > BOWL_ZONE_Z or self.held is None:
                self.poured_here = None
        if self.held is None:
            return
        self.dropped_step = None
        self.lifted |= z >= TRAVEL_Z - 0.02
        ingredient = self.container_below()
        if ingredient is not None and z <= DIP_Z:
            self.load = ingredient
        elif bowl is not None and z <= DIP_Z and self.load is not None:
            pair = (self.load, bowl)
            self.done[pair] = self.done.get(pair, 0) + 1
            self.load, self.poured_here, self.frames_since_pour = None, pair, 0
            self.needs_reset = True
        at_reset = bool(np.abs(self.gripper - RESET).max() <= 0.02)
        self.reset_frames = self.reset_frames + 1 if at_reset else 0
        if self.reset_frames >= RESET_FRAMES:
            self.needs_reset = False

    def notice(self, subtask: str) -> None:
        """A reset that left the bowl and was broken off for another subtask is over."""
        if self.command == RESET_SCOOPER != subtask and self.poured_here is None:
            self.needs_reset = False
        super().notice(subtask)

    def displace(self, rng: np.random.Generator) -> bool:
        """The scooper, while it lies about, moves by a few centimetres."""
        if self.held is not None:
            return False
        self.scooper.position[:2] = np.clip(self.scooper.position[:2] + rng.uniform(-0.05, 0.05, 2), 0.1, 0.9)
        return True

    def paint(self, size: int) -> dict[str, NDArray[np.uint8]]:
        """Both cameras."""
        return {"base": paint.base_view(self, size), "wrist": paint.wrist_view(self, size)}
