"""The trained planner at work: lockstep batches over sessions, every frame encoded once per session."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memer.contract import Contract
from memer.errors import MemerError
from memer.planners.base import PlannerRequest, PlannerResult
from memer.prompts import parse_answer
from memer.sample import FrameKey
from models.cache import roomy_cache
from models.prompt_encoder import EncodedSample, PromptEncoder
from models.qwen_vl import Attention, encode_frames, language_hidden, load_base, load_encoder


class QwenVLPlanner:
    """Greedy answers of a Qwen vision-language model; implements `memer.planners.base.Planner`.

    A frame's features are kept per session and reused while it stays in the window or the memory, so that a
    step encodes its new frame alone. The answers are those of single questions with every frame encoded anew.

    Args:
        model: as loaded, with or without adapters; switched to eval mode.
        encoder: prompt encoder under the same contract.
        contract: window numbers bound the feature cache.
        max_new_tokens: answer tokens at most, end included.
        max_batch: questions answered at once; more are split.
        cached_frames: frames kept per session; None keeps twice what one question shows.

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
    ) -> None:
        self.model = model.eval()
        self.encoder = encoder
        self.contract = contract
        self.max_new_tokens = max_new_tokens
        self.max_batch = max_batch
        shown = contract.shown_windows
        self.cached_frames = cached_frames or 2 * (shown.recent_frames_length + shown.keyframes_length)
        self.frames_encoded = 0
        self._features: dict[str, OrderedDict[FrameKey, Tensor]] = {}

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
        """Forget every frame of `session`; greedy answers need neither instruction nor seed."""
        self._features[session] = OrderedDict()

    def end_episode(self, session: str) -> None:
        """Free the features of `session`."""
        self._features.pop(session, None)

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
        prompts = [self.encoder.encode_question(request.question) for request in requests]
        marks.append(time.perf_counter())
        features = self._picture_features(requests, prompts)
        marks.append(time.perf_counter())
        answers = self._generate(prompts, features)
        marks.append(time.perf_counter())
        spans = [1e3 * (end - start) for start, end in pairwise(marks)]
        timings = dict(zip(("preprocess", "encode", "generate"), spans, strict=True))
        return [
            self._result(self.encoder.decode_answer(ids), request, timings)
            for ids, request in zip(answers, requests, strict=True)
        ]

    def _result(self, text: str, request: PlannerRequest, timings: dict[str, float]) -> PlannerResult:
        answer = parse_answer(text, num_positions=len(request.question.recent_keys))
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

    def _picture_features(
        self, requests: Sequence[PlannerRequest], prompts: Sequence[EncodedSample]
    ) -> list[Tensor]:
        """One [n, C] tensor per level for all picture tokens, prompt by prompt; encodes unknown frames."""
        new: list[tuple[OrderedDict[FrameKey, Tensor], FrameKey]] = []
        patches, grids = [], []
        for request, prompt in zip(requests, prompts, strict=True):
            known = self._features.setdefault(request.session, OrderedDict())
            missing: set[FrameKey] = set()
            for key, grid in zip(prompt.image_keys, prompt.image_grids, strict=True):
                if key in known or key in missing:
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
        for request, prompt in zip(requests, prompts, strict=True):
            known = self._features[request.session]
            for key in prompt.image_keys:
                known.move_to_end(key)
                used.append(known[key])
            while len(known) > max(self.cached_frames, len(set(prompt.image_keys))):
                known.popitem(last=False)
        return list(torch.cat(used, dim=1)) if used else []

    def _generate(self, prompts: Sequence[EncodedSample], features: list[Tensor]) -> list[list[int]]:
        """Greedy continuation of left-padded prompts until each has ended its turn."""
        device = self.model.device
        width = max(len(prompt) for prompt in prompts)
        input_ids = np.full((len(prompts), width), self.encoder.pad_id, dtype=np.int64)
        positions = np.zeros((4, len(prompts), width), dtype=np.int64)
        mask = np.zeros((len(prompts), width), dtype=bool)
        for row, prompt in enumerate(prompts):
            span = slice(width - len(prompt), width)
            input_ids[row, span] = prompt.input_ids
            positions[0, row, span] = np.arange(len(prompt))
            positions[1:, row, span] = prompt.positions
            mask[row, span] = True
        ids = torch.from_numpy(input_ids).to(device)
        places = torch.from_numpy(positions).to(device)
        attention = torch.from_numpy(mask).to(device)
        following = places[:, :, -1:] + 1  # the last prompt token is text, so all axes go on by one

        cache = roomy_cache(self.model.config.get_text_config(), room=self.max_new_tokens)
        answers: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))  # prompts still in the batch
        for step in range(self.max_new_tokens):
            hidden = language_hidden(
                self.model,
                ids,
                position_ids=places,
                features=features if step == 0 else (),
                attention_mask=attention,
                cache=cache,
            )
            token = self.model.lm_head(hidden[:, -1]).argmax(-1)
            for row, chosen in zip(rows, token.tolist(), strict=True):
                answers[row].append(chosen)
            going = [k for k, row in enumerate(rows) if self.encoder.turn_end_id not in answers[row]]
            if not going:
                break
            attention = torch.cat([attention, attention.new_ones(len(rows), 1)], dim=1)
            if len(going) <= len(rows) // 2:  # the few that ramble do not hold the others' places
                index = torch.tensor(going, device=device)
                cache.batch_select_indices(index)
                token, attention, following = token[index], attention[index], following[:, index]
                rows = [rows[k] for k in going]
            ids, places = token[:, None], following + step
        return answers
