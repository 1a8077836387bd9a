"""The library's own way for one sample: pixels, mask, no packing, full logits. Truth for the fast ways."""

from typing import Any

import torch
from torch import Tensor

from memer.sample import PlannerQuestion
from models.prompt_encoder import EncodedSample, PromptEncoder


def pixel_inputs(encoder: PromptEncoder, asked: PlannerQuestion, encoded: EncodedSample) -> dict[str, Tensor]:
    bounds = {"shortest_edge": encoder.contract.min_pixels, "longest_edge": encoder.contract.max_pixels}
    pictures = encoder.image_processor(
        images=[asked.frames[key] for key in asked.image_keys], size=bounds, return_tensors="pt"
    )
    ids = torch.from_numpy(encoded.input_ids)[None]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": torch.from_numpy(encoded.mm_token_type_ids)[None],
        "pixel_values": pictures["pixel_values"],
        "image_grid_thw": pictures["image_grid_thw"],
    }


def single_logits(
    model: Any, encoder: PromptEncoder, asked: PlannerQuestion, encoded: EncodedSample
) -> Tensor:
    """float32[L, V]."""
    return model(**pixel_inputs(encoder, asked, encoded)).logits[0].float()


def single_answer(model: Any, encoder: PromptEncoder, asked: PlannerQuestion, *, max_new_tokens: int) -> str:
    """Greedy text of the library's `generate`, every frame encoded anew."""
    inputs = pixel_inputs(encoder, asked, encoder.encode_question(asked))
    out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return encoder.decode_answer(out[0, inputs["input_ids"].shape[1] :].tolist())
