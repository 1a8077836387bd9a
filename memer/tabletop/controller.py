"""The low level: obeys a subtask given as text, as a trained low-level policy would.

It may perceive the low-level state of the world (where the named thing lies, what the gripper holds) but
decides nothing a planner should decide: it never reads the instruction, never corrects a wrong text, and
carries out a useless one. Its action depends on world and text alone, so a changed text is obeyed at the next
step.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from memer.episode import normalize_label
from memer.tabletop import motion
from memer.tabletop.motion import Action
from memer.tabletop.world import World


class SubtaskController(ABC):
    """Turns (world, subtask text) into one action.

    Args:
        speed: fraction of the greatest step length that motions use, in (0, 1].

    Attributes:
        status: after `act`: `moving`; `done` (finished, waiting for another text); `missing` (the text is
            carried out, but what it names is not there); `unknown` (not a text of this task: holds still).
    """

    #: Name of the task.
    task: ClassVar[str]

    def __init__(self, *, speed: float = 0.9) -> None:
        if not 0.0 < speed <= 1.0:
            raise ValueError(f"SubtaskController.speed: {speed!r}, must lie in (0, 1]")
        self.speed = speed
        self.status = "done"
        #: Number of the command in force, and whether this step is the first of it.
        self.command_id: int | None = None
        self.new_command = True
        self._text: str | None = None

    def act(self, world: World, subtask: str | None, *, command_id: int | None = None) -> Action:
        """One action, float32[4], that carries on `subtask`.

        Args:
            world: where to act.
            subtask: text to obey; None (nothing said yet) holds still.
            command_id: changes whenever a new command is given, also one of the same text (e.g. the number of
                the segment). Only tasks whose texts repeat look at it; None: the caller does not count.
        """
        if world.task != self.task:
            raise ValueError(f"a controller for {self.task} cannot act in a world of {world.task}")
        text = None if subtask is None else normalize_label(subtask)
        self.new_command = command_id is None or (command_id, text) != (self.command_id, self._text)
        self.command_id, self._text = command_id, text
        action = None if text is None else self._obey(world, text)
        if text is None or action is None:
            self.status = "unknown"
            return motion.hold(world)
        world.notice(text.lower())
        return action

    @abstractmethod
    def _obey(self, world: World, text: str) -> Action | None:
        """The action for a whitespace-normalised text (sets `status`); None: no text of the task."""
