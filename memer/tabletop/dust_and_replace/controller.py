"""The controller of dust and replace."""

import re
from typing import ClassVar, Final

from memer.tabletop import motion
from memer.tabletop.controller import SubtaskController
from memer.tabletop.dust_and_replace.layout import (
    CELLS,
    DUSTER_REST,
    FETCH_SPEED,
    RESET,
    SHELVES,
    SWEEP_SPEED,
    SWEEP_Z,
    THING_Z,
)
from memer.tabletop.dust_and_replace.world import PICK_UP, PUT_DOWN, RESET_DUSTER, DustAndReplaceWorld
from memer.tabletop.motion import Action
from memer.tabletop.world import TRAVEL_Z, Thing, World

_TAKE: Final = re.compile(r"take the (.+) off (\w+) shelf", re.IGNORECASE)
_DUST: Final = re.compile(r"dust (\w+) shelf", re.IGNORECASE)
_PLACE: Final = re.compile(r"place the (.+) on the (\w+) shelf", re.IGNORECASE)


class DustAndReplaceController(SubtaskController):
    """Takes things off shelves, dusts, puts things on shelves.

    Rules where a text does not fit the world:
        * a text that needs another thing in hand: first puts down what is held (the duster at its rest, a
          block at its place on the table);
        * take X off a shelf that does not hold it: hovers over that shelf if X stands on the other one
          (`missing`), goes home if X is on the table (`done`);
        * dust or reset without the duster in hand: takes it up first;
        * put down a duster that slipped: takes it up and puts it down at its rest;
        * dust of a shelf swept just now, duster still at it: stays there (`done`);
        * place X that stands on another shelf: moves it;
        * things and shelves that do not exist and other texts: holds still (`unknown`).
    """

    task: ClassVar[str] = "dust_and_replace"

    def _obey(self, world: World, text: str) -> Action | None:
        assert isinstance(world, DustAndReplaceWorld)
        lower = text.lower()
        self.status = "moving"
        if lower == PICK_UP:
            return self._pick_up(world, world.duster)
        if lower == PUT_DOWN:
            fallen = world.held is None and world.duster.place != "rest"
            return self._pick_up(world, world.duster) if fallen else self._put_down(world)
        if lower == RESET_DUSTER:
            if world.held is not world.duster:
                return self._pick_up(world, world.duster)
            self.status = "done" if motion.reached(world, RESET) else "moving"
            return motion.travel(world, RESET, speed=self.speed, closed=True)
        if match := _DUST.fullmatch(lower):
            return self._dust(world, match[1]) if match[1] in SHELVES else None
        if match := _TAKE.fullmatch(lower) or _PLACE.fullmatch(lower):
            thing, shelf = world.things.get(match[1]), match[2]
            if thing is None or thing is world.duster or shelf not in SHELVES:
                return None
            placing = lower.startswith("place")
            return self._place(world, thing, shelf) if placing else self._take(world, thing, shelf)
        return None

    def _put_down(self, world: DustAndReplaceWorld) -> Action:
        """Put what is held where it belongs on the table; with empty hands go home."""
        if world.held is None:
            self.status = "done"
            return motion.go_home(world, speed=self.speed)
        spot = DUSTER_REST if world.held is world.duster else world.spots[world.held.name]
        return motion.release(world, (*spot, THING_Z), speed=self.speed)

    def _pick_up(self, world: DustAndReplaceWorld, thing: Thing) -> Action:
        if world.held is None:
            speed = self.speed * FETCH_SPEED if thing is world.duster else self.speed
            return motion.grasp(world, thing.position.tolist(), speed=speed)
        if world.held is not thing:
            return self._put_down(world)
        x, y, z = (float(value) for value in world.gripper)
        self.status = "done" if z >= TRAVEL_Z - 0.02 else "moving"
        return motion.straight(world, (x, y, TRAVEL_Z), speed=self.speed, closed=True)

    def _take(self, world: DustAndReplaceWorld, thing: Thing, shelf: str) -> Action:
        if world.held is thing:
            return self._put_down(world)
        if thing.place == shelf:
            return self._pick_up(world, thing)
        if thing.place in SHELVES:
            self.status = "missing"
            above = (CELLS[len(CELLS) // 2], SHELVES[shelf].y, TRAVEL_Z)
            return motion.travel(world, above, speed=self.speed, closed=world.held is not None)
        self.status = "done"
        return motion.go_home(world, speed=self.speed)

    def _place(self, world: DustAndReplaceWorld, thing: Thing, shelf: str) -> Action:
        if world.held is thing:
            stand = (world.free_stand(shelf), SHELVES[shelf].y, SHELVES[shelf].z + THING_Z)
            return motion.release(world, stand, speed=self.speed)
        if thing.place == shelf:
            return self._put_down(world)
        return self._pick_up(world, thing)

    def _dust(self, world: DustAndReplaceWorld, shelf: str) -> Action:
        if world.held is not world.duster:
            return self._pick_up(world, world.duster)
        at = world.swept_shelf == shelf
        left = [x for i, x in enumerate(CELLS) if not (at and i in world.swept)]
        if not left:
            self.status = "done"
            return motion.hold(world)
        height = (SHELVES[shelf].y, SHELVES[shelf].z + SWEEP_Z)
        target = (left[0], *height)
        if at:
            return motion.straight(world, target, speed=self.speed * SWEEP_SPEED, closed=True)
        return motion.travel(world, target, speed=self.speed, closed=True)
