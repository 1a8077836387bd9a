"""The language planner on a tiny Qwen3.5: answers, streams, adapters, export."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText

from callbacks.answers import answer_scores
from callbacks.reload import check_reload
from callbacks.tuned import TunedModel
from conf.compose import compose
from memer.artifact import load_part
from memer.contract import PromptSettings
from memer.errors import UsageError
from memer.executors.base import LanguagePlanner
from models.lit.planner import PlannerModule
from models.lora import LoraSettings, inject_lora
from models.map_language import QwenLanguagePlanner
from models.planner import QwenVLPlanner
from models.prompt_encoder import END, LABEL
from models.qwen_vl import load_base, load_encoder
from models.tiny import TinySize
from tests.models.language_planner import (
    INSTRUCTION,
    SUBTASKS,
    lively,
    requests,
    sample,
    segments_contract,
    tiny_qwen35,
    view,
)
from tests.models.reference import single_answer


@pytest.fixture(scope="module")
def base35(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen35(tmp_path_factory.mktemp("base35") / "tiny")


@pytest.fixture(scope="module")
def lively35(base35: Path) -> Any:
    return lively(base35).model


def answers(base: Path, model: Any, **settings: Any) -> QwenVLPlanner:
    contract = segments_contract()
    return QwenVLPlanner(
        model, encoder=load_encoder(base, contract), contract=contract, **({"max_new_tokens": 10} | settings)
    )


def test_the_tiny_base_mixes_linear_and_full_attention(base35: Path, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(base35)
    assert model.config.model_type == "qwen3_5"
    assert model.config.text_config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    again = tiny_qwen35(tmp_path / "again")
    name = "model.safetensors"
    assert (again / name).read_bytes() == (base35 / name).read_bytes()
    with pytest.raises(UsageError, match=r"TinySize\.full_attention_interval: 5"):
        TinySize(family="qwen3_5", full_attention_interval=5)


def test_trained_are_the_instruction_and_the_end_of_the_turn(base35: Path) -> None:
    encoder = load_encoder(base35, segments_contract())
    encoded = encoder.encode_sample(sample(2))
    trained = encoded.input_ids[encoded.kinds >= 0].tolist()
    assert encoder.decode_answer(trained) == SUBTASKS[1]
    kinds = encoded.kinds[encoded.kinds >= 0].tolist()
    assert kinds == [LABEL] * (len(kinds) - 1) + [END]
    assert encoded.input_ids.tolist().count(encoder.image_id) == 3 * 2, "64 x 32 px are two tokens"
    prompt = encoder.encode_question(sample(2).question)
    assert prompt.input_ids.tolist() == encoded.input_ids[: len(prompt)].tolist()


@pytest.mark.parametrize("max_batch", [64, 2])
def test_a_batch_of_different_lengths_answers_like_single_questions(
    base35: Path, lively35: Any, max_batch: int
) -> None:
    planner = answers(base35, lively35, max_batch=max_batch)
    plain = AutoModelForImageTextToText.from_pretrained(base35).eval()
    plain.load_state_dict(lively35.state_dict())
    texts = []
    for done in ((0, 3, 1), (1, 4, 2)):  # the second time, sessions go on
        batch = requests(*done)
        for request, result in zip(batch, planner.plan(batch), strict=True):
            expected = single_answer(plain, planner.encoder, request.question, max_new_tokens=10)
            assert result.raw_text == expected
            texts.append(expected)
    assert len(set(texts)) > 4, "the questions have to matter"


def test_rows_leave_the_batch_of_a_recurrent_model(
    base35: Path, lively35: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four answers end early; the last one goes on alone and stays what it was."""
    batch = requests(0, 2, 1, 3)
    free = [result.raw_text for result in answers(base35, lively35).plan(batch)]
    planner = answers(base35, lively35)
    head, widths = lively35.lm_head.forward, []

    def ending(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).clone()
        widths.append(len(logits))
        if len(widths) == 2:
            logits[torch.tensor([0, 2, 3]), -1, planner.encoder.turn_end_id] = 1e9
        return logits

    monkeypatch.setattr(lively35.lm_head, "forward", ending)
    texts = [result.raw_text for result in planner.plan(batch)]
    assert widths == [4, 4] + [1] * (len(widths) - 2)
    assert texts[1] == free[1]
    assert len(widths) > 4


