"""The exported language planner as a part of a plan-following policy.

Source: MaP-WAM specification, section 6.
"""

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memer.errors import UsageError
from memer.executors.base import Pixels
from memer.plan_windows import next_subtask_question
from memer.planners.base import PlannerRequest
from models.planner import QwenVLPlanner

log = logging.getLogger(__name__)

#: Answer tokens at most, the end of the turn included.
MAX_NEW_TOKENS = 64

#: Streams of one model need sessions of their own.
_STREAMS = itertools.count(1)


class QwenLanguagePlanner:
    """A `LanguagePlanner` around a Qwen vision-language model; greedy.

    The pictures of an episode are encoded once: they are known again as long as instruction and earlier
    pictures stay the same, and anything else begins a new episode.

    Args:
        planner: answers questions of the form `segments`.

    Raises:
        UsageError: it was trained on another form.
    """

    def __init__(self, planner: QwenVLPlanner) -> None:
        form = planner.contract.prompt.form
        if form != "segments":
            raise UsageError(
                f"contract.prompt.form: {form!r}, a language planner needs segments; "
                "train with contract=map_language_tabletop or map_language_rmbench"
            )
        self.planner = planner
        self.contract = planner.contract
        self._session = f"stream {next(_STREAMS)}"
        self._instruction = ""
        self._images: list[Pixels] = []

    @classmethod
    def from_artifact(cls, path: Path | str, device: str = "cpu", **settings: Any) -> "QwenLanguagePlanner":
        """Load an exported folder; see `QwenVLPlanner.from_artifact`."""
        settings = {"max_new_tokens": MAX_NEW_TOKENS} | settings
        return cls(QwenVLPlanner.from_artifact(path, device, **settings))

    def fork(self) -> "QwenLanguagePlanner":
        """Another stream with the same model, so that episodes can run side by side."""
        return QwenLanguagePlanner(self.planner)

    def next(self, instruction: str, done: Sequence[str], images: Sequence[Pixels]) -> str:
        """The text of subtask len(done) + 1; the last one again where the model answers nothing.

        Args:
            instruction: of the whole task.
            done: finished subtasks in order, repetitions kept.
            images: head views uint8[h, w, 3], prepared as in training; one more than `done`.
        """
        known = zip(self._images, images, strict=False)
        if (
            instruction != self._instruction
            or len(images) < len(self._images)
            or not all(np.array_equal(mine, theirs) for mine, theirs in known)
        ):
            self.planner.start_episode(self._session, instruction=instruction)
        self._instruction, self._images = instruction, list(images)
        question = next_subtask_question(
            instruction=instruction, done=done, images=images, source=self._session, episode_index=0
        )
        number = len(done) + 1
        request = PlannerRequest(session=self._session, request_id=number, step=number, question=question)
        result = self.planner.plan([request])[0]
        if result.subtask:
            return result.subtask
        repeated = done[-1] if done else instruction
        log.warning(
            "subtask %d: the planner answered %r; going on with %r", number, result.raw_text, repeated
        )
        return repeated
