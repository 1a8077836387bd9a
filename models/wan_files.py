"""Initial weights and exported folders of the models on a Wan transformer: finding, loading, checking."""

from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn

from memer.artifact import verify_artifact
from memer.contract import CONTRACT_FILE, Contract, plan_of
from memer.errors import MemerError, SourceUnavailableError
from memer.weights import WeightFiles
from models.pretrained import load_part
from models.wan import CausalWan

TRANSFORMER_FOLDER = "transformer"


def load_transformer(base: Path | str) -> CausalWan:
    """A Wan transformer in float32 from its own folder, from one that holds `transformer/`, or from a hub id.

    Raises:
        SourceUnavailableError: not there.
        MemerError: it does not load.
    """
    folder = transformer_folder(base)
    model, info = load_part(
        CausalWan,
        str(folder),
        part=TRANSFORMER_FOLDER,
        torch_dtype=torch.float32,
        output_loading_info=True,
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            names = sorted(str(name) for name in info[what])
            raise MemerError(f"{folder}: {len(names)} {what.replace('_', ' ')}, first {names[0]}")
    loaded: CausalWan = model
    return loaded


def transformer_folder(base: Path | str) -> Path:
    """Where a transformer's config.json and weights lie; those of a hub id are fetched.

    Raises:
        SourceUnavailableError: not there.
    """
    root = Path(base)
    if not root.is_dir():
        try:
            root = Path(snapshot_download(str(base), allow_patterns=[f"{TRANSFORMER_FOLDER}/*"]))
        except (OSError, ValueError) as error:
            raise SourceUnavailableError(
                f"{base}: neither a folder nor a hub model that can be reached ({_first_line(error)})"
            ) from None
    inner = root / TRANSFORMER_FOLDER
    folder = inner if inner.is_dir() else root
    if not (folder / "config.json").is_file():
        raise SourceUnavailableError(
            f"{base}: no {TRANSFORMER_FOLDER}/config.json there; give the export folder of a world model, a "
            "diffusers transformer folder or a hub id"
        )
    return folder


def transformer_hash(base: Path | str) -> str:
    """Content hash of a transformer's weights; reads them once."""
    return WeightFiles.open(transformer_folder(base)).content_hash()


def base_name(base: Path | str | None) -> str:
    """Hub id or folder name of initial weights, never a local path; empty for random ones."""
    if base is None:
        return ""
    return Path(base).resolve().name if Path(base).is_dir() else str(base)


def check_equal(model: nn.Module, weights: Mapping[str, Tensor], *, folder: Path) -> None:
    """Refuse a reloaded model whose tensors are not these.

    Raises:
        MemerError: naming the first tensor that is missing or differs.
    """
    found = model.state_dict()
    for name in sorted(found.keys() | weights.keys()):
        if name not in found or name not in weights or not torch.equal(found[name], weights[name].cpu()):
            raise MemerError(f"{folder}: {name} is not what was trained; the export was not read as written")


def checked_artifact(path: Path | str, marker: str, *, kind: str) -> tuple[Path, Contract]:
    """An exported folder whose files are all as they were written, and its contract.

    Args:
        path: the folder that the export wrote.
        marker: file that only this kind of model has.
        kind: of model, for messages.

    Raises:
        SourceUnavailableError: no such folder, or no exported one.
        MemerError: a file is missing or was changed, or it is another model.
    """
    folder = Path(path)
    verify_artifact(folder)
    if not (folder / marker).is_file():
        raise MemerError(f"{folder}: no {marker}; this is no exported {kind}")
    contract = Contract.load(folder)
    plan_of(contract)
    return folder, contract


def check_fields(found: object, meant: Mapping[str, object], *, where: Path) -> None:
    """Refuse a model whose sizes and switches are not those of the contract beside it.

    Raises:
        MemerError: naming the first field of `meant` that differs, with both values.
    """
    for name, theirs in meant.items():
        ours = getattr(found, name)
        if ours != theirs:
            raise MemerError(
                f"{where}: {name} {ours!r}, {CONTRACT_FILE} beside it means {theirs!r}; export or copy the "
                "folder again"
            )


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