def test_next_asks_about_the_finished_subtasks(base35: Path, lively35: Any) -> None:
    planner = QwenLanguagePlanner(answers(base35, lively35))
    protocol: LanguagePlanner = planner
    reference = answers(base35, lively35)
    for done in range(3):
        images = [view(k) for k in range(done + 1)]
        expected = reference.plan([requests(done)[0]])[0]
        said = protocol.next(INSTRUCTION, SUBTASKS[:1] * done, images)
        assert said == (expected.subtask or (SUBTASKS[0] if done else INSTRUCTION))
        assert planner.planner.frames_encoded == done + 1, "each picture is encoded once"


def test_another_episode_or_stream_shares_nothing(base35: Path, lively35: Any) -> None:
    planner = QwenLanguagePlanner(answers(base35, lively35))
    planner.next(INSTRUCTION, SUBTASKS[:1], [view(0), view(1)])
    fresh = QwenLanguagePlanner(answers(base35, lively35)).next(INSTRUCTION, (), [view(7)])
    assert planner.next(INSTRUCTION, (), [view(7)]) == fresh
    counted = planner.planner.frames_encoded
    planner.next(INSTRUCTION + "!", (), [view(7)])
    assert planner.planner.frames_encoded == counted + 1, "another task is another episode"
    other = planner.fork()
    assert other.next(INSTRUCTION, (), [view(7)]) == fresh
    assert other.planner is planner.planner


def test_silence_repeats_the_last_subtask_and_is_logged(
    base35: Path, lively35: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planner = QwenLanguagePlanner(answers(base35, lively35))
    monkeypatch.setattr(planner.planner.encoder, "decode_answer", lambda ids: "<think>hm</think> ")
    with caplog.at_level(logging.WARNING):
        assert planner.next(INSTRUCTION, ("a", "b"), [view(0)] * 3) == "b"
    assert "subtask 3" in caplog.text
    assert planner.next(INSTRUCTION, (), [view(0)]) == INSTRUCTION


def test_a_planner_of_windows_is_refused(base35: Path, lively35: Any) -> None:
    contract = segments_contract(prompt=PromptSettings())
    windows = QwenVLPlanner(lively35, encoder=load_encoder(base35, contract), contract=contract)
    with pytest.raises(UsageError, match=r"prompt\.form: 'windows', a language planner needs segments"):
        QwenLanguagePlanner(windows)


def test_scores_read_answers_as_the_run_time_does() -> None:
    samples = [sample(0), sample(1), sample(2)]
    said = [f'"{SUBTASKS[0]}"', SUBTASKS[0][:-1], ""]
    scores = answer_scores(said, samples, segments_contract())
    assert scores == {"answer_exact": 1 / 3, "edit_distance": (0 + 1 + len(SUBTASKS[1])) / 3}
    snapping = segments_contract(prompt=PromptSettings(form="segments", snap="nearest"))
    assert answer_scores(said, samples, snapping)["answer_exact"] == 2 / 3


# Adapters.


def lora_settings() -> LoraSettings:
    node = compose("train", ["experiment=map_language_planner_qwen35_4b", "data.train.demos.root=X"])["lora"]
    return LoraSettings(**{name: value for name, value in node.items() if name != "_target_"})


def test_adapters_sit_on_every_linear_layer_of_the_language_model_and_nowhere_else(base35: Path) -> None:
    model = load_base(base35).model
    expected = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and name.startswith("model.language_model.")
    ]
    settings = lora_settings()
    assert (settings.rank, settings.alpha) == (32, 64)
    chosen = inject_lora(model, settings)
    assert sorted(chosen) == sorted(expected)
    for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"):
        assert any(name.endswith(f"linear_attn.{part}") for name in chosen)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all(".language_model." in name and ".lora_" in name for name in trainable)


