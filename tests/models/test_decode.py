"""Shared prefixes and drafts: fewer tokens and passes, the same answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

import models.decode
from memer.planners.base import PlannerRequest
from memer.sample import PlannerQuestion, PlannerSample
from models.cache import RoomyLayer
from models.decode import KEPT_ANSWERS, Dialogue, Prefix, Turn
from models.lit.planner import PlannerModule
from models.optim import OptimSettings
from models.planner import QwenVLPlanner
from models.prompt_encoder import PromptEncoder
from tests.models.reference import single_answer
from tests.models.samples import INSTRUCTION, SUBTASKS, question, tiny_contract

TOKENS = 24


def coloured(rng: np.random.Generator, *, episode: int, step: int, memory: int) -> PlannerSample:
    """The newest picture's colour tells the subtask and the oldest one's brightness the position."""
    subtask, position = int(rng.integers(3)), int(rng.integers(3))
    recent = tuple(("made", episode, step - i) for i in (2, 1, 0))
    kept = tuple(("made", episode, i) for i in range(memory))
    frames = {key: rng.integers(0, 60, (64, 64, 3), dtype=np.uint8) for key in kept + recent}
    frames[recent[-1]][..., subtask] = 250
    frames[recent[0]][:] = 40 + 80 * position
    asked = PlannerQuestion(instruction=INSTRUCTION, memory_keys=kept, recent_keys=recent, frames=frames)
    return PlannerSample(
        sample_id=f"episode_{episode:06d}_t{step:06d}",
        source="made",
        episode_index=episode,
        step=step,
        question=asked,
        subtask=SUBTASKS[subtask],
        positions=(position,) if position else (),
    )


@pytest.fixture(scope="module")
def trained(base: Path) -> PlannerModule:
    """Trained until it answers in the right form and with different words for different pictures."""
    module = PlannerModule(
        str(base), contract=tiny_contract(), optim=OptimSettings(total_steps=1), pack_tokens=0
    )
    module.configure_model()
    rng, collate = np.random.default_rng(0), module.make_collator()
    optimizer = torch.optim.AdamW(module.trainable().values(), lr=2e-3)
    for step in range(40):
        batch = [coloured(rng, episode=8 * step + i, step=60, memory=i % 4) for i in range(8)]
        module.answer_losses(collate(batch))[0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    module.model.eval()
    return module


def rounds(sessions: int = 5) -> list[list[PlannerRequest]]:
    """Memory stays, grows, stays, shrinks and is gone; sessions hold different numbers of images."""
    rng = np.random.default_rng(1)
    frames: dict[Any, Any] = {}
    asked = []
    for step, memory in enumerate((1, 1, 2, 3, 3, 1, 0)):
        requests = []
        for i in range(sessions):
            made = coloured(rng, episode=i, step=60 + step, memory=max(0, memory - i % 2)).question
            known = {key: frames.setdefault(key, frame) for key, frame in made.frames.items()}
            same = PlannerQuestion(
                instruction=made.instruction,
                memory_keys=made.memory_keys,
                recent_keys=made.recent_keys,
                frames=known,
            )
            requests.append(
                PlannerRequest(session=f"session {i}", request_id=step, step=60 + step, question=same)
            )
        asked.append(requests)
    return asked


def planner_of(model: Any, encoder: PromptEncoder, **settings: Any) -> QwenVLPlanner:
    return QwenVLPlanner(model, encoder=encoder, contract=encoder.contract, max_new_tokens=TOKENS, **settings)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shape of the ids of every pass through the language model."""
    shapes: list[tuple[int, int]] = []
    plain = models.decode.language_hidden

    def counted(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(input_ids.shape))
        return plain(model, input_ids, **kwargs)

    monkeypatch.setattr(models.decode, "language_hidden", counted)
    return shapes


@pytest.mark.parametrize("prefix_gib", [4.0, 0.0, 100_000 / 2**30])
def test_a_trained_model_answers_what_generate_answers(
    base: Path, trained: PlannerModule, encoder: PromptEncoder, passes: list, prefix_gib: float
) -> None:
    plain = AutoModelForImageTextToText.from_pretrained(base).eval()
    plain.load_state_dict(trained.model.state_dict())
    planner = planner_of(trained.model, encoder, prefix_gib=prefix_gib)
    texts, one_by_one = [], 0
    for requests in rounds():
        answers = planner.plan(requests)
        for request, result in zip(requests, answers, strict=True):
            assert result.raw_text == single_answer(plain, encoder, request.question, max_new_tokens=TOKENS)
            assert result.status == "ok", "trained enough"
        texts += [result.raw_text for result in answers]
        one_by_one += max(len(encoder.tokenizer(result.raw_text)["input_ids"]) + 1 for result in answers)
    assert len(set(texts)) >= 4, "the pictures have to matter"
    assert len(passes) < one_by_one / 2
    kept = [session.dialogue.prefix for session in planner._sessions.values()]
    assert sum(prefix.num_bytes for prefix in kept if prefix) <= prefix_gib * 2**30
    assert all(kept) == (prefix_gib == 4.0)


