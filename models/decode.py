"""Greedy answers with few tokens and passes; the same as one token at a time from nothing, up to rounding.

What a session's last question had in front of its recent window (system text, task, memory images) is not
computed again. And a planner mostly repeats itself, so that an earlier answer of the session follows the
prompt as a draft and is checked in the same pass: after each token the model's own choice is known, and the
choices count up to and including the first that differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from memer.sample import FrameKey
from models.cache import can_go_back, keep_rows, roomy_cache, row_states
from models.prompt_encoder import EncodedSample
from models.qwen_vl import language_hidden

#: Different answers of a session that serve as drafts.
KEPT_ANSWERS = 8


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Prefix:
    """Keys and values of a prompt's first tokens.

    Attributes:
        input_ids: int64[P].
        image_keys: the prompt's pictures, in order; those behind the first P tokens do not matter.
        states: per layer [2, heads, P, head_dim].
    """

    input_ids: NDArray[np.int64]
    image_keys: tuple[FrameKey, ...]
    states: list[Tensor]

    @property
    def num_bytes(self) -> int:
        """Memory of the states."""
        return sum(states.nbytes for states in self.states)

    def shared(self, prompt: EncodedSample) -> int:
        """Tokens that `prompt` begins with too, never all of it; a picture is known by its key."""
        count = min(len(self.input_ids), len(prompt) - 1)
        different = np.flatnonzero(self.input_ids[:count] != prompt.input_ids[:count])
        if len(different):
            count = int(different[0])
        for mine, theirs, start in zip(self.image_keys, prompt.image_keys, prompt.image_starts, strict=False):
            if mine != theirs:
                count = min(count, start)
                break
        return count


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Dialogue:
    """What a session's earlier questions leave for its next one.

    Attributes:
        prefix: of the last question; None when nothing is kept.
        answers: different ones without the end of the turn, newest first; at most KEPT_ANSWERS.
    """

    prefix: Prefix | None = None
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def remember(self, answer: tuple[int, ...]) -> None:
        """Put an answer in front."""
        others = [known for known in self.answers if known != answer]
        self.answers = [answer, *others][:KEPT_ANSWERS]

    def draft(self, begun: Sequence[int], *, others: Sequence[tuple[int, ...]] = ()) -> list[int]:
        """What may follow the tokens `begun` of an answer; a wrong guess costs time and changes nothing.

        Args:
            begun: tokens chosen so far.
            others: more answers to follow, where none of the session's own begins alike.

        >>> dialogue = Dialogue(answers=[(1, 2, 3, 4), (1, 5, 6, 4)])
        >>> dialogue.draft([]), dialogue.draft([1, 5]), dialogue.draft([9], others=[(9, 8)])
        ([1, 2, 3, 4], [6, 4], [8])
        >>> dialogue.draft([7, 2, 3])
        [4]
        """
        start = tuple(begun)
        for answer in (*self.answers, *others):
            if answer[: len(start)] == start:
                return list(answer[len(start) :])
        newest = self.answers[0] if self.answers else ()
        for end in range(2, len(newest)):
            if newest[end - 2 : end] == start[-2:]:
                return list(newest[end:])
        return []


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Turn:
    """One prompt on its way to an answer.

    Attributes:
        prompt: the question.
        dialogue: of its session.
        keep: leading prompt tokens whose states are left for the next question.
        skipped: leading prompt tokens whose states are known from the last one.
        answer: tokens chosen so far, the end of the turn included.
    """

    prompt: EncodedSample
    dialogue: Dialogue
    keep: int
    skipped: int = field(init=False)
    answer: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        prefix = self.dialogue.prefix
        self.skipped = prefix.shared(self.prompt) if prefix else 0

    def known(self) -> list[Tensor]:
        """States of the skipped tokens, per layer; empty when there are none."""
        prefix = self.dialogue.prefix
        return [states[:, :, : self.skipped] for states in prefix.states] if prefix else []

    def unseen(self, draft: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """int64[L] ids and int64[4, L] positions of what the model has not seen, with a draft behind it."""
        first = max(len(self.answer) - 1, 0)
        ids = np.array([*self.answer[first:], *draft], dtype=np.int64)
        last = np.array([len(self.prompt) - 1, *self.prompt.positions[:, -1]])
        # The last prompt token is text, so all axes go on by one.
        places = last[:, None] + 1 + first + np.arange(len(ids))
        if self.answer:
            return ids, places
        text = np.arange(self.skipped, len(self.prompt))
        ahead = np.concatenate([text[None], self.prompt.positions[:, self.skipped :]])
        return (
            np.concatenate([self.prompt.input_ids[self.skipped :], ids]),
            np.concatenate([ahead, places], axis=1),
        )


def answer_greedily(
    model: Any,
    turns: Sequence[Turn],
    *,
    features: Sequence[Tensor],
    end_id: int,
    max_new_tokens: int,
    prefix_bytes: int,
) -> None:
    """Complete the answer of every turn; leave it and the prefix in its dialogue.

    Models with a recurrent state can neither share a prefix nor take back a draft, so they get one token at
    a time.

    Args:
        model: as loaded.
        turns: of different dialogues.
        features: one [n, C] tensor per level for the pictures behind the skipped tokens, turn by turn.
        end_id: token that ends a turn.
        max_new_tokens: answer tokens at most, end included.
        prefix_bytes: for the prefixes of these turns together; one that does not fit is not kept.
    """
    device, config = model.device, model.config.get_text_config()
    flexible = can_go_back(config)
    cache = roomy_cache(config, room=max_new_tokens, known=[turn.known() for turn in turns])
    rows = list(turns)  # in the batch; the answered ones leave when they are half of it
    going = set(range(len(rows)))
    others = list(dict.fromkeys(answer for turn in turns for answer in turn.dialogue.answers))
    width = max(turn.skipped for turn in turns)
    seen = np.array([np.arange(width) >= width - turn.skipped for turn in turns])
    first = True
    while going:
        drafts = [
            turn.dialogue.draft(turn.answer, others=others)[: max_new_tokens - len(turn.answer) - 1]
            if flexible and row in going
            else []
            for row, turn in enumerate(rows)
        ]
        ids, places, real = _aligned(rows, drafts, padding_id=end_id)
        seen = np.concatenate([seen, real], axis=1)
        longest = max(map(len, drafts))
        columns = seen.shape[1] - longest
        hidden = language_hidden(
            model,
            torch.from_numpy(ids).to(device),
            position_ids=torch.from_numpy(places).to(device),
            features=features if first else (),
            attention_mask=torch.from_numpy(seen).to(device),
            cache=cache,
        )
        chosen = model.lm_head(hidden[:, -1 - longest :]).argmax(-1).tolist()
        if first and flexible:
            _keep_prefixes(turns, cache, columns=columns, room=prefix_bytes)
        first = False

        agreed = [_agreement(draft, tokens) for draft, tokens in zip(drafts, chosen, strict=True)]
        for row in list(going):
            answer = rows[row].answer
            answer += chosen[row][: agreed[row] + 1]
            if answer[-1] == end_id or len(answer) == max_new_tokens:
                going.remove(row)
        kept = max(agreed)
        if kept < longest:
            cache.crop(kept - longest)
        # Where another row's draft was accepted further, refused tokens stay in the cache and are hidden.
        seen = seen[:, : columns + kept]
        seen[:, columns:] = np.arange(kept) < np.array(agreed)[:, None]
        if going and len(going) <= len(rows) // 2:
            stay = sorted(going)
            keep_rows(cache, torch.tensor(stay, device=device))
            rows, seen, going = [rows[row] for row in stay], seen[stay], set(range(len(stay)))

    no_draft = {end_id, model.config.image_token_id, model.config.video_token_id}
    for turn in turns:
        ends = [k for k, token in enumerate(turn.answer) if token in no_draft]
        turn.dialogue.remember(tuple(turn.answer[: ends[0]] if ends else turn.answer))


def _aligned(
    rows: Sequence[Turn], drafts: Sequence[list[int]], *, padding_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """ids [R, L], positions [4, R, L] and mask [R, L] of the next pass; drafts begin at one column.

    Mask of two rows, of 4 tokens and a draft of 1, and of 2 tokens and a draft of 3:

        1 1 1 1 1 0 0
        0 0 1 1 1 1 1
    """
    parts = [turn.unseen(draft) for turn, draft in zip(rows, drafts, strict=True)]
    front = max(len(ids) - len(draft) for (ids, _), draft in zip(parts, drafts, strict=True))
    shape = (len(rows), front + max(map(len, drafts)))
    all_ids = np.full(shape, padding_id, dtype=np.int64)
    all_places = np.zeros((4, *shape), dtype=np.int64)
    real = np.zeros(shape, dtype=bool)
    for row, ((ids, places), draft) in enumerate(zip(parts, drafts, strict=True)):
        stop = front + len(draft)
        span = slice(stop - len(ids), stop)
        all_ids[row, span], all_places[:, row, span], real[row, span] = ids, places, True
    return all_ids, all_places, real


def _agreement(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """Draft tokens that are the model's own choice, up to the first that is not."""
    return next((k for k, token in enumerate(draft) if token != tokens[k]), len(draft))


def _keep_prefixes(turns: Sequence[Turn], cache: Cache, *, columns: int, room: int) -> None:
    """Leave what the next questions may share, as long as `room` bytes last; prompts end before `columns`."""
    for row, turn in enumerate(turns):
        prompt, old = turn.prompt, turn.dialogue.prefix
        shared = min(turn.skipped, turn.keep)
        states = [layer[:, :, :shared] for layer in old.states] if old else []
        if old is None or len(old.input_ids) != turn.keep or shared < turn.keep:
            first = columns - len(prompt) + shared
            new = row_states(cache, row, columns=slice(first, first + turn.keep - shared))
            states = [torch.cat(pair, dim=2) for pair in zip(states, new, strict=True)] if states else new
        prefix = Prefix(prompt.input_ids[: turn.keep], prompt.image_keys, states)
        room -= prefix.num_bytes
        turn.dialogue.prefix = prefix if room >= 0 else None
