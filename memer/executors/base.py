"""The three parts of a plan-and-execute policy, as protocols: language plan, visual plan, actions.

One instance serves one stream of observations: it is reset at the start of an episode, and what it caches
lives until the next reset. Pictures are canvases, uint8[H, W, 3] RGB (`memer.canvas`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ActionChunk:
    """What an executor predicts from one observation.

    Attributes:
        actions: float32[h, A] in the robot's units; action n leads to the n-th frame from now (n = 1..h).
        progress: float32[h], share of the segment done once action n has been executed, 0..1.
    """

    actions: NDArray[np.float32]
    progress: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """What an executor is asked: `Executor.act` with these arguments.

    Attributes:
        canvas: uint8[H, W, 3], current observation.
        state: float32[S].
        progress: share of the subtask done, 0..1.
    """

    canvas: Pixels
    state: NDArray[np.float32]
    progress: float


class LanguagePlanner(Protocol):
    """Names the next subtask from what is done."""

    def next(self, instruction: str, done: Sequence[str], images: Sequence[Pixels]) -> str:
        """The text of subtask len(done) + 1.

        Args:
            instruction: of the whole task.
            done: texts of the finished subtasks in order, repetitions kept.
            images: head views uint8[h, w, 3]: at the start of the episode, then at the end of every finished
                subtask; one more than `done`.
        """
        ...


class VisualPlanner(Protocol):
    """Imagines a subtask as 8 frames, from the real frames of what is done."""

    def reset(self, instruction: str, canvas: Pixels, *, seed: int) -> None:
        """Forget everything; `canvas` is the first observation of the new episode."""
        ...

    def plan(self, text: str, canvas: Pixels) -> Pixels:
        """uint8[8, H, W, 3]: frame m is expected at share (m + 1) / 8 of the subtask; memory is unchanged.

        Args:
            text: of the subtask.
            canvas: observation at its start.
        """
        ...

    def write_back(self, frames: Pixels, text: str) -> None:
        """Remember a finished subtask by its 8 real frames uint8[8, H, W, 3]."""
        ...


class Executor(Protocol):
    """Carries out one subtask and knows how far it is."""

    def reset(self, instruction: str, *, seed: int) -> None:
        """Forget everything; a new episode starts."""
        ...

    def start_segment(self, references: Pixels | None, text: str) -> None:
        """Take a new plan; called once per subtask.

        Args:
            references: uint8[9, H, W, 3], the observation at its start and the 8 plan frames; None without a
                visual plan.
            text: of the subtask.
        """
        ...

    def act(self, canvas: Pixels, state: NDArray[np.float32], progress: float) -> ActionChunk:
        """A chunk of actions from now on.

        Args:
            canvas: current observation.
            state: float32[S] in the robot's units.
            progress: share of the subtask done, 0..1.
        """
        ...

    def finished(self, canvas: Pixels, state: NDArray[np.float32]) -> float:
        """Probability that the subtask is finished; only asked of executors that classify progress."""
        ...


@runtime_checkable
class SeesEveryFrame(Protocol):
    """An executor that keeps all observations instead of a plan (`executor_context: full_history`)."""

    def observe(self, canvas: Pixels) -> None:
        """Called once per control step with the present observation, before `act`."""
        ...


@runtime_checkable
class GivesLatents(Protocol):
    """A visual planner whose last plan is there as the codec's latents, too (`plan_encoding: episodic`)."""

    latents: Any


@runtime_checkable
class TakesLatents(Protocol):
    """An executor that follows latents as they are (`plan_encoding: episodic`)."""

    def follow(self, latents: Any) -> None:
        """Called before `start_segment` with the visual planner's latents."""
        ...


@runtime_checkable
class ActsTogether(Protocol):
    """An executor whose streams can share one call of the model.

    Parts that keep a state have `fork()`: another stream, with the same model and nothing of this state.
    """

    def act_many(self, streams: Sequence[Any], requests: Sequence[ChunkRequest]) -> list[ActionChunk]:
        """As `act` of every stream with its request; `streams` are forks of this one."""
        ...
