"""The controller of press button."""

import re
from typing import ClassVar, Final

from memer.tabletop import motion
from memer.tabletop.controller import SubtaskController
from memer.tabletop.motion import Action
from memer.tabletop.press_button.layout import BOTTOM_Z, BUTTONS, DWELL_FRAMES, PRESS_SPEED, PRESS_Z
from memer.tabletop.press_button.world import CONFIRM, PressButtonWorld
from memer.tabletop.world import TRAVEL_Z, World

_PRESS: Final = re.compile(r"press the (\w+) button one time", re.IGNORECASE)


class PressButtonController(SubtaskController):
    """Presses buttons, one press after the other.

    A press: over the button, down, a moment there, up, a moment there.

    With a command number (`act(..., command_id=n)`) a text is carried out once per number; after that the
    gripper stays above the button (`done`) until another number comes. Without numbers nobody can tell a
    standing text from a repeated one: the button is pressed again for as long as the text stands, and who
    wants one press only has to say something else before the next one.
    """

    task: ClassVar[str] = "press_button"
    #: Presses there had been when the command in force was given.
    _presses_before: int = 0

    def _obey(self, world: World, text: str) -> Action | None:
        assert isinstance(world, PressButtonWorld)
        match = _PRESS.fullmatch(text)
        button = "confirm" if text.lower() == CONFIRM else match[1].lower() if match else None
        if self.new_command:
            self._presses_before = len(world.presses)
        if button not in BUTTONS or (match and button == "confirm"):
            return None
        x, y = world.button_position(button)
        up, down = (x, y, TRAVEL_Z), (x, y, BOTTOM_Z)
        slow = self.speed * PRESS_SPEED
        last = world.presses[-1] if world.presses else None
        self.status = "moving"
        if not world.settled and last == button:
            pressing = world.frames_since_press < DWELL_FRAMES and world.gripper[2] <= PRESS_Z
            return motion.straight(world, down if pressing else up, speed=slow, closed=True)
        if self.command_id is not None and button in world.presses[self._presses_before :]:
            self.status = "done"
            return motion.travel(world, up, speed=self.speed, closed=True)
        above = max(abs(x - world.gripper[0]), abs(y - world.gripper[1])) <= motion.REACHED
        if above:
            return motion.straight(world, down, speed=slow, closed=True)
        return motion.travel(world, up, speed=self.speed, closed=True, slide=0.0)
