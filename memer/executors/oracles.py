"""Oracles: parts that look into the tabletop's world. The ceiling of every comparison, and the test bench.

They know what no policy may know (which segment the expert is in, how it will go on), and are bound to the
world of every episode before its reset. Each one simulates copies; the played world is never changed.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from memer.canvas import paint_canvas
from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.executors.base import ActionChunk, Pixels
from memer.plan_settings import PlanSettings
from memer.tabletop.controller import SubtaskController
from memer.tabletop.expert import MAX_DEMONSTRATION
from memer.tabletop.tasks import make_controller
from memer.tabletop.world import World
from memer.windows import bucket_last_indices

#: Speed of the scripted controller, the middle of the demonstrators'.
SPEED = 0.9
#: A simulated segment is cut after so many steps: the text cannot be carried out.
MAX_SEGMENT = 400

#: (segment_id, text) as `World.expert_segment` gives it.
ExpertSegment = tuple[int, str]


@runtime_checkable
class KnowsWorld(Protocol):
    """A part that looks into the simulator."""

    def bind_world(self, world: World) -> None:
        """Called before the reset of every episode, with its world at the first step."""
        ...


def expert_script(world: World) -> list[ExpertSegment]:
    """The segments that the expert will go through from here, in order."""
    future = _undisturbed(world)
    controller = make_controller(future.task, speed=SPEED)
    script: list[ExpertSegment] = []
    for _ in range(MAX_DEMONSTRATION):
        segment = future.expert_segment()
        if not script or script[-1] != segment:
            script.append(segment)
        if future.demonstration_finished:
            break
        future.step(controller.act(future, segment[1]))
    return script


@dataclass(slots=True)
class _Ahead:
    """One simulated step: world, action about to be taken, whether the expert is in the segment as well."""

    world: World
    action: NDArray[np.float32]
    inside: bool


def segment_ahead(
    world: World,
    controller: SubtaskController,
    text: str,
    *,
    goal: ExpertSegment | None,
    command: int,
    entered: bool = False,
) -> Iterator[_Ahead]:
    """Carry out `text` in a copy of the world, up to and including the last frame of the segment.

    Args:
        world: at the start, or anywhere in the segment.
        controller: of the segment; copied.
        text: to obey.
        goal: the expert's segment that this is meant to be; None: whichever has this text.
        command: number of the command, see SubtaskController.act.
        entered: the expert has been in the segment before; an executor that starts early has not.

    Yields:
        Steps of the same copy of the world; there is always one.
    """
    future, hand = _undisturbed(world), copy.deepcopy(controller)
    for count in range(MAX_SEGMENT):
        now = future.expert_segment()
        inside = now == goal if goal is not None else now[1] == text
        over = (entered or hand.status == "done") and not inside
        if count and (over or future.demonstration_finished):
            return
        entered |= inside
        action = hand.act(future, text, command_id=command)
        yield _Ahead(future, action, inside)
        if hand.status == "unknown":
            return
        future.step(action)


class _Scripted:
    """What the oracles share: the world, the expert's script, the number of the segment in force."""

    def __init__(self, contract: Contract) -> None:
        if contract.plan is None:
            raise UsageError(f"{type(self).__name__}: the contract has no plan settings")
        self.contract = contract
        self.plan_settings: PlanSettings = contract.plan
        self._world: World | None = None
        self._script: list[ExpertSegment] = []

    @property
    def world(self) -> World:
        """The world of this episode."""
        if self._world is None:
            raise MemerError(
                f"{type(self).__name__} looks into the tabletop's world and was not given one; "
                "it works in eval=map_wam only"
            )
        return self._world

    def bind_world(self, world: World) -> None:
        """Look at the world of the next episode."""
        self._world, self._script = world, expert_script(world)

    def fork(self) -> Self:
        """Another one for another world."""
        other = copy.copy(self)
        other._world, other._script = None, []
        return other

    def goal(self, number: int, text: str) -> ExpertSegment | None:
        """The expert's segment of this number (0 for the first), if it has this text."""
        if number < len(self._script) and self._script[number][1] == text:
            return self._script[number]
        return None