@pytest.fixture(scope="module")
def adapted(base35: Path) -> PlannerModule:
    """A module whose adapters have learned something: random ups."""
    module = PlannerModule(
        str(base35),
        contract=segments_contract(),
        optim={"total_steps": 1},
        lora=lora_settings(),
        pack_tokens=0,
    )
    module.configure_model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05, generator=generator)
    return module


def test_an_adapter_changes_the_answers_probabilities(base35: Path, adapted: PlannerModule) -> None:
    batch = adapted.make_collator()([sample(1), sample(2, episode=1)])
    plain = PlannerModule(str(base35), contract=segments_contract(), optim={"total_steps": 1}, pack_tokens=0)
    plain.configure_model()
    with torch.no_grad():
        ours, theirs = adapted.answer_losses(batch)[0], plain.answer_losses(batch)[0]
    assert (ours - theirs).abs().max() > 1e-2
    adapted.answer_losses(batch)[0].sum().backward()
    without = [n for n, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
    assert not without, "gradients reach every adapter, through the linear attention too"
    adapted.zero_grad()


def test_the_adapter_merges_exactly_and_alpha_0_is_the_base(
    base35: Path, adapted: PlannerModule, tmp_path: Path
) -> None:
    tuned = TunedModel(adapted, step=1)
    folder = tuned.write(tmp_path / "adapter")
    keys = load_file(str(folder / "adapter_model.safetensors"))
    assert keys
    assert all(".language_model." in name for name in keys)
    tuned.merge(folder, {0.0: tmp_path / "none", 1.0: tmp_path / "whole"})
    before, none, whole = (
        load_file(str(root / "model.safetensors")) for root in (base35, tmp_path / "none", tmp_path / "whole")
    )
    changed = 0
    for name, weight in before.items():
        assert none[name].equal(weight), name
        up = keys.get(f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight")
        if up is None:
            assert whole[name].equal(weight), name
            continue
        down = keys[f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"]
        exact = weight.double() + 64 / 32 * up.double() @ down.double()
        torch.testing.assert_close(whole[name].double(), exact, rtol=1e-6, atol=1e-6)
        changed += 1
    assert changed == len(adapted.adapted)


def test_an_export_loads_as_the_language_part_of_a_policy(adapted: PlannerModule, tmp_path: Path) -> None:
    tuned = TunedModel(adapted, step=1)
    out = tuned.export(tmp_path / "export", check=lambda folder: check_reload(folder, tuned) and None)
    assert json.loads((out / "provenance.json").read_text())["planner"].endswith("QwenLanguagePlanner")
    planner = load_part(out)
    assert isinstance(planner, QwenLanguagePlanner)
    assert planner.contract.subtasks == SUBTASKS
    said = planner.next(INSTRUCTION, SUBTASKS[:1], [view(0), view(1)])
    request = [r for r in requests(1) if r.session == "s0"]
    assert said == (adapted_answer(adapted, request) or SUBTASKS[0])


def adapted_answer(module: PlannerModule, request: list[Any]) -> str | None:
    planner = QwenVLPlanner(
        module.model, encoder=module.make_encoder(), contract=module.contract, max_new_tokens=64
    )
    return planner.plan(request)[0].subtask


def test_recipes_carry_the_published_numbers() -> None:
    config = compose("train", ["experiment=map_language_planner_qwen35_4b", "data.train.demos.root=X"])
    optim, trainer = config["model"]["module"]["optim"], config["trainer"]
    assert (optim["learning_rate"], optim["warmup_ratio"]) == (1e-4, 0.03)
    assert config["data"]["batch_size"] * trainer["accumulate_grad_batches"] == 32
    assert config["model"]["module"]["pack_tokens"] == 0
    assert config["contract"]["max_pixels"] == 320 * 240
    assert trainer["precision"].startswith("bf16")
    assert config["model"]["module"]["base"] == "Qwen/Qwen3.5-4B"
