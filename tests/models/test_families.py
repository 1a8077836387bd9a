"""Every supported model type: our losses and answers are those of the library's own way."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, GenerationConfig

from models.lit.planner import PlannerModule
from models.optim import OptimSettings
from models.planner import QwenVLPlanner
from models.progress import no_progress_bars
from models.qwen_vl import SUPPORTED_MODEL_TYPES, load_base, load_encoder
from tests.models.reference import single_answer, single_logits
from tests.models.samples import mixed_samples, tiny_contract
from tests.models.test_planner import requests

IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def family_config(model_type: str, base: Path) -> Any:
    """The tiny base's sizes as another type."""
    tiny = AutoConfig.from_pretrained(base).to_dict()
    text = {k: v for k, v in tiny["text_config"].items() if k not in ("model_type", "layer_types")}
    vision = {k: v for k, v in tiny["vision_config"].items() if k != "model_type"}
    if "moe" in model_type:
        text |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        }
    if model_type.startswith("qwen3_5"):
        del vision["deepstack_visual_indexes"]
        rope = text["rope_parameters"] | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"rope_parameters": rope, **heads, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    ids = {name: tiny[name] for name in IDS}
    return CONFIG_MAPPING[model_type](
        text_config=text, vision_config=vision, tie_word_embeddings="moe" not in model_type, **ids
    )


@pytest.fixture(scope="module", params=SUPPORTED_MODEL_TYPES)
def family(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of every type with lively weights, so that answers of an untrained model differ."""
    folder = Path(shutil.copytree(base, tmp_path_factory.mktemp("family") / request.param))
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(family_config(request.param, base))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and ".visual." in name:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            elif parameter.ndim >= 2 and ".layers." in name:
                parameter.mul_(4)
    model.generation_config = GenerationConfig.from_pretrained(base)
    with no_progress_bars():
        model.save_pretrained(folder)
    return folder


def test_losses_are_those_of_full_logits_and_reach_every_trained_weight(family: Path) -> None:
    module = PlannerModule(
        str(family),
        contract=tiny_contract(),
        optim=OptimSettings(total_steps=1),
        pack_tokens=0 if "qwen3_5" in family.name else 512,  # linear attention refuses packing
    )
    module.configure_model()
    encoder = module.make_encoder()
    samples = mixed_samples()
    losses, _ = module.answer_losses(module.make_collator()(samples))
    losses.sum().backward()
    without = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    assert not without

    plain = AutoModelForImageTextToText.from_pretrained(family).eval()
    expected = torch.tensor(0.0)
    for one in samples:
        encoded = encoder.encode_sample(one)
        labels = torch.from_numpy(encoded.labels)
        with torch.no_grad():
            logits = single_logits(plain, encoder, one.question, encoded)
        expected += torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
    torch.testing.assert_close(losses.sum().detach(), expected, rtol=1e-4, atol=0)


def test_lockstep_answers_are_those_of_single_questions(family: Path) -> None:
    contract = tiny_contract()
    encoder = load_encoder(family, contract)
    planner = QwenVLPlanner(load_base(family).model, encoder=encoder, contract=contract, max_new_tokens=8)
    plain = AutoModelForImageTextToText.from_pretrained(family).eval()
    asked = requests(60, sessions=3)
    for request, result in zip(asked, planner.plan(asked), strict=True):
        assert result.raw_text == single_answer(plain, encoder, request.question, max_new_tokens=8)