def test_bfloat16_drafts_and_prefixes_answer_alike(trained: PlannerModule, encoder: PromptEncoder) -> None:
    """Rounding differs between batches in bfloat16; answers that are certain stay."""
    model = trained.model.to(torch.bfloat16)
    try:
        planner, agree, total = planner_of(model, encoder), 0, 0
        for requests in rounds(sessions=3)[:4]:
            for request, result in zip(requests, planner.plan(requests), strict=True):
                alone = planner_of(model, encoder).plan([request])[0]
                agree, total = agree + (alone.raw_text == result.raw_text), total + 1
        assert agree >= 0.9 * total
    finally:
        model.float()


def test_an_unchanged_memory_is_not_computed_again(
    trained: PlannerModule, encoder: PromptEncoder, passes: list
) -> None:
    planner = planner_of(trained.model, encoder)
    first, second = (
        PlannerRequest(session="s", request_id=t, step=t, question=question(step=t, memory=3))
        for t in (60, 65)
    )
    planner.plan([first])
    prompt = encoder.encode_question(second.question)
    before = len(passes)
    planner.plan([second])
    draft = len(planner._sessions["s"].dialogue.answers[-1])
    assert passes[before][1] == len(prompt) - prompt.image_starts[3] + min(draft, TOKENS - 1)


def test_a_start_forgets_prefix_and_answers(trained: PlannerModule, encoder: PromptEncoder) -> None:
    planner = planner_of(trained.model, encoder)
    planner.plan(rounds(sessions=1)[0])
    dialogue = planner._sessions["session 0"].dialogue
    assert dialogue.prefix is not None
    assert dialogue.answers
    planner.start_episode("session 0", instruction="x")
    dialogue = planner._sessions["session 0"].dialogue
    assert (dialogue.prefix, dialogue.answers) == (None, [])
    planner.end_episode("session 0")
    assert not planner._sessions


def test_a_prefix_is_shared_up_to_the_first_other_picture(encoder: PromptEncoder) -> None:
    old = encoder.encode_question(question(memory=2))
    prefix = Prefix(old.input_ids[: old.image_starts[2]], old.image_keys, [])

    def shared(asked: PlannerQuestion) -> int:
        return prefix.shared(encoder.encode_question(asked))

    assert shared(question(memory=2, step=65)) == old.image_starts[2]
    longer = encoder.encode_question(question(memory=3))
    # The second picture and the mark that ends it; then a third begins where the header was.
    assert prefix.shared(longer) == longer.image_starts[2] - 1
    assert shared(question(memory=2, episode=1)) == old.image_starts[0]
    assert shared(question(memory=2, instruction="look")) < old.image_starts[0]
    whole = Prefix(old.input_ids, old.image_keys, [])
    assert whole.shared(old) == len(old) - 1, "one token has to be computed"


def test_known_answers_are_different_and_few() -> None:
    dialogue = Dialogue()
    for token in [*range(KEPT_ANSWERS + 3), 5]:
        dialogue.remember((token,))
    assert dialogue.answers[0] == (5,)
    assert len(dialogue.answers) == len(set(dialogue.answers)) == KEPT_ANSWERS


def test_a_picture_token_in_an_answer_is_no_draft(
    trained: PlannerModule, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt with a draft is searched for picture tokens; an untrained model may write them."""
    planner = planner_of(trained.model, encoder)
    head = trained.model.lm_head.forward

    def drawing(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).clone()
        logits[..., encoder.image_id] = 1e9
        return logits

    monkeypatch.setattr(trained.model.lm_head, "forward", drawing)
    for requests in rounds(sessions=2)[:2]:
        assert [result.status for result in planner.plan(requests)] == ["parse_error"] * 2


def test_a_turn_places_its_draft_behind_the_prompt(encoder: PromptEncoder) -> None:
    prompt = encoder.encode_question(question())
    turn = Turn(prompt=prompt, dialogue=Dialogue(), keep=0)
    ids, places = turn.unseen([7, 8])
    assert ids[-2:].tolist() == [7, 8]
    assert places[0].tolist() == list(range(len(prompt) + 2))
    assert (np.diff(places[1:, -3:], axis=1) == 1).all()
    turn.answer = [7, 9]
    ids, places = turn.unseen([4])
    assert ids.tolist() == [9, 4]
    assert places[:, 0].tolist() == [len(prompt) + 1, *(prompt.positions[:, -1] + 2)]


def test_a_full_layer_grows_and_forgets_its_newest_columns() -> None:
    states = torch.arange(12.0).view(2, 1, 3, 2)
    layer = RoomyLayer(room=1, known=[torch.ones(2, 1, 2, 2), None])
    assert layer.get_seq_length() == 2
    keys, _ = layer.update(states, -states)
    assert keys[0, 0, :2].tolist() == [[1, 1], [1, 1]]
    assert keys[1, 0, :2].tolist() == [[0, 0], [0, 0]]
    layer.update(states[:, :, :1], states[:, :, :1])
    layer.crop(-1)
    for _ in range(3):
        keys, values = layer.update(states[:, :, :1], -states[:, :, :1])
    assert layer.get_seq_length() == keys.shape[2] == 8
    torch.testing.assert_close(keys[:, :, 2:5], states)
    torch.testing.assert_close(values[:, :, 2:], -torch.cat([states, *[states[:, :, :1]] * 3], dim=2))
    layer.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(layer.keys, keys[1:])
