"""The controller of counting scoops."""

import re
from typing import ClassVar, Final

from memer.tabletop import motion
from memer.tabletop.controller import SubtaskController
from memer.tabletop.counting_scoops.layout import BOWLS, CONTAINERS, GRASP_Z, RESET, REST, SCOOP_Z
from memer.tabletop.counting_scoops.world import DROP, PICK_UP, RESET_SCOOPER, CountingScoopsWorld
from memer.tabletop.motion import Action
from memer.tabletop.world import TRAVEL_Z, World

_SCOOP: Final = re.compile(r"place a scoop of (.+) in the (\w+) bowl", re.IGNORECASE)


class CountingScoopsController(SubtaskController):
    """Takes up the scooper, brings scoops, resets, drops.

    Rules where a text does not fit the world:
        * a scoop or a reset without the scooper in hand: takes it up first, wherever it lies;
        * a scoop of X while Y is loaded: dips into X, which replaces the load;
        * a scoop just poured into that bowl, scooper still low over it: stays there (`done`); to pour another
          one the scooper has to leave the bowl in between, as by "reset scooper position";
        * drop of a scooper that slipped: takes it up and puts it down at its rest; of one that lies there:
          goes home (`done`);
        * ingredients and bowls that do not exist and other texts: holds still (`unknown`).
    """

    task: ClassVar[str] = "counting_scoops"

    def _obey(self, world: World, text: str) -> Action | None:
        assert isinstance(world, CountingScoopsWorld)
        lower = text.lower()
        self.status = "moving"
        if lower == PICK_UP:
            return self._pick_up(world)
        if lower == RESET_SCOOPER:
            if world.held is None:
                return self._pick_up(world)
            self.status = "done" if motion.reached(world, RESET) else "moving"
            return motion.travel(world, RESET, speed=self.speed, closed=True)
        if lower == DROP:
            if world.held is not None:
                return motion.release(world, (*REST, GRASP_Z), speed=self.speed)
            if world.scooper.place != "rest":
                return self._pick_up(world)
            self.status = "done"
            return motion.go_home(world, speed=self.speed)
        if match := _SCOOP.fullmatch(text):
            ingredient, bowl = match[1].lower(), match[2].lower()
            if ingredient in world.stock and bowl in BOWLS:
                return self._scoop(world, ingredient, bowl)
        return None

    def _pick_up(self, world: CountingScoopsWorld) -> Action:
        if world.held is None:
            return motion.grasp(world, world.scooper.position.tolist(), speed=self.speed)
        self.status = "done" if world.lifted else "moving"
        x, y = float(world.gripper[0]), float(world.gripper[1])
        return motion.straight(world, (x, y, TRAVEL_Z), speed=self.speed, closed=True)

    def _scoop(self, world: CountingScoopsWorld, ingredient: str, bowl: str) -> Action:
        if world.held is None:
            return self._pick_up(world)
        if world.poured_here == (ingredient, bowl):
            self.status = "done"
            return motion.hold(world)
        place = BOWLS[bowl] if world.load == ingredient else CONTAINERS[world.stock[ingredient]]
        return motion.travel(world, (*place, SCOOP_Z), speed=self.speed, closed=True)