class LanguageOracle(_Scripted):
    """Names the expert's segments one after the other, whatever happened; after the last one, that one again.

    Like an annotation it counts finished segments: an executor that breaks off early is not asked again.
    """

    def next(self, instruction: str, done: Sequence[str], images: Sequence[Pixels]) -> str:
        """The text of the expert's segment number len(done) + 1."""
        if not self._script:
            raise MemerError("language=oracle: no world was bound; it works in eval=map_wam only")
        return self._script[min(len(done), len(self._script) - 1)][1]


class VisualOracle(_Scripted):
    """Shows what will be seen if the scripted controller carries out the text from here."""

    def __init__(self, contract: Contract, *, frame_size: int) -> None:
        super().__init__(contract)
        self._frame_size = frame_size
        self._done = 0

    def reset(self, instruction: str, canvas: Pixels, *, seed: int) -> None:
        """Start counting segments."""
        self._done = 0

    def plan(self, text: str, canvas: Pixels) -> Pixels:
        """uint8[N, H, W, 3]: the frames that training would choose from the simulated segment."""
        controller = make_controller(self.world.task, speed=SPEED)
        goal = self.goal(self._done, text)

        def ahead() -> Iterator[_Ahead]:
            return segment_ahead(self.world, controller, text, goal=goal, command=self._done)

        length = sum(1 for _ in ahead())
        chosen = bucket_last_indices(0, length, self.plan_settings.plan_frames)
        wanted, frames = set(chosen), dict[int, Pixels]()
        for index, step in enumerate(ahead()):
            if index in wanted:
                frames[index] = paint_canvas(
                    step.world.paint(self._frame_size),
                    canvas=self.plan_settings.canvas,
                    cameras=self.contract.cameras,
                )
        return np.stack([frames[index] for index in chosen])

    def write_back(self, frames: Pixels, text: str) -> None:
        """Count the segment."""
        self._done += 1


class ExecutorOracle(_Scripted):
    """The scripted controller, with the true progress of what it does."""

    def reset(self, instruction: str, *, seed: int) -> None:
        """Start counting segments."""
        self._segment = -1
        self._text = ""
        self._start = 0

    def start_segment(self, references: Pixels | None, text: str) -> None:
        """Take the text; the plan's pictures are not looked at."""
        self._segment += 1
        self._text, self._start = text, self.world.step_count
        self._controller = make_controller(self.world.task, speed=SPEED)
        # The controller counts what a command has done from its first step on.
        self._controller.act(copy.deepcopy(self.world), text, command_id=self._segment)
        ahead = self._ahead(entered=False)
        #: Steps from here until the expert is in this segment, too: 0 unless the last one was left early.
        self._entry = next((count for count, step in enumerate(ahead) if step.inside), MAX_SEGMENT)

    def act(self, canvas: Pixels, state: NDArray[np.float32], progress: float) -> ActionChunk:
        """What the controller will do, and how far the segment will be."""
        remaining = self._remaining()
        horizon = self.plan_settings.action_horizon
        future, hand = _undisturbed(self.world), copy.deepcopy(self._controller)
        actions = []
        for _ in range(horizon):
            actions.append(hand.act(future, self._text, command_id=self._segment))
            future.step(actions[-1])
        elapsed = self.world.step_count - self._start
        whole = max(1, elapsed + remaining)
        done = np.minimum(1.0, (elapsed + np.arange(1, horizon + 1)) / whole)
        return ActionChunk(np.stack(actions), done.astype(np.float32))

    def finished(self, canvas: Pixels, state: NDArray[np.float32]) -> float:
        """1 in the last `finish_margin` steps of the segment, else 0."""
        return float(self._remaining() < self.plan_settings.finish_margin)

    def _remaining(self) -> int:
        """Steps until the last frame of the segment."""
        entered = self.world.step_count - self._start > self._entry
        return sum(1 for _ in self._ahead(entered=entered)) - 1

    def _ahead(self, *, entered: bool) -> Iterator[_Ahead]:
        return segment_ahead(
            self.world,
            self._controller,
            self._text,
            goal=self.goal(self._segment, self._text),
            command=self._segment,
            entered=entered,
        )


def _undisturbed(world: World) -> World:
    future = copy.deepcopy(world)
    future.perturbations.probability = 0.0
    return future
