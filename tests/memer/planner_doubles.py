"""Planners for tests whose answers are a pure function of what they are shown."""

import hashlib
from collections.abc import Sequence

import numpy as np

from memer.contract import CameraLayout, Contract, WindowSettings
from memer.episode import ArrayFrames, Episode, InstructionSpan, segments_from_labels
from memer.planners.base import PlannerRequest, PlannerResult


class PicturePlanner:
    """Derives label, positions and faults from the bytes of every picture and text in the question."""

    def __init__(self, *, parse_failures: bool = False, labels: Sequence[str] = ()) -> None:
        self.parse_failures = parse_failures
        self.labels = list(labels) or [f"subtask {k}" for k in range(4)]
        self.calls: list[int] = []
        self.questions: dict[str, list[PlannerRequest]] = {}

    def start_episode(self, session: str, *, instruction: str, seed: int | None = None) -> None:
        self.questions[session] = []

    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        self.calls.append(len(requests))
        return [self._answer(request) for request in requests]

    def end_episode(self, session: str) -> None:
        pass

    def _answer(self, request: PlannerRequest) -> PlannerResult:
        self.questions.setdefault(request.session, []).append(request)
        question = request.question
        digest = hashlib.sha256(question.instruction.encode())
        for text in question.history:
            digest.update(text.encode())
        for key in question.image_keys:
            digest.update(question.frames[key].tobytes())
        value = digest.digest()
        if self.parse_failures and value[0] % 4 == 0:
            return PlannerResult(status="parse_error", error="no JSON object", raw_text="?")
        length = len(question.recent_keys)
        positions = tuple(1 + byte % length for byte in value[2 : 2 + value[1] % 3])
        return PlannerResult(
            status="ok", subtask=self.labels[value[5] % len(self.labels)], positions=positions
        )


def small_contract(**changes: object) -> Contract:
    """Two 8 x 6 px cameras at 10 fps, small windows."""
    windows = WindowSettings(
        frame_subsample=3, recent_frames_length=4, keyframes_length=3, prediction_horizon=1, merge_distance=2
    )
    values: dict[str, object] = {
        "fps": 10.0,
        "cameras": CameraLayout(camera_keys=("top", "side"), view_width=8, view_height=6),
        "windows": windows,
        **changes,
    }
    return Contract(**values)  # type: ignore[arg-type]


def painted_episode(index: int, length: int, *, labels: Sequence[str | None] | None = None) -> Episode:
    """Every frame of every camera has a colour of its own; labels change every seven frames."""
    rng = np.random.default_rng(index)
    cameras = {
        key: ArrayFrames(
            np.repeat(
                np.repeat(rng.integers(0, 256, (length, 1, 1, 3), dtype=np.uint8), 12, axis=1), 16, axis=2
            )
        )
        for key in ("top", "side")
    }
    if labels is None:
        labels = [f"subtask {(k // 7 + index) % 4}" for k in range(length)]
    half = length // 2
    return Episode(
        source="painted",
        episode_index=index,
        fps=10.0,
        cameras=cameras,
        state=np.zeros((length, 2), np.float32),
        action=np.zeros((length, 2), np.float32),
        instructions=(
            InstructionSpan(0, f"first task of {index}"),
            InstructionSpan(half, f"second of {index}"),
        ),
        segments=segments_from_labels(labels),
    )


def without_timing(row: dict[str, object]) -> dict[str, object]:
    """A row or record without what a clock decides."""
    return {name: value for name, value in row.items() if name not in ("latency_ms", "timings_ms")}
