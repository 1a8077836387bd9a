"""The trained planner at work: lockstep batches over sessions, every frame encoded once per session."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memer.contract import Contract
from memer.errors import MemerError
from memer.instructions import read_answer
from memer.planners.base import PlannerRequest, PlannerResult
from memer.sample import FrameKey
from models.decode import Dialogue, Turn, answer_greedily
from models.prompt_encoder import PromptEncoder
from models.qwen_vl import Attention, encode_frames, load_base, load_encoder


@dataclass(slots=True, eq=False, repr=False)
class _Session:
    """What is kept of one episode: features per frame, [levels, n, C] each, and what its questions left."""

    features: OrderedDict[FrameKey, Tensor] = field(default_factory=OrderedDict)
    dialogue: Dialogue = field(default_factory=Dialogue)


class QwenVLPlanner:
    """Greedy answers of a Qwen vision-language model; implements `memer.planners.base.Planner`.

    A frame's features are kept per session and reused while it stays in the window or the memory, so that a
    step encodes its new frame alone. Prompt tokens before the recent window and earlier answers are used
    again too (see `models.decode`). The answers are those of single questions with every frame encoded anew,
    as long as the weights do not change under a session.

    Args:
        model: as loaded, with or without adapters; switched to eval mode.
        encoder: prompt encoder under the same contract.
        contract: window numbers bound the feature cache.
        max_new_tokens: answer tokens at most, end included.
        max_batch: questions answered at once; more are split.
        cached_frames: frames kept per session; None keeps twice what one question shows.
        prefix_gib: keys and values kept for the next questions, of all sessions together; sessions beyond it
            compute their prompts in full. A prompt token takes 144 KiB at Qwen3-VL-4B's size.

    Attributes:
        frames_encoded: frames that went through the tower so far.
    """

    def __init__(
        self,
        model: Any,
        *,
        encoder: PromptEncoder,
        contract: Contract,
        max_new_tokens: int = 96,
        max_batch: int = 64,
        cached_frames: int | None = None,
        prefix_gib: float = 4.0,
    ) -> None:
        self.model = model.eval()
        self.encoder = encoder
        self.contract = contract
        self.max_new_tokens = max_new_tokens
        self.max_batch = max_batch
        shown = contract.shown_windows
        self.cached_frames = cached_frames or 2 * (shown.recent_frames_length + shown.keyframes_length)
        self.prefix_gib = prefix_gib
        self.frames_encoded = 0
        self._sessions: dict[str, _Session] = {}

    @classmethod
    def from_artifact(
        cls,
        path: Path | str,
        device: str = "cpu",
        *,
        attention: Attention = "sdpa",
        **settings: Any,
    ) -> "QwenVLPlanner":
        """Load an exported folder with its contract; float32 on CPU, bfloat16 elsewhere.

        Raises:
            SourceUnavailableError: folder, weights or contract are missing.
            MemerError: the contract is for another model family.
        """
        contract = Contract.load(path)
        encoder = load_encoder(path, contract)
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
        model = load_base(path, dtype=dtype, attention=attention).model.to(device)
        return cls(model, encoder=encoder, contract=contract, **settings)

    def start_episode(self, session: str, *, instruction: str, seed: int | None = None) -> None:
        """Forget everything of `session`; greedy answers need neither instruction nor seed."""
        self._sessions[session] = _Session()

    def end_episode(self, session: str) -> None:
        """Free what is kept of `session`."""
        self._sessions.pop(session, None)

    @torch.inference_mode()
    def plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        """Answer requests of different sessions; an answer that cannot be parsed is a result, not an error.

        Raises:
            MemerError: a picture is missing, or two requests name one session.
        """
        sessions = [request.session for request in requests]
        if len(set(sessions)) != len(sessions):
            raise MemerError(f"planner: session {max(sessions, key=sessions.count)!r} asks twice in one call")
        results: list[PlannerResult] = []
        for start in range(0, len(requests), self.max_batch):
            results += self._plan(requests[start : start + self.max_batch])
        return results

    def _plan(self, requests: Sequence[PlannerRequest]) -> list[PlannerResult]:
        marks = [time.perf_counter()]
        turns = [self._turn(request) for request in requests]
        marks.append(time.perf_counter())
        features = self._picture_features(requests, turns)
        marks.append(time.perf_counter())
        answer_greedily(
            self.model,
            turns,
            features=features,
            end_id=self.encoder.turn_end_id,
            max_new_tokens=self.max_new_tokens,
            prefix_bytes=self._prefix_room(requests),
        )
        marks.append(time.perf_counter())
        spans = [1e3 * (end - start) for start, end in pairwise(marks)]
        timings = dict(zip(("preprocess", "encode", "generate"), spans, strict=True))
        return [
            self._result(self.encoder.decode_answer(turn.answer), request, timings)
            for turn, request in zip(turns, requests, strict=True)
        ]

    def _turn(self, request: PlannerRequest) -> Turn:
        """The question, laid out; the next one may share what stands before its recent window."""
        prompt = self.encoder.encode_question(request.question)
        session = self._sessions.setdefault(request.session, _Session())
        keep = (*prompt.image_starts, len(prompt) - 1)[len(request.question.memory_keys)]
        return Turn(prompt=prompt, dialogue=session.dialogue, keep=keep)

    def _prefix_room(self, requests: Sequence[PlannerRequest]) -> int:
        """Bytes that the prefixes of the other sessions leave."""
        asking = {request.session for request in requests}
        others = [s.dialogue.prefix for name, s in self._sessions.items() if name not in asking]
        return int(self.prefix_gib * 2**30) - sum(prefix.num_bytes for prefix in others if prefix)

    def _result(self, text: str, request: PlannerRequest, timings: dict[str, float]) -> PlannerResult:
        answer = read_answer(
            text,
            self.contract.prompt,
            num_positions=len(request.question.recent_keys),
            subtasks=self.contract.subtasks,
        )
        latency = sum(timings.values())
        if not answer.ok:
            return PlannerResult(
                status="parse_error",
                raw_text=text,
                error=answer.error,
                latency_ms=latency,
                timings_ms=dict(timings),
            )
        invalid = tuple(p for p in answer.dropped if isinstance(p, int))
        return PlannerResult(
            status="ok",
            subtask=answer.subtask,
            positions=tuple(answer.positions) + invalid,
            raw_text=text,
            latency_ms=latency,
            timings_ms=dict(timings),
        )

    def _picture_features(self, requests: Sequence[PlannerRequest], turns: Sequence[Turn]) -> list[Tensor]:
        """One [n, C] tensor per level for the picture tokens that no turn skips; encodes unknown frames."""
        new: list[tuple[OrderedDict[FrameKey, Tensor], FrameKey]] = []
        patches, grids = [], []
        for request, turn in zip(requests, turns, strict=True):
            known = self._sessions[request.session].features
            missing: set[FrameKey] = set()
            prompt = turn.prompt
            for key, grid, start in zip(
                prompt.image_keys, prompt.image_grids, prompt.image_starts, strict=True
            ):
                if start < turn.skipped or key in known or key in missing:
                    continue
                missing.add(key)
                new.append((known, key))
                patches.append(self.encoder.geometry.patches(request.question.frames[key]))
                grids.append(grid)
        if new:
            stacked = torch.from_numpy(np.concatenate(patches)).to(self.model.device)
            levels = torch.stack(
                encode_frames(self.model, stacked, grids=grids, geometry=self.encoder.geometry)
            )
            counts = [rows * columns // self.encoder.geometry.merge_size**2 for rows, columns in grids]
            for (known, key), part in zip(new, levels.split(counts, dim=1), strict=True):
                known[key] = part.clone()  # a view would keep the whole batch alive
            self.frames_encoded += len(new)
        used: list[Tensor] = []
        for request, turn in zip(requests, turns, strict=True):
            known = self._sessions[request.session].features
            for key, start in zip(turn.prompt.image_keys, turn.prompt.image_starts, strict=True):
                if key in known:
                    known.move_to_end(key)
                if start >= turn.skipped:
                    used.append(known[key])
            while len(known) > max(self.cached_frames, len(set(turn.prompt.image_keys))):
                known.popitem(last=False)
        return list(torch.cat(used, dim=1)) if used else []
