"""The exported world model: written by the training, loaded by planners.

transformer/        config.json and weights as diffusers writes WanTransformer3DModel
world_model.json    arguments of models.cwm.CausalWorldModel
contract.json  provenance.json
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memer.contract import Contract, plan_of
from memer.errors import MemerError
from memer.folders import read_json, write_json
from models.cwm import CausalWorldModel
from models.wan import CausalWan
from models.wan_files import TRANSFORMER_FOLDER, check_fields, checked_artifact, load_transformer

WORLD_MODEL_FILE = "world_model.json"


def load_world_model(
    path: Path | str, *, device: torch.device | str = "cpu"
) -> tuple[CausalWorldModel, Contract]:
    """Load an exported world model.

    Args:
        path: the folder that the export wrote.
        device: where it runs.

    Raises:
        SourceUnavailableError: no such folder, or no exported one.
        MemerError: a file is missing or was changed, or it is another model.
    """
    folder, contract = checked_artifact(path, WORLD_MODEL_FILE, kind="world model")
    model, plan = read_world_model(folder), plan_of(contract)
    switches = {name: getattr(plan, name) for name in ("plan_latents", "visual_plan", "target_text")}
    check_fields(model, switches, where=folder / WORLD_MODEL_FILE)
    shapes = {"in_channels": plan.codec.channels, "text_dim": plan.text.dim}
    check_fields(model.transformer.config, shapes, where=folder / TRANSFORMER_FOLDER / "config.json")
    return model.to(device).eval(), contract


def read_world_model(folder: Path) -> CausalWorldModel:
    """The world model of a folder whose files were checked.

    Raises:
        MemerError: weights or arguments do not load.
    """
    transformer = load_transformer(folder / TRANSFORMER_FOLDER)
    try:
        return CausalWorldModel(transformer, **read_json(folder / WORLD_MODEL_FILE))
    except TypeError as error:
        raise MemerError(f"{folder / WORLD_MODEL_FILE}: {error}") from None


def save_world_model(
    folder: Path, transformer: CausalWan, weights: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> None:
    """Write a world model into an existing folder.

    Args:
        folder: nobody reads it yet.
        transformer: gives the configuration.
        weights: of the transformer.
        arguments: of CausalWorldModel besides the transformer.
    """
    with torch.device("meta"):
        shape = CausalWan.from_config(transformer.config)
    shape.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()}, assign=True)
    shape.save_stock(folder / TRANSFORMER_FOLDER)
    write_json(folder / WORLD_MODEL_FILE, dict(arguments))
