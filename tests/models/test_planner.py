from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from memer.errors import MemerError
from memer.planners.base import PlannerRequest
from models.lora import LoraSettings, inject_lora
from models.planner import QwenVLPlanner
from models.prompt_encoder import PromptEncoder
from models.qwen_vl import LoadedBase, load_base
from tests.models.reference import single_answer
from tests.models.samples import question


def requests(step: int, sessions: int = 3) -> list[PlannerRequest]:
    """Sessions with different numbers of pictures, so that prompts need left padding."""
    return [
        PlannerRequest(
            session=f"session {i}",
            request_id=step,
            step=step,
            question=question(episode=i, step=step, recent=1 + i % 4, memory=i % 3),
        )
        for i in range(sessions)
    ]


def make_planner(loaded: LoadedBase, encoder: PromptEncoder, **settings: Any) -> QwenVLPlanner:
    settings = {"max_new_tokens": 12, "contract": encoder.contract} | settings
    return QwenVLPlanner(loaded.model, encoder=encoder, **settings)


@pytest.fixture(scope="module")
def lively(base) -> LoadedBase:
    """Larger language weights, so that greedy answers of an untrained model differ between questions."""
    loaded = load_base(base)
    with torch.no_grad():
        for parameter in loaded.model.model.language_model.layers.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    return loaded


@pytest.mark.parametrize("max_batch", [64, 2])
def test_lockstep_equals_single_questions_with_frames_encoded_anew(
    base, lively: LoadedBase, encoder: PromptEncoder, max_batch: int
) -> None:
    plain = AutoModelForImageTextToText.from_pretrained(base).eval()
    plain.load_state_dict(lively.model.state_dict())
    planner = make_planner(lively, encoder, max_batch=max_batch)
    texts = []
    for step in (60, 65, 70):
        asked = requests(step, sessions=5)
        for request, result in zip(asked, planner.plan(asked), strict=True):
            assert result.raw_text == single_answer(plain, encoder, request.question, max_new_tokens=12)
            texts.append(result.raw_text)
    assert len(set(texts)) > 3, "the questions have to matter"


def test_a_step_encodes_only_frames_it_has_not_seen(lively: LoadedBase, encoder: PromptEncoder) -> None:
    planner = make_planner(lively, encoder, max_new_tokens=1)
    seen: dict[str, set] = {}
    for step in (60, 65, 70):
        asked = requests(step)
        planner.plan(asked)
        for request in asked:
            seen.setdefault(request.session, set()).update(request.question.image_keys)
        assert planner.frames_encoded == sum(len(keys) for keys in seen.values())


def test_start_and_end_of_an_episode_free_its_frames(lively: LoadedBase, encoder: PromptEncoder) -> None:
    planner = make_planner(lively, encoder, max_new_tokens=1)
    asked = requests(60, sessions=1)
    planner.start_episode("session 0", instruction="x")
    planner.plan(asked)
    first = planner.frames_encoded
    planner.plan(asked)
    assert planner.frames_encoded == first
    planner.end_episode("session 0")
    planner.plan(asked)
    assert planner.frames_encoded == 2 * first
    planner.start_episode("session 0", instruction="x")
    planner.plan(asked)
    assert planner.frames_encoded == 3 * first


def test_the_cache_is_bounded_and_eviction_changes_no_answer(
    lively: LoadedBase, encoder: PromptEncoder
) -> None:
    small = make_planner(lively, encoder, cached_frames=4)
    large = make_planner(lively, encoder, cached_frames=1_000)
    for step, memory in ((60, 2), (80, 0), (100, 2)):
        asked = [
            PlannerRequest(
                session="s", request_id=step, step=step, question=question(step=step, memory=memory)
            )
        ]
        assert small.plan(asked)[0].raw_text == large.plan(asked)[0].raw_text
    assert len(small._sessions["s"].features) == 6, (
        "what the last question shows, although that is more than 4"
    )
    assert small.frames_encoded == large.frames_encoded + 2, "the memory images, evicted in between"


def test_an_unreadable_answer_is_a_result(loaded: LoadedBase, encoder: PromptEncoder) -> None:
    planner = make_planner(loaded, encoder)
    result = planner.plan(requests(60, sessions=1))[0]
    assert result.status == "parse_error"
    assert result.subtask is None
    assert result.error
    assert set(result.timings_ms) == {"preprocess", "encode", "generate"}
    assert result.latency_ms == pytest.approx(sum(result.timings_ms.values()))


def test_a_good_answer_is_parsed_with_its_raw_positions(
    loaded: LoadedBase, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = make_planner(loaded, encoder)
    text = '{"current_subtask": "look inside the left bin", "keyframe_positions": [2, 77]}'
    monkeypatch.setattr(encoder, "decode_answer", lambda ids: text)
    result = planner.plan(requests(60, sessions=1))[0]
    assert (result.status, result.subtask) == ("ok", "look inside the left bin")
    assert sorted(result.positions) == [2, 77]
    assert result.raw_text == text


def test_one_session_cannot_ask_twice_at_once(loaded: LoadedBase, encoder: PromptEncoder) -> None:
    with pytest.raises(MemerError, match="'session 0' asks twice"):
        make_planner(loaded, encoder).plan(requests(60, sessions=1) * 2)


def test_no_requests_no_results(loaded: LoadedBase, encoder: PromptEncoder) -> None:
    assert make_planner(loaded, encoder).plan([]) == []


def test_artifact_folder_answers_like_the_model(base, loaded, encoder: PromptEncoder, tmp_path) -> None:
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    encoder.contract.save(tmp_path)
    planner = QwenVLPlanner.from_artifact(tmp_path, "cpu", max_new_tokens=12)
    asked = requests(60)
    expected = make_planner(loaded, encoder).plan(asked)
    assert [r.raw_text for r in planner.plan(asked)] == [r.raw_text for r in expected]


def test_an_adapted_model_plans_too(base, encoder: PromptEncoder) -> None:
    adapted = load_base(base)
    inject_lora(adapted.model, LoraSettings(rank=2))
    untouched = make_planner(load_base(base), encoder).plan(requests(60))
    fresh = make_planner(adapted, encoder).plan(requests(60))
    assert [r.raw_text for r in fresh] == [r.raw_text for r in untouched], "a new adapter changes nothing"
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    changed = make_planner(adapted, encoder).plan(requests(60))
    assert [r.raw_text for r in changed] != [r.raw_text for r in untouched]


def test_rows_that_have_ended_leave_the_batch(
    lively: LoadedBase, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of five answers end early; the fifth goes on alone and stays what it was."""
    asked = requests(60, sessions=5)
    free = [r.raw_text for r in make_planner(lively, encoder, max_new_tokens=10).plan(asked)]
    planner = make_planner(lively, encoder, max_new_tokens=10)
    widths: list[int] = []
    ends = iter([[False] * 5, [True, False, True, True, True], *[[False]] * 8])
    head = lively.model.lm_head.forward

    def ending(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).clone()
        widths.append(len(logits))
        logits[torch.tensor(next(ends)), -1, encoder.turn_end_id] = 1e9
        return logits

    monkeypatch.setattr(lively.model.lm_head, "forward", ending)
    texts = [result.raw_text for result in planner.plan(asked)]
    assert widths == [5, 5] + [1] * 8
    monkeypatch.undo()
    assert texts[1] == free[1]
    assert all(len(texts[k]) < len(free[k]) for k in (0, 2, 3, 4))
