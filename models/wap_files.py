"""The exported executor: written by the training, loaded by policies.

executor.json        models.wap_settings.WapSettings
model.safetensors    weights of models.wap.WapModel
contract.json  provenance.json
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from memer.contract import Contract, plan_of
from memer.errors import MemerError
from memer.folders import read_json, write_json
from memer.weights import WEIGHTS_FILE
from models.collate_plans import normalizers
from models.wan_files import check_fields, checked_artifact
from models.wap import WapModel
from models.wap_settings import WapSettings, contract_fields

EXECUTOR_FILE = "executor.json"


def load_executor(path: Path | str, *, device: torch.device | str = "cpu") -> tuple[WapModel, Contract]:
    """Load an exported executor.

    Args:
        path: the folder that the export wrote.
        device: where it runs.

    Raises:
        SourceUnavailableError: no such folder, or no exported one.
        MemerError: a file is missing or was changed, it is another model, or the contract lacks statistics.
    """
    folder, contract = checked_artifact(path, EXECUTOR_FILE, kind="executor")
    try:
        states, actions = normalizers(contract)
    except MemerError as error:
        raise MemerError(f"{folder}: {error}") from None
    model = read_executor(folder)
    meant = contract_fields(plan_of(contract), action_dim=actions.dim, state_dim=states.dim)
    check_fields(model.settings, meant, where=folder / EXECUTOR_FILE)
    return model.to(device).eval(), contract


def read_executor(folder: Path) -> WapModel:
    """The executor of a folder whose files were checked.

    Raises:
        MemerError: the weights do not fit the settings.
    """
    settings = WapSettings.from_dict(read_json(folder / EXECUTOR_FILE), where=str(folder / EXECUTOR_FILE))
    with torch.device("meta"):
        model = WapModel(settings)
    try:
        model.load_state_dict(load_file(folder / WEIGHTS_FILE), assign=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise MemerError(f"{folder / WEIGHTS_FILE}: {' '.join(str(error).split())[:200]}") from None
    # No weights file holds the stock rotary tables; those made on the meta device cannot be moved.
    video, config = model.video, model.video.config
    video.rope = type(video.rope)(config.attention_head_dim, config.patch_size, config.rope_max_seq_len)
    return model


def save_executor(folder: Path, settings: WapSettings, weights: Mapping[str, Tensor]) -> None:
    """Write an executor into an existing folder that nobody reads yet."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    write_json(folder / EXECUTOR_FILE, settings.to_dict())
