"""Dust and replace: clear two shelves, dust them, put the things back where they were.

To be remembered: which thing stood on which shelf, and which shelf was dusted (dust cannot be seen).
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memer.tabletop.dust_and_replace import paint
from memer.tabletop.dust_and_replace.layout import (
    CELL_HALF,
    CELLS,
    DUSTER_REST,
    RESET,
    RESET_FRAMES,
    RETREAT_FRAMES,
    SHELF_HALF_Y,
    SHELF_X,
    SHELF_ZONE,
    SHELVES,
    SPOTS,
    STANDS,
    SWEEP_TOLERANCE,
    SWEEP_Z,
    THING_Z,
)
from memer.tabletop.painting import COLORS
from memer.tabletop.world import TRAVEL_Z, Measures, Thing, World

PICK_UP = "pick up duster"
RESET_DUSTER = "reset duster"
PUT_DOWN = "put down duster"


def take_text(thing: str, shelf: str) -> str:
    """The subtask of clearing a thing off its shelf."""
    return f"take the {thing} off {shelf} shelf"


def dust_text(shelf: str) -> str:
    """The subtask of dusting a shelf."""
    return f"dust {shelf} shelf"


def place_text(thing: str, shelf: str) -> str:
    """The subtask of putting a thing on a shelf."""
    return f"place the {thing} on the {shelf} shelf"


class DustAndReplaceWorld(World):
    """The world of dust and replace; see the module."""

    task: ClassVar[str] = "dust_and_replace"
    time_limit: ClassVar[int] = 1000
    home: ClassVar[tuple[float, float, float]] = (0.10, 0.25, TRAVEL_Z)

    def _build(self, rng: np.random.Generator) -> None:
        colors = [str(c) for c in rng.permutation(list(COLORS))[:2]]
        spots = [int(s) for s in rng.permutation(len(SPOTS))]
        #: Shelf -> thing that stood on it at the start.
        self.owners: dict[str, Thing] = {}
        #: Thing -> its place on the table.
        self.spots: dict[str, tuple[float, float]] = {}
        for shelf, color, spot in zip(SHELVES, colors, spots, strict=True):
            name = f"{color} block"
            x = float(rng.choice(STANDS))
            thing = Thing(name, color, self._on_shelf(shelf, x), shelf, shelf)
            self.things[name] = self.owners[shelf] = thing
            self.spots[name] = SPOTS[spot]
        self.duster = Thing("duster", "", np.array([*DUSTER_REST, THING_Z]), "rest", "rest")
        self.things["duster"] = self.duster
        self.removed: set[str] = set()
        self.dusted: set[str] = set()
        #: Shelf at which the duster is, and the cells swept since it came there.
        self.swept_shelf: str | None = None
        self.swept: set[int] = set()
        self.frames_since_swept = 0
        self.needs_reset = False
        self.reset_frames = 0
        self.lifted = False
        self.released_step: int | None = None
        self.released_text = ""

    @staticmethod
    def _on_shelf(shelf: str, x: float) -> NDArray[np.float64]:
        return np.array([x, SHELVES[shelf].y, SHELVES[shelf].z + THING_Z])

    # Texts and measures.

    @property
    def instruction(self) -> str:
        """Never changes, and names no thing."""
        return "take everything off the shelves, dust both shelves and put each thing back where it was"

    def is_replaced(self, shelf: str) -> bool:
        """Whether the shelf's thing was taken off and stands there again."""
        owner = self.owners[shelf]
        return owner.name in self.removed and owner.place == shelf

    @property
    def progress(self) -> float:
        """Shelves dusted, things replaced after both were dusted."""
        replaced = sum(self.is_replaced(shelf) for shelf in SHELVES)
        return float(len(self.dusted) + (replaced if len(self.dusted) == len(SHELVES) else 0))

    @property
    def _complete(self) -> bool:
        return self.progress == 2 * len(SHELVES) and self.held is None

    @property
    def _retreating(self) -> bool:
        return self.released_step is not None and self.step_count - self.released_step < RETREAT_FRAMES

    @property
    def finished(self) -> bool:
        """Everything is done and the gripper has retreated."""
        return self._complete and not self._retreating

    @property
    def demonstration_finished(self) -> bool:
        """The same as finished."""
        return self.finished

    def measures(self) -> Measures:
        """Dusted and replaced, per shelf."""
        flags: Measures = {"success": self._complete}
        for shelf in SHELVES:
            flags[f"dusted_{shelf}"] = shelf in self.dusted
            flags[f"replaced_{shelf}"] = self.is_replaced(shelf)
        return flags

    def expert_subtask(self) -> str:
        """Clear bottom and top, dust bottom and top with a reset after each, put back bottom and top."""
        if self._retreating:
            return self.released_text
        if len(self.dusted) < len(SHELVES):
            for owner in self.owners.values():
                if owner.place in SHELVES or owner is self.held:
                    return take_text(owner.name, owner.origin)
            if self.held is not self.duster:
                return PICK_UP
        if self.held is self.duster:
            return self._expert_dusting()
        for shelf, owner in self.owners.items():
            if owner.place != shelf:
                return place_text(owner.name, shelf)
        return self.released_text

    def _expert_dusting(self) -> str:
        if not self.lifted:
            return PICK_UP
        swept = self.swept_shelf in self.dusted and len(self.swept) == len(CELLS)
        waiting = self.frames_since_swept < RETREAT_FRAMES and self.command != RESET_DUSTER
        if swept and self.needs_reset and waiting:
            return dust_text(str(self.swept_shelf))
        if self.needs_reset:
            return RESET_DUSTER
        for shelf in SHELVES:
            if shelf not in self.dusted:
                return dust_text(shelf)
        return PUT_DOWN

    # Physics of shelves.

    def shelf_below(self) -> str | None:
        """The shelf under the gripper, at any height."""
        x, y = float(self.gripper[0]), float(self.gripper[1])
        if not SHELF_X[0] <= x <= SHELF_X[1]:
            return None
        return next((name for name, s in SHELVES.items() if abs(y - s.y) <= SHELF_HALF_Y), None)

    def shelf_here(self) -> str | None:
        """The shelf that the gripper is at."""
        name = self.shelf_below()
        return name if name is not None and self.gripper[2] <= SHELVES[name].z + SHELF_ZONE else None

    def free_stand(self, shelf: str) -> float:
        """Where a thing put on this shelf goes."""
        taken = [t.position[0] for t in self.things.values() if t.place == shelf]
        return next((x for x in STANDS if all(abs(x - other) > 0.1 for other in taken)), STANDS[0])

    def _land(self, thing: Thing, *, slipped: bool) -> None:
        shelf = self.shelf_below()
        x, y = float(self.gripper[0]), float(self.gripper[1])
        origin = thing.origin  # the shelf it comes from; the caller updates it afterwards
        if shelf is not None:
            thing.place, thing.position = shelf, self._on_shelf(shelf, x)
        else:
            at_rest = thing is self.duster and max(abs(x - DUSTER_REST[0]), abs(y - DUSTER_REST[1])) < 0.06
            thing.place = "rest" if at_rest else "table"
            thing.position = np.array([x, min(y, 0.4), THING_Z])
        if thing is self.duster:
            self.lifted = False
            text = PUT_DOWN
        else:
            if self.owners.get(thing.place) is not thing:
                self.removed.add(thing.name)
            text = take_text(thing.name, origin) if shelf is None else place_text(thing.name, shelf)
        if not slipped:
            self.released_step, self.released_text = self.step_count + 1, text

    def may_slip(self) -> bool:
        """Not over a shelf where the thing does not belong: a slip never changes what is to be remembered."""
        shelf = self.shelf_below()
        return self.held is not None and (
            shelf is None or self.held is self.duster or self.owners[shelf] is self.held
        )

    def _after_step(self) -> None:
        z = float(self.gripper[2])
        if self.held is not self.duster:
            self.swept_shelf = None
            self.swept.clear()
            return
        self.lifted |= z >= TRAVEL_Z - 0.02
        here = self.shelf_here()
        if here is None or here != self.swept_shelf:
            self.swept_shelf, self.swept = here, set()
        if here is not None:
            self._sweep(here)
        at_reset = bool(np.abs(self.gripper - RESET).max() <= 0.02)
        self.reset_frames = self.reset_frames + 1 if at_reset else 0
        if self.reset_frames >= RESET_FRAMES:
            self.needs_reset = False

    def notice(self, subtask: str) -> None:
        """A reset that left the shelf and was broken off for another subtask is over."""
        if self.command == RESET_DUSTER != subtask and self.swept_shelf is None:
            self.needs_reset = False
        super().notice(subtask)

    def _sweep(self, shelf: str) -> None:
        complete = len(self.swept) == len(CELLS)
        x = float(self.gripper[0])
        if self.gripper[2] > SHELVES[shelf].z + SWEEP_Z + SWEEP_TOLERANCE:
            return
        self.swept.update(i for i, center in enumerate(CELLS) if abs(x - center) <= CELL_HALF)
        if complete:
            self.frames_since_swept += 1
            return
        clear = all(thing.place != shelf for thing in self.things.values())
        if len(self.swept) == len(CELLS) and clear:
            self.frames_since_swept = 0
            self.dusted.add(shelf)
            self.needs_reset = True

    def displace(self, rng: np.random.Generator) -> bool:
        """A thing on the table moves by a few centimetres."""
        loose = [t for t in self.things.values() if t.place in ("table", "rest")]
        if not loose:
            return False
        thing = loose[int(rng.integers(len(loose)))]
        thing.position[:2] = np.clip(
            thing.position[:2] + rng.uniform(-0.05, 0.05, 2), (0.25, 0.12), (0.92, 0.32)
        )
        return True

    def paint(self, size: int) -> dict[str, NDArray[np.uint8]]:
        """Both cameras."""
        return {"base": paint.base_view(self, size), "wrist": paint.wrist_view(self, size)}
