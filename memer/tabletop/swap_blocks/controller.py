"""The controller of swap blocks."""

import re
from typing import ClassVar, Final

from memer.tabletop import motion
from memer.tabletop.controller import SubtaskController
from memer.tabletop.motion import Action
from memer.tabletop.swap_blocks.layout import PLACES, RELEASE_Z
from memer.tabletop.swap_blocks.world import SwapBlocksWorld
from memer.tabletop.world import Thing, World

_TO_MIDDLE: Final = re.compile(r"move the (.+) to the middle", re.IGNORECASE)
_TO_PLACE: Final = re.compile(r"move the (.+) to where the (.+) was", re.IGNORECASE)


class SwapBlocksController(SubtaskController):
    """Moves blocks to the middle or to where a block stood at first (it is told where that was).

    Rules where a text does not fit the world:
        * the block stands there already: rises and stays (`done`);
        * another block stands there: waits above with the block in hand (`missing`);
        * move X while holding Y: sets Y down at the nearest free place, then moves X;
        * a block that lies on the table (it slipped): is taken up there;
        * blocks that do not exist and other texts: holds still (`unknown`).
    """

    task: ClassVar[str] = "swap_blocks"

    def _obey(self, world: World, text: str) -> Action | None:
        assert isinstance(world, SwapBlocksWorld)
        if match := _TO_PLACE.fullmatch(text):
            block, other = match[1].lower(), match[2].lower()
            if block in world.things and other in world.start:
                return self._move(world, world.things[block], world.start[other])
        elif match := _TO_MIDDLE.fullmatch(text):
            block = match[1].lower()
            if block in world.things:
                return self._move(world, world.things[block], "middle")
        return None

    def _move(self, world: SwapBlocksWorld, thing: Thing, place: str) -> Action:
        self.status = "moving"
        x, y, _ = (float(c) for c in world.gripper)
        if world.held is not None and world.held is not thing:
            free = [where for name, where in PLACES.items() if world.occupant(name) is None]
            nearest = min(free, key=lambda where: max(abs(where[0] - x), abs(where[1] - y)))
            return motion.release(world, (*nearest, RELEASE_Z), speed=self.speed)
        if thing.place == place:
            self.status = "done"
            return motion.straight(world, (x, y, world.travel_z), speed=self.speed, closed=False)
        if world.held is None:
            return motion.grasp(world, thing.position.tolist(), speed=self.speed)
        if world.occupant(place) is not None:
            self.status = "missing"
            return motion.travel(world, (*PLACES[place], world.travel_z), speed=self.speed, closed=True)
        return motion.release(world, (*PLACES[place], RELEASE_Z), speed=self.speed)
