"""Object search: three opaque bins, three targets named in turn, a white bin to put them in.

To be remembered: which bins were looked into, and what was in them. The contents of a bin show only in the
wrist view, and only while the gripper hovers low over it.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memer.tabletop.object_search import paint
from memer.tabletop.object_search.layout import (
    BIN_HALF,
    BINS,
    BLOCK_COLORS,
    DWELL_FRAMES,
    NUM_TARGETS,
    RETREAT_FRAMES,
    REVEAL_Z,
    SLOT_OFFSETS,
    SLOT_Z,
    WHITE_BIN,
    WHITE_HALF,
)
from memer.tabletop.world import Measures, Thing, World


@dataclass(slots=True)
class Visit:
    """An uninterrupted stay in the reveal zone of one bin.

    Attributes:
        bin: its name.
        target: index of the target wanted when it began.
        known: whether that target had been seen before.
        repeated: whether the bin's contents had been seen before.
        carried: whether that target was in the gripper at any time of it.
        frames: observations made so far, the first included.
    """

    bin: str
    target: int
    known: bool
    repeated: bool
    carried: bool = False
    frames: int = 1


def look_text(bin_name: str) -> str:
    """The subtask of looking into a bin."""
    return f"look inside the {bin_name} bin"


def take_text(thing: str, bin_name: str) -> str:
    """The subtask of carrying a thing from a bin to the white bin."""
    return f"take the {thing} from the {bin_name} bin and place it in the white bin"


class ObjectSearchWorld(World):
    """The world of object search; see the module."""

    task: ClassVar[str] = "object_search"
    time_limit: ClassVar[int] = 600

    def _build(self, rng: np.random.Generator) -> None:
        num_things = int(rng.integers(3, 6))
        colors = [str(c) for c in rng.permutation(list(BLOCK_COLORS))[:num_things]]
        places = [str(place) for place in rng.permutation(list(BINS))]
        places += [str(place) for place in rng.permutation(list(BINS))][: num_things - len(BINS)]
        slots = {name: [int(s) for s in rng.permutation(2)] for name in BINS}
        for color, place in zip(colors, places, strict=True):
            name = f"{color} block"
            position = self._slot_position(place, slots[place].pop())
            self.things[name] = Thing(name, color, position, place, place)
        self.targets: tuple[str, ...] = tuple(
            str(t) for t in rng.permutation(list(self.things))[:NUM_TARGETS]
        )
        self.dwells: tuple[int, ...] = tuple(
            int(d) for d in rng.integers(DWELL_FRAMES[0], DWELL_FRAMES[1] + 1, size=16)
        )
        self.current = 0
        self._sources: dict[str, str] = {}
        self.retrieved: list[str] = []
        self.optimal = [True] * NUM_TARGETS
        self.revealed: set[str] = set()
        self.seen: set[str] = set()
        self.visit: Visit | None = None
        self.num_visits = 0
        self.wrong_objects = 0
        self.released_step: int | None = None

    @staticmethod
    def _slot_position(bin_name: str, slot: int) -> NDArray[np.float64]:
        x, y = BINS[bin_name]
        return np.array([x + SLOT_OFFSETS[slot], y, SLOT_Z])

    # Texts and measures.

    @property
    def instruction(self) -> str:
        """Names the current target only; after the last one it stays."""
        return f"put the {self.targets[min(self.current, NUM_TARGETS - 1)]} in the white bin"

    @property
    def target(self) -> Thing | None:
        """The thing wanted now, None when all are retrieved."""
        return self.things[self.targets[self.current]] if self.current < NUM_TARGETS else None

    @property
    def finished(self) -> bool:
        """All targets lie in the white bin."""
        return self.current >= NUM_TARGETS

    @property
    def demonstration_finished(self) -> bool:
        """Finished and retreated."""
        return self.finished and not self._retreating

    @property
    def _retreating(self) -> bool:
        return self.released_step is not None and self.step_count - self.released_step < RETREAT_FRAMES

    def measures(self) -> Measures:
        """Targets retrieved, and of these the ones along the optimal path.

        A path is optimal when, from naming a target to its retrieval, each visit of a bin either carries the
        target off, or goes to a bin never looked into while the target has not been seen; and nothing else is
        put into the white bin.
        """
        optimal = sum(self.optimal[i] for i in range(self.current))
        return {
            "success": self.finished and optimal == NUM_TARGETS,
            "retrieved": self.current,
            "optimal_path": optimal,
            "num_targets": NUM_TARGETS,
            "visits": self.num_visits,
            "wrong_objects": self.wrong_objects,
        }

    @property
    def progress(self) -> float:
        """Targets retrieved."""
        return float(self.current)

    def expert_subtask(self) -> str:
        """Finish a look or a retreat; else take a target that was seen, or look into the leftmost new bin."""
        target = self.target
        if self._retreating or target is None:
            last = self.things[self.retrieved[-1]]
            return take_text(last.name, self._sources[last.name])
        visit = self.visit
        if (
            visit is not None
            and self.held is not target
            and visit.target == self.current
            and not visit.known
            and visit.frames <= self.dwells[self.num_visits % len(self.dwells)]
        ):
            return look_text(visit.bin)
        if target.name in self.seen:
            return take_text(target.name, target.origin)
        return look_text(next(name for name in BINS if name not in self.revealed))

    # Physics of bins.

    def bin_below(self) -> str | None:
        """The bin under the gripper, at any height."""
        for name, (x, y) in BINS.items():
            if abs(self.gripper[0] - x) <= BIN_HALF and abs(self.gripper[1] - y) <= BIN_HALF:
                return name
        return None

    def over_white_bin(self) -> bool:
        """Whether a thing let go here falls into the white bin."""
        dx, dy = abs(self.gripper[0] - WHITE_BIN[0]), abs(self.gripper[1] - WHITE_BIN[1])
        return bool(dx <= WHITE_HALF[0] and dy <= WHITE_HALF[1])

    def visible_bin(self) -> str | None:
        """The bin whose contents show in the wrist view."""
        return self.bin_below() if self.gripper[2] <= REVEAL_Z else None

    def contents(self, place: str) -> list[Thing]:
        """Things in a bin, or in the white bin ("white")."""
        return [thing for thing in self.things.values() if thing.place == place]

    def _free_slot(self, bin_name: str, near_x: float) -> int | None:
        taken = {round(float(t.position[0]), 3) for t in self.contents(bin_name)}
        free = [s for s in (0, 1) if round(float(self._slot_position(bin_name, s)[0]), 3) not in taken]
        return min(free, key=lambda s: abs(self._slot_position(bin_name, s)[0] - near_x), default=None)

    def _land(self, thing: Thing, *, slipped: bool) -> None:
        x, y = float(self.gripper[0]), float(self.gripper[1])
        bin_name = self.bin_below()
        slot = None if bin_name is None else self._free_slot(bin_name, x)
        if self.over_white_bin():
            order = len(self.contents("white"))
            thing.place = "white"
            thing.position = np.array([WHITE_BIN[0] - 0.14 + 0.07 * order, WHITE_BIN[1], SLOT_Z])
            self._place_in_white(thing)
        elif bin_name is not None and slot is not None:
            thing.place = bin_name
            thing.position = self._slot_position(bin_name, slot)
        else:
            # A full bin lets nothing in: the thing rolls off to the table in front of it.
            thing.place = "table"
            thing.position = np.array([x, y if bin_name is None else 0.5, SLOT_Z])

    def _place_in_white(self, thing: Thing) -> None:
        self._sources[thing.name] = thing.origin
        if self.current >= NUM_TARGETS:
            return
        if thing is not self.target:
            self.wrong_objects += 1
            self.optimal[self.current] = False
            if thing.name in self.targets:
                self.optimal[self.targets.index(thing.name)] = False
            return
        self.released_step = self.step_count + 1
        while self.target is not None and self.target.place == "white":
            self.retrieved.append(self.target.name)
            self.current += 1

    def _after_step(self) -> None:
        here = self.visible_bin()
        visit = self.visit
        if visit is not None and here != visit.bin:
            if visit.known and not visit.carried:
                self.optimal[visit.target] = False
            visit = self.visit = None
        if here is None:
            return
        if visit is not None:
            visit.frames += 1
            visit.carried |= self.held is not None and self.held.name == self.targets[visit.target]
        elif self.current < NUM_TARGETS:
            known = self.targets[self.current] in self.seen
            visit = self.visit = Visit(here, self.current, known, here in self.revealed)
            self.num_visits += 1
            if visit.repeated and not known:
                self.optimal[visit.target] = False
        self.revealed.add(here)
        self.seen.update(thing.name for thing in self.contents(here))

    def displace(self, rng: np.random.Generator) -> bool:
        """While the gripper is low over a bin, what lies there changes its slot (or swaps)."""
        here = self.visible_bin()
        inside = [] if here is None else self.contents(here)
        if here is None or not inside or self.grip > 0.0:
            return False
        x = BINS[here][0]
        for thing in inside:
            thing.position[0] = 2 * x - thing.position[0]
        return True

    def paint(self, size: int) -> dict[str, NDArray[np.uint8]]:
        """Both cameras."""
        return {"base": paint.base_view(self, size), "wrist": paint.wrist_view(self, size)}
