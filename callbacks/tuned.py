"""What the callbacks need of a training module, and writing its weights as a model folder.

Frozen tensors are copied from the base byte for byte; trained ones are cast once to the dtype that the base
stores them in; a tied output head stays absent; all other files are the base's. LoRA gives an adapter.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from memer.artifact import (
    DEFAULT_PLANNER,
    LANGUAGE_PLANNER,
    Provenance,
    check_complete,
    seal_artifact,
    write_provenance,
)
from memer.contract import Contract
from memer.errors import MemerError, SourceUnavailableError
from memer.folders import copy_files, new_folders, side_files
from memer.merge import MergeReport, check_mergeable, merge_many
from memer.weight_writer import write_weights
from memer.weights import TORCH_DTYPES, Bytes, TensorEntry, WeightFiles, as_bytes

#: What the folder of a hub model must hold; weights of other forms are not fetched.
_HUB_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.safetensors", "additional_chat_templates/*"]
#: Lightning attribute that holds the model, and torch.compile's wrapper: not part of a stored name.
_MODULE_PREFIX, _COMPILE_PREFIX = "model.", "_orig_mod."


class TunedModule(Protocol):
    """A LightningModule whose result can be exported.

    Attributes:
        base: local folder or hub id of the base model.
        contract: bound to data and model.
        model: the transformers model; its parameter names are the keys of the stored weights.
        lora: adapter settings, None when whole weights were trained.
    """

    base: str
    contract: Contract
    model: Any
    lora: Any

    def trainable(self) -> Mapping[str, Tensor]:
        """Trained parameters by name, the module's own prefix `model.` included."""
        ...

    def save_tuned(self, out: Path) -> Path:
        """With LoRA: write adapter_model.safetensors and adapter_config.json into an existing folder."""
        ...


class TunedModel:
    """The base of a run and what was trained on it.

    Args:
        module: the training module.
        step: optimizer steps behind its weights.
    """

    def __init__(self, module: TunedModule, *, step: int) -> None:
        self.module = module
        self.step = step
        self.base = base_folder(module.base)
        self.files = WeightFiles.open(self.base)
        self.drop = check_mergeable(self.files, self.files)
        check_complete(self.base)

    @cached_property
    def base_hash(self) -> str:
        """Content hash of the base, read once."""
        return self.files.content_hash(skip=self.drop)

    @property
    def base_name(self) -> str:
        """Hub id, or the folder's name; never a local path."""
        return Path(self.module.base).resolve().name if Path(self.module.base).is_dir() else self.module.base

    @property
    def is_adapter(self) -> bool:
        """Whether only an adapter was trained."""
        return self.module.lora is not None

    def write(self, out: Path) -> Path:
        """Write the tuned weights as they are: a complete artifact, or with LoRA an adapter folder.

        An older folder is replaced; the new one appears only when complete.
        """
        if not self.is_adapter:
            return self.export(out)
        with new_folders([out], replace=True) as (folder,):
            self.module.save_tuned(folder)
            self.module.contract.save(folder)
            write_provenance(folder, **self.record(alpha=1.0))
        return out

    def export(self, out: Path, *, check: Callable[[Path], None] | None = None) -> Path:
        """Write an artifact of the tuned weights; an adapter is merged into its base.

        Args:
            out: the folder; an older one is replaced.
            check: called with the finished folder before it appears.
        """
        if self.is_adapter:
            adapter = self.write(out.parent / f".{out.name}.adapter")
            try:
                self.merge(adapter, {1.0: out}, check=check)
            finally:
                shutil.rmtree(adapter)
            return out
        trained = trained_tensors(self.module, self.files)
        with self.files.reader() as read, new_folders([out], replace=True) as (folder,):
            write_weights(
                [folder],
                like=self.files,
                make_produce=lambda: _Overlay(trained, read, step=self.step),
                drop=self.drop,
            )
            copy_files(side_files(self.base), folder)
            self.seal(folder, alpha=1.0)
            if check:
                check(folder)
        return out

    def merge(
        self, tuned: Path, outs: Mapping[float, Path], *, check: Callable[[Path], None] | None = None
    ) -> list[MergeReport]:
        """Merge what `write` wrote with the base, one artifact per alpha; older folders are replaced."""

        def finish(folder: Path, report: MergeReport) -> None:
            self.seal(folder, alpha=report.alpha)
            if check:
                check(folder)

        return merge_many(self.base, tuned, outs, finish=finish, replace=True)

    def seal(self, folder: Path, *, alpha: float) -> Provenance:
        """Give a model folder the run's contract and its provenance."""
        record = self.record(alpha=alpha)
        return seal_artifact(folder, contract=self.module.contract, **record)

    def record(self, *, alpha: float) -> dict[str, Any]:
        """The fields of a provenance that the run knows."""
        form = self.module.contract.prompt.form
        return {
            "planner": LANGUAGE_PLANNER if form == "segments" else DEFAULT_PLANNER,
            "base_name": self.base_name,
            "base_hash": self.base_hash,
            "alpha": alpha,
            "step": self.step,
        }


class _Overlay:
    """Pieces of the base with the trained tensors in their places."""

    def __init__(
        self, trained: Mapping[str, Tensor], read: Callable[[str, int, Bytes], None], *, step: int
    ) -> None:
        self._trained, self._read, self._step = trained, read, step

    def __call__(self, entry: TensorEntry, first: int, count: int) -> list[Bytes]:
        tensor = self._trained.get(entry.name)
        if tensor is None:
            data = np.empty(count * entry.itemsize, np.uint8)
            self._read(entry.name, first * entry.itemsize, data)
            return [data]
        piece = tensor.detach().reshape(-1)[first : first + count].cpu()
        if not torch.isfinite(piece).all():
            raise MemerError(f"{entry.name}: not finite after step {self._step}; nothing is exported")
        return [as_bytes(piece.to(TORCH_DTYPES[entry.dtype]))]


def stored_name(name: str) -> str:
    """Key of a parameter in the weight files, without the module's and torch.compile's prefixes."""
    return name.removeprefix(_MODULE_PREFIX).replace(_COMPILE_PREFIX, "")


def trained_tensors(module: TunedModule, base: WeightFiles) -> dict[str, Tensor]:
    """Trained parameters by their keys in the base.

    Raises:
        MemerError: a key or shape that the base does not have, with counts; nothing was trained.
    """
    trained = {stored_name(name): tensor for name, tensor in module.trainable().items()}
    wrong = [
        f"{name} {list(tensor.shape)}"
        for name, tensor in trained.items()
        if name not in base.entries or base.entries[name].shape != tuple(tensor.shape)
    ]
    if wrong or not trained:
        raise MemerError(
            f"{len(trained) - len(wrong)} of {len(trained)} trained tensors have their place in {base.root}"
            + (f"; first without: {wrong[0]}" if wrong else "")
        )
    return trained


def base_folder(base: str) -> Path:
    """Local folder of a base model; a hub id is looked up in the hub's cache and completed there.

    Raises:
        SourceUnavailableError: not there.
    """
    if Path(base).is_dir():
        return Path(base)
    try:
        return Path(snapshot_download(base, allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SourceUnavailableError(
            f"base model {base}: neither a folder nor a hub model that can be reached ({reason}); "
            "the export joins its frozen weights with the trained ones"
        ) from None
