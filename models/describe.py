"""Describe an experiment's model: `python -m models.describe experiment=NAME ...` prints JSON.

Parameters per part, shapes under the contract and memory per device, from configurations alone: the model is
built on the meta device, so the full sizes take seconds and need neither their weights nor a network.
"""

import json
import re
from pathlib import Path
from typing import Any

from conf.instantiate import instantiate
from conf.launch import hydra_root
from memer.contract import CameraLayout, Contract
from memer.errors import UsageError
from memer.plan_windows import head_layout
from memer.prompts import render_messages
from memer.sample import FrameKey, PlannerQuestion
from models.describe_plans import FLOW_TARGETS, describe_flow
from models.footprint import TrainingPlan, count_parameters, head_is_tied, meta_model, training_memory
from models.lora import LoraSettings
from models.pixels import PixelGeometry
from models.progress import no_progress_bars
from models.prompt_encoder import PromptEncoder
from models.qwen_vl import load_encoder
from models.sizes import FoundConfig, find_config
from models.tiny import SPECIAL_TOKENS, tiny_config

#: Stands for what the data would say.
_INSTRUCTION = "look into the bins and put the cup back where it was"
_SUBTASK = "look into the bin on the left"

#: Qwen's tokenizer on English sentences.
_CHARACTERS_PER_TOKEN = 4

_TARGET = "models.lit.planner.PlannerModule"


@hydra_root("describe", run_dir=False)
def main(cfg: dict[str, Any]) -> int:
    """Print the description; see conf/describe.yaml."""
    text = json.dumps(describe(cfg), indent=2)
    one_line = re.sub(r"\[([\d,\s]+)\]", lambda shape: f"[{' '.join(shape[1].split())}]", text)
    print(one_line)
    return 0


def describe(cfg: dict[str, Any]) -> dict[str, Any]:
    """The figures of a composed training config.

    Raises:
        UsageError: the experiment trains something else, or a setting does not fit.
        SourceUnavailableError: neither a configuration of the base nor published sizes are at hand.
    """
    module = cfg["model"]["module"]
    if module["_target_"] in FLOW_TARGETS:
        return describe_flow(cfg, plan=_plan(cfg), instantiate=instantiate)
    if module["_target_"] != _TARGET:
        known = ", ".join((_TARGET, *FLOW_TARGETS))
        raise UsageError(
            f"model.module._target_: {module['_target_']!r}; those that can be described: {known}"
        )
    contract, cameras_from = _contract(cfg)
    found = _config(cfg["model"])
    lora: LoraSettings | None = instantiate(module["lora"], where="lora")
    with no_progress_bars():
        model = meta_model(found.config, lora=lora)
    plan = _plan(cfg)
    return {
        "experiment": cfg["name"],
        "base": module["base"] or "made by the run",
        "base_config_from": found.origin,
        "model_type": found.config.model_type,
        "parameters": count_parameters(model),
        "head_tied": head_is_tied(model),
        "sizes": _sizes(found),
        "shapes": _shapes(found, contract, cameras_from=cameras_from, module=module),
        "memory_per_device": {
            **plan.describe(),
            **training_memory(model, plan),
            "activations": "left out: they depend on the attention kernel, the length of packed rows and "
            "the number of answer tokens; measure them in the first steps",
        },
    }


def _plan(cfg: dict[str, Any]) -> TrainingPlan:
    trainer = cfg["trainer"]
    return TrainingPlan(
        precision=trainer["precision"],
        strategy=trainer["strategy"],
        devices=_devices(trainer),
        activation_checkpointing=cfg["model"]["module"]["activation_checkpointing"],
    )


def _config(model: dict[str, Any]) -> FoundConfig:
    if model["tiny_base"] is None:
        if model["module"]["base"] is None:
            raise UsageError("model.module.base: missing; give a folder or hub id")
        return find_config(model["module"]["base"])
    size = instantiate(model["tiny_base"]["size"], where="model.tiny_base.size")
    # The tokenizer is learned from the run's words; where they are few it stays smaller than this.
    config = tiny_config(size, num_tokens=size.vocabulary + len(SPECIAL_TOKENS))
    return FoundConfig(config, "model.tiny_base, with its largest vocabulary", None)


def _contract(cfg: dict[str, Any]) -> tuple[Contract, str]:
    """The contract of the run and where its camera layout is from."""
    roots = [node["root"] for node in cfg["data"]["train"].values() if node and node["root"]]
    if roots:
        return Contract.load(roots[0]).updated(cfg["contract"]), str(roots[0])
    cameras, origin = cfg["cameras"], "cameras"
    if plan := cfg["contract"].get("plan"):
        regions, origin = plan["canvas"]["regions"], "contract.plan.canvas"
        head = plan["head_camera"] or regions[0]["camera"]
        size = next((region for region in regions if region["camera"] == head), regions[0])
        cameras = {
            "camera_keys": list(dict.fromkeys(region["camera"] for region in regions)),
            "view_width": size["width"],
            "view_height": size["height"],
        }
    layout = instantiate({"_target_": "memer.contract.CameraLayout", **cameras}, where="cameras")
    assert isinstance(layout, CameraLayout)
    # No figure here depends on the frame rate.
    return Contract(fps=1.0, cameras=layout).updated(cfg["contract"]), origin


