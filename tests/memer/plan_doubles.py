"""Parts of a plan-following policy that do what a test tells them, and note what they were told."""

from collections.abc import Sequence

import numpy as np

from memer.contract import CameraLayout, Contract
from memer.executors.base import ActionChunk
from memer.plan_settings import CanvasLayout, CanvasRegion, PlanSettings

SIZE, HORIZON, ACTION_DIM = 16, 16, 2


def small_contract(**switches) -> Contract:
    """One camera of 16 x 16 px, which is the canvas; no JPEG, so that grey levels stay what they are."""
    region = CanvasRegion(camera="base", y=0, x=0, height=SIZE, width=SIZE)
    layout = CanvasLayout(height=SIZE, width=SIZE, regions=(region,))
    cameras = CameraLayout(camera_keys=("base",), view_width=SIZE, view_height=SIZE, jpeg_round_trip=False)
    return Contract(fps=15.0, cameras=cameras, plan=PlanSettings(canvas=layout, **switches))


def grey(level: int) -> np.ndarray:
    """A picture that says its number."""
    return np.full((SIZE, SIZE, 3), level, dtype=np.uint8)


def observation(step: int, state: Sequence[float] = (0.0, 0.0)) -> dict:
    """What is seen at a control step: the grey level is the step's number."""
    return {"images": {"base": grey(step)}, "state": np.array(state, dtype=np.float32)}


class CountingLanguage:
    """Names subtasks by their number and keeps every question."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str], list[int]]] = []

    def next(self, instruction, done, images) -> str:
        self.asked.append((instruction, list(done), [int(image[0, 0, 0]) for image in images]))
        return f"subtask {len(done) + 1}"


class GreyVisual:
    """Plans eight grey pictures and keeps what is written back."""

    def __init__(self, levels: Sequence[int] = (10, 20, 30, 40, 50, 60, 70, 80)) -> None:
        self.levels = levels
        self.starts: list[tuple[str, int, int]] = []
        self.planned: list[tuple[str, int]] = []
        self.written: list[tuple[list[int], str]] = []

    def reset(self, instruction, canvas, *, seed) -> None:
        self.starts.append((instruction, int(canvas[0, 0, 0]), seed))

    def plan(self, text, canvas) -> np.ndarray:
        self.planned.append((text, int(canvas[0, 0, 0])))
        return np.stack([grey(level) for level in self.levels])

    def write_back(self, frames, text) -> None:
        self.written.append(([int(frame[0, 0, 0]) for frame in frames], text))


class ScriptedExecutor:
    """Gives actions that name (segment, chunk, place), and progress from a list, one entry per executed step.

    Args:
        progress: of the steps of every segment; the last value lasts.
        finished: probabilities, one per question; the last value lasts.
    """

    def __init__(self, progress: Sequence[float] = (0.0,), finished: Sequence[float] = (0.0,)) -> None:
        self.progress = list(progress)
        self.probabilities = list(finished)
        self.segments: list[tuple[str, list[int] | None]] = []
        self.acts: list[tuple[int, float]] = []
        self.questions: list[int] = []
        self.resets: list[tuple[str, int]] = []
        self._done = 0

    def reset(self, instruction, *, seed) -> None:
        self.resets.append((instruction, seed))

    def start_segment(self, references, text) -> None:
        levels = None if references is None else [int(frame[0, 0, 0]) for frame in references]
        self.segments.append((text, levels))
        self._start: int | None = None

    def act(self, canvas, state, progress) -> ActionChunk:
        step = int(canvas[0, 0, 0])
        self._start = step if self._start is None else self._start
        self.acts.append((step, progress))
        places = np.arange(HORIZON, dtype=np.float32)
        actions = np.stack([np.full(HORIZON, step, dtype=np.float32), places], axis=1)
        done = [min(step - self._start + n, len(self.progress) - 1) for n in range(HORIZON)]
        return ActionChunk(actions, np.array([self.progress[n] for n in done], dtype=np.float32))

    def finished(self, canvas, state) -> float:
        self.questions.append(int(canvas[0, 0, 0]))
        return self.probabilities[min(len(self.questions), len(self.probabilities)) - 1]
