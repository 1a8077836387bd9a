"""The controller of observe and pick up."""

from typing import ClassVar

from memer.tabletop import motion
from memer.tabletop.controller import SubtaskController
from memer.tabletop.motion import Action
from memer.tabletop.observe_and_pick_up.layout import TRAVEL_Z
from memer.tabletop.observe_and_pick_up.world import PICK_UP, WAIT, ObserveAndPickUpWorld
from memer.tabletop.world import World


class ObserveAndPickUpController(SubtaskController):
    """Waits where it is, or picks up the block shown (it is told which one that is).

    Rules where a text does not fit the world:
        * wait while holding something: stays, and keeps holding; `done` once the wall stands;
        * pick up before the wall stands: sets off all the same;
        * pick up while holding another block: drops it, then takes the right one;
        * other texts: holds still (`unknown`).
    """

    task: ClassVar[str] = "observe_and_pick_up"

    def _obey(self, world: World, text: str) -> Action | None:
        assert isinstance(world, ObserveAndPickUpWorld)
        if text.lower() == WAIT:
            self.status = "done" if world.wall >= 1.0 else "moving"
            return motion.hold(world)
        if text.lower() != PICK_UP:
            return None
        self.status = "moving"
        x, y, _ = (float(c) for c in world.gripper)
        if world.held is world.target:
            up = (x, y, TRAVEL_Z)
            self.status = "done" if motion.reached(world, up) else "moving"
            return motion.straight(world, up, speed=self.speed, closed=True)
        if world.held is not None:
            return motion.release(world, (x, y, world.gripper[2]), speed=self.speed)
        return motion.grasp(world, world.target.position.tolist(), speed=self.speed)
