"""The table, the gripper and what it can grasp: the part of the physics that all tasks share.

Frame: x to the right, y away from the robot, z up, in table widths; x and y in 0..1, z in 0..0.5. Clock: one
step is 1/15 s. Everything is deterministic given the seed and the actions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memer.tabletop.perturbations import Perturbations

#: Furthest the gripper moves along one axis in one step, table widths.
MAX_STEP = 0.05
#: Height of lateral travel.
TRAVEL_Z = 0.40
#: A grip value of at least this is closed.
CLOSED = 0.99
GRIP_PER_STEP = 0.5
GRASP_REACH_XY = 0.05
GRASP_REACH_Z = 0.06
LOW = np.array([0.0, 0.0, 0.02])
HIGH = np.array([1.0, 1.0, 0.5])

Measures = dict[str, int | float | bool]


@dataclass(slots=True)
class Thing:
    """Something that can be grasped.

    Attributes:
        name: as in the texts, e.g. "red block".
        color: key of `memer.tabletop.painting.COLORS`.
        position: float64[3], x y z of its grasp point.
        place: name of the container or support that holds it ("gripper" while held).
        origin: last place other than gripper and table.
    """

    name: str
    color: str
    position: NDArray[np.float64]
    place: str
    origin: str


class World(ABC):
    """State of one episode: gripper, things, instruction in force, what has been achieved.

    Subclasses add the furniture of their task. Success is measured here, from the state, never from labels.

    Args:
        rng: draws the layout.
        perturbations: what may go wrong.
    """

    #: Name of the task.
    task: ClassVar[str]
    #: Steps after which an evaluation episode is cut, about 2.5 times the expert's length.
    time_limit: ClassVar[int]
    #: Height of lateral travel in this task.
    travel_z: ClassVar[float] = TRAVEL_Z
    #: A thing this far away, laterally and in height, can be grasped.
    grasp_reach: ClassVar[tuple[float, float]] = (GRASP_REACH_XY, GRASP_REACH_Z)
    #: A held thing falls when the grip is below this value.
    lets_go_below: ClassVar[float] = CLOSED
    #: Where the gripper starts and rests.
    home: ClassVar[tuple[float, float, float]] = (0.22, 0.22, TRAVEL_Z)

    def __init__(self, rng: np.random.Generator, *, perturbations: Perturbations) -> None:
        self.perturbations = perturbations
        self.gripper: NDArray[np.float64] = np.array(self.home, dtype=np.float64)
        self.grip = 0.0
        self.held: Thing | None = None
        self.things: dict[str, Thing] = {}
        self.step_count = 0
        #: Subtask that the controller carries out, None before the first.
        self.command: str | None = None
        self._build(rng)

    # What a task adds.

    @abstractmethod
    def _build(self, rng: np.random.Generator) -> None:
        """Draw the layout."""

    @abstractmethod
    def _land(self, thing: Thing, *, slipped: bool) -> None:
        """Decide where a thing let go at the gripper's position comes to rest (sets place and position)."""

    @abstractmethod
    def _after_step(self) -> None:
        """Update what the task keeps track of."""

    @property
    @abstractmethod
    def instruction(self) -> str:
        """The instruction in force."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether an evaluation episode ends here."""

    @property
    @abstractmethod
    def demonstration_finished(self) -> bool:
        """Whether a demonstration ends here: finished, and the last retreat is over."""

    @abstractmethod
    def measures(self) -> Measures:
        """What has been achieved so far, flat; always holds `success` (bool)."""

    @property
    @abstractmethod
    def progress(self) -> float:
        """Steps of the task that are done, the reward's potential."""

    @abstractmethod
    def expert_subtask(self) -> str:
        """The subtask that the scripted expert has in force at this step (privileged)."""

    @property
    def segment_id(self) -> int:
        """Number that tells apart segments of the same text that follow each other (privileged).

        A task whose texts never repeat in a row leaves it at 0.
        """
        return 0

    def expert_segment(self) -> tuple[int, str]:
        """(segment_id, text) of the expert at this step; changes exactly when a segment ends (privileged)."""
        return self.segment_id, self.expert_subtask()

    @abstractmethod
    def paint(self, size: int) -> dict[str, NDArray[np.uint8]]:
        """Camera key -> uint8[size, size, 3], RGB."""

    def displace(self, rng: np.random.Generator) -> bool:
        """Move an object that lies about, as someone bumping into it would; False where none may move."""
        return False

    def may_slip(self) -> bool:
        """Whether the held thing may slip now."""
        return self.held is not None

    def notice(self, subtask: str) -> None:
        """Told by the controller what it carries out; only the expert's script uses it, never the physics."""
        self.command = subtask

    # Shared physics.

    @property
    def state(self) -> NDArray[np.float32]:
        """float32[4]: x, y, z in table widths, grip 0 (open) .. 1 (closed)."""
        return np.array([*self.gripper, self.grip], dtype=np.float32)

    def step(self, action: NDArray[np.float32]) -> None:
        """Advance by one step.

        Args:
            action: float32[4]; dx, dy, dz in -1..1 as fractions of MAX_STEP, grip > 0 closes, else opens.
        """
        frozen = self.perturbations.strike(self.step_count, slip=self._slip, displace=self.displace)
        if not frozen:
            values = np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0)
            # A standing arm does not drift: what it holds still for, e.g. a grasp, stays possible.
            motion = values[:3] + self.perturbations.drift * np.abs(values[:3]).max()
            self.gripper = np.clip(self.gripper + motion * MAX_STEP, LOW, HIGH)
            self._move_grip(closing=bool(values[3] > 0))
            if self.held is not None:
                self.held.position = self.gripper.copy()
        self.step_count += 1
        self._after_step()

    def _move_grip(self, *, closing: bool) -> None:
        before = self.grip
        self.grip = float(np.clip(before + (GRIP_PER_STEP if closing else -GRIP_PER_STEP), 0.0, 1.0))
        if self.grip >= CLOSED and before < CLOSED and self.held is None:
            thing = self._nearest_in_reach()
            if thing is not None:
                thing.place = "gripper"
                self.held = thing
        elif self.grip < self.lets_go_below and self.held is not None:
            self._let_go(slipped=False)

    def _nearest_in_reach(self) -> Thing | None:
        def distance(thing: Thing) -> float:
            return float(np.abs(thing.position - self.gripper)[:2].max())

        reach_xy, reach_z = self.grasp_reach
        reachable = [
            thing
            for thing in self.things.values()
            if distance(thing) <= reach_xy and abs(thing.position[2] - self.gripper[2]) <= reach_z
        ]
        return min(reachable, key=distance, default=None)

    def _let_go(self, *, slipped: bool) -> None:
        thing = self.held
        assert thing is not None, "let go of nothing"
        self.held = None
        self._land(thing, slipped=slipped)
        if thing.place != "table":
            thing.origin = thing.place

    def _slip(self) -> bool:
        if not self.may_slip():
            return False
        self._let_go(slipped=True)
        return True
