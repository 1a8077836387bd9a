"""Press button: the left and the middle button a given number of times each, then the confirm button.

To be remembered: how many presses there were. Pressed and released buttons look alike, and so does the
gripper above a button before and after a press.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memer.tabletop.press_button import paint
from memer.tabletop.press_button.layout import (
    BUTTON_HALF,
    BUTTONS,
    JITTER,
    PRESS_Z,
    PRESSES,
    RELEASE_Z,
    REST_FRAMES,
)
from memer.tabletop.world import TRAVEL_Z, Measures, Thing, World

CONFIRM = "press the confirm button"


def press_text(button: str) -> str:
    """The subtask of one press of a button."""
    return CONFIRM if button == "confirm" else f"press the {button} button one time"


class PressButtonWorld(World):
    """The world of press button; see the module.

    A press counts when the gripper goes down to PRESS_Z over a button after having been at RELEASE_Z or above
    since the press before. A press that the instruction does not ask for next ends the episode as a failure.
    """

    task: ClassVar[str] = "press_button"
    time_limit: ClassVar[int] = 650
    home: ClassVar[tuple[float, float, float]] = (0.50, 0.60, TRAVEL_Z)

    def _build(self, rng: np.random.Generator) -> None:
        self.panel = rng.uniform(-JITTER, JITTER, size=2)
        left, middle = (int(n) for n in rng.integers(PRESSES[0], PRESSES[1] + 1, size=2))
        self.asked = {"left": left, "middle": middle}
        #: Buttons in the order in which they are to be pressed.
        self.script: tuple[str, ...] = ("left",) * left + ("middle",) * middle + ("confirm",)
        #: Buttons in the order in which they were pressed.
        self.presses: list[str] = []
        self.failed = False
        self.armed = True
        #: Since the last press: frames, frames in the raised pose, and whether the gripper is done with it.
        self.frames_since_press = 0
        self.rest_frames = 0
        self.settled = True

    # Texts and measures.

    @property
    def instruction(self) -> str:
        """Names both numbers; never changes."""
        parts = [
            f"the {button} button {count} time{'s' if count > 1 else ''}"
            for button, count in self.asked.items()
        ]
        return f"press {' and '.join(parts)}, then press the confirm button"

    @property
    def finished(self) -> bool:
        """All presses done, or a wrong one."""
        return self.failed or len(self.presses) == len(self.script)

    @property
    def demonstration_finished(self) -> bool:
        """Finished, and the gripper is raised again."""
        return self.finished and self.settled

    @property
    def progress(self) -> float:
        """Right presses."""
        return float(len(self.presses) - self.failed)

    def measures(self) -> Measures:
        """Success: the presses asked for, in order, and no other one."""
        return {
            "success": self.finished and not self.failed,
            "wrong_press": self.failed,
            "presses": len(self.presses),
            "asked_presses": len(self.script),
        }

    @property
    def segment_id(self) -> int:
        """Presses that are over: the gripper was raised for a moment, or moved on."""
        return min(len(self.presses) - (not self.settled), len(self.script) - 1)

    def expert_subtask(self) -> str:
        """The press in hand, or the next one."""
        return press_text(self.script[self.segment_id])

    # Physics of buttons.

    def button_position(self, name: str) -> tuple[float, float]:
        """Centre of a button."""
        x, y = BUTTONS[name]
        return x + float(self.panel[0]), y + float(self.panel[1])

    def button_below(self) -> str | None:
        """The button under the gripper, at any height."""
        for name in BUTTONS:
            x, y = self.button_position(name)
            if abs(self.gripper[0] - x) <= BUTTON_HALF and abs(self.gripper[1] - y) <= BUTTON_HALF:
                return name
        return None

    def _land(self, thing: Thing, *, slipped: bool) -> None:
        raise AssertionError("nothing can be grasped in press button")

    def _after_step(self) -> None:
        z, below = float(self.gripper[2]), self.button_below()
        self.frames_since_press += 1
        if z >= RELEASE_Z:
            self.armed = True
        if not self.settled:
            self.rest_frames += z >= TRAVEL_Z - 0.02
            left = self.armed and below != self.presses[-1]
            self.settled = left or self.rest_frames >= REST_FRAMES
        if z <= PRESS_Z and below is not None and self.armed and not self.finished:
            self.armed = self.settled = False
            self.frames_since_press = self.rest_frames = 0
            self.failed = below != self.script[len(self.presses)]
            self.presses.append(below)

    def displace(self, rng: np.random.Generator) -> bool:
        """The panel is pushed by a centimetre or two, while the gripper is up."""
        if self.gripper[2] < RELEASE_Z:
            return False
        self.panel = rng.uniform(-2 * JITTER, 2 * JITTER, size=2)
        return True

    def paint(self, size: int) -> dict[str, NDArray[np.uint8]]:
        """Both cameras."""
        return {"base": paint.base_view(self, size), "wrist": paint.wrist_view(self, size)}