def _devices(trainer: dict[str, Any]) -> int:
    """Processes of a run; a number that only the machine knows ("auto", -1) counts as one per node."""
    devices = trainer["devices"]
    per_node = len(devices) if isinstance(devices, list) else devices if isinstance(devices, int) else 1
    return max(1, per_node) * int(trainer["num_nodes"])


def _sizes(found: FoundConfig) -> dict[str, Any]:
    text, vision = found.config.text_config, found.config.vision_config
    return {
        "vocabulary_tokens": text.vocab_size,
        "language_features": text.hidden_size,
        "language_layers": text.num_hidden_layers,
        "query_heads": text.num_attention_heads,
        "key_value_heads": text.num_key_value_heads,
        "vision_features": vision.hidden_size,
        "vision_blocks": vision.depth,
        "deepstack_levels": len(getattr(vision, "deepstack_visual_indexes", ())),
    }


def _shapes(
    found: FoundConfig, contract: Contract, *, cameras_from: str, module: dict[str, Any]
) -> dict[str, Any]:
    """Inputs of one question with every memory image and window image that the contract allows."""
    vision = found.config.vision_config
    geometry = PixelGeometry(
        min_pixels=contract.min_pixels,
        max_pixels=contract.max_pixels,
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
    )
    layout = head_layout(contract) if contract.prompt.form == "segments" else contract.cameras
    width, height = layout.stacked_size
    resized_height, resized_width = geometry.resized((height, width))
    rows, columns = geometry.grid((height, width))
    per_frame = geometry.num_tokens((height, width))
    question = full_question(contract)
    frames = len(question.image_keys)
    length, counted_by = _question_tokens(
        found.folder, question, contract, size=(height, width), picture_tokens=frames * per_frame
    )
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    packed = module["pack_tokens"] // length if module["pack_tokens"] else 1
    return {
        "cameras_from": cameras_from,
        "stacked_frame_px": [width, height],
        "resized_frame_px": [resized_width, resized_height],
        "frame_patches": rows * columns,
        "frame_tokens": per_frame,
        "memory_images": len(question.memory_keys),
        "window_images": len(question.recent_keys),
        "picture_tokens": frames * per_frame,
        "question_tokens": length,
        "question_tokens_counted_by": counted_by,
        "max_length_tokens": module["max_length"],
        "questions_per_packed_row": max(1, packed),
        "patches": [frames * rows * columns, 3 * geometry.patch_size**2],
        "frame_features": [levels, frames * per_frame, vision.out_hidden_size],
        "input_ids": [1, length],
        "position_ids": [4, 1, length],
    }


def full_question(contract: Contract) -> PlannerQuestion:
    """A question with full window, memory and history, and stand-ins for the data's words.

    The form `segments` has no bound; `history_length` stands for the number of finished segments.
    """
    if contract.prompt.form == "segments":
        done = contract.history_length
        return PlannerQuestion(
            instruction=_INSTRUCTION,
            memory_keys=tuple(("", 0, k) for k in range(done + 1)),
            recent_keys=(),
            frames={},
            history=(_SUBTASK,) * done,
        )
    windows = contract.shown_windows
    keys: list[FrameKey] = [
        ("", 0, k) for k in range(windows.keyframes_length + windows.recent_frames_length)
    ]
    return PlannerQuestion(
        instruction=_INSTRUCTION,
        memory_keys=tuple(keys[: windows.keyframes_length]),
        recent_keys=tuple(keys[windows.keyframes_length :]),
        frames={},
        history=(_SUBTASK,) * contract.history_length if contract.shows_history else (),
    )


def _question_tokens(
    folder: Path | None,
    question: PlannerQuestion,
    contract: Contract,
    *,
    size: tuple[int, int],
    picture_tokens: int,
) -> tuple[int, str]:
    """Tokens up to where the answer starts, and how they were counted; `size` is (height, width), px."""
    if folder is not None and (folder / "tokenizer.json").is_file():
        encoder: PromptEncoder = load_encoder(folder, contract)
        encoded = encoder.encode_question(question, sizes=dict.fromkeys(question.image_keys, size))
        return len(encoded), "the base's tokenizer"
    tokens = picture_tokens + 2 * len(question.image_keys)  # marks around every picture
    messages = render_messages(question, contract.prompt)
    for message in messages:
        texts = [part["text"] for part in message["content"] if part["type"] == "text"]
        tokens += sum(-(-len(text) // _CHARACTERS_PER_TOKEN) for text in texts)
    tokens += 5 * len(messages) + 3  # turn marks, role and newlines; the header of the answer
    return tokens, f"estimate: {_CHARACTERS_PER_TOKEN} characters per text token"


if __name__ == "__main__":
    main()
