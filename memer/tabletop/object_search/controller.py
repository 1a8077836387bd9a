"""The controller of object search."""

import re
from typing import ClassVar, Final

from memer.tabletop import motion
from memer.tabletop.controller import SubtaskController
from memer.tabletop.motion import Action
from memer.tabletop.object_search.layout import BINS, LOOK_DESCENT, LOOK_Z, RELEASE_Z, WHITE_BIN
from memer.tabletop.object_search.world import ObjectSearchWorld
from memer.tabletop.world import World

_LOOK: Final = re.compile(r"look inside the (\w+) bin", re.IGNORECASE)
_TAKE: Final = re.compile(
    r"take the (.+) from the (\w+) bin and place (?:it )?in the white bin", re.IGNORECASE
)


class ObjectSearchController(SubtaskController):
    """Looks into bins and carries things to the white bin.

    Rules where a text does not fit the world:
        * look while holding something: looks, and keeps holding;
        * take X while holding Y: lets Y fall back, from above, into the bin it came from, then takes X;
        * take X while holding X: carries it to the white bin, whatever bin the text names;
        * take X that lies on the table (it slipped): picks it up there;
        * take X from a bin that does not hold it: hovers low over that bin (`missing`);
        * take X that lies in the white bin: goes home and stays (`done`);
        * take of a thing that does not exist, unknown bins and other texts: holds still (`unknown`).
    """

    task: ClassVar[str] = "object_search"

    def _obey(self, world: World, text: str) -> Action | None:
        assert isinstance(world, ObjectSearchWorld)
        if match := _LOOK.fullmatch(text):
            name = match[1].lower()
            return self._look(world, name) if name in BINS else None
        if match := _TAKE.fullmatch(text):
            thing, name = match[1].lower(), match[2].lower()
            return self._take(world, thing, name) if name in BINS and thing in world.things else None
        return None

    def _look(self, world: ObjectSearchWorld, bin_name: str) -> Action:
        target = (*BINS[bin_name], LOOK_Z)
        self.status = "done" if motion.reached(world, target) else "moving"
        above = max(abs(target[0] - world.gripper[0]), abs(target[1] - world.gripper[1])) <= motion.REACHED
        speed = self.speed * LOOK_DESCENT if above and world.gripper[2] > LOOK_Z else self.speed
        return motion.travel(world, target, speed=speed, closed=world.held is not None)

    def _take(self, world: ObjectSearchWorld, name: str, bin_name: str) -> Action:
        thing = world.things[name]
        self.status = "moving"
        if world.held is thing:
            return motion.release(world, (*WHITE_BIN, RELEASE_Z), speed=self.speed)
        if world.held is not None:
            origin = BINS.get(world.held.origin, WHITE_BIN)
            return motion.release(world, (*origin, RELEASE_Z), speed=self.speed)
        if thing.place == "white":
            self.status = "done"
            return motion.go_home(world, speed=self.speed)
        if thing.place in (bin_name, "table"):
            return motion.grasp(world, thing.position.tolist(), speed=self.speed)
        action = self._look(world, bin_name)
        self.status = "missing"
        return action
