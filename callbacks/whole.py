"""Export of a model that is trained whole: its module writes weights and settings, no base joins in.

A merge mixes the trained weights with the initial ones, which the module can make again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from memer.artifact import write_provenance
from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.folders import new_folders


@runtime_checkable
class SavesModel(Protocol):
    """A LightningModule that writes its own model files.

    Attributes:
        contract: of data and model.
        planner: `module:class` that loads the folder, for its provenance.
        base_name: folder name or hub id of the initial weights, empty for random ones.
        base_hash: content hash of these, empty for random ones.
    """

    contract: Contract
    planner: str
    base_name: str
    base_hash: str

    def save_model(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write settings and weights (the module's state) into an existing folder."""
        ...

    def initial_weights(self) -> Mapping[str, Tensor]:
        """The state that training began with, by the names of the module's state, on the CPU."""
        ...

    def check_saved(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Load a folder as anyone would and compare it with these weights.

        Raises:
            MemerError: it does not load, or is another model.
        """
        ...


class WholeModel:
    """The state of a run whose module saves its own model.

    Args:
        module: the training module.
        step: optimizer steps behind the weights.
        weights: the module's state, gathered from all ranks.
    """

    def __init__(self, module: SavesModel, *, step: int, weights: Mapping[str, Tensor]) -> None:
        self.module = module
        self.step = step
        self.weights = weights

    def merge(self, outs: Mapping[float, Path]) -> list[tuple[float, Path, int]]:
        """Write one artifact per alpha: initial + alpha * (trained - initial).

        Returns:
            Per alpha the folder and the number of tensors that training changed.

        Raises:
            UsageError: the initial weights were random.
        """
        check_has_base(self.module)
        initial = self.module.initial_weights()
        trained = {name: tensor.cpu() for name, tensor in self.weights.items()}
        changed = [name for name, tensor in trained.items() if not torch.equal(tensor, initial[name])]
        rows = []
        for alpha, out in outs.items():
            mixed = {**trained, **{n: torch.lerp(initial[n], trained[n], alpha) for n in changed}}
            WholeModel(self.module, step=self.step, weights=mixed).export(out, check=True, alpha=alpha)
            rows.append((alpha, out, len(changed)))
        return rows

    def export(self, out: Path, *, check: bool, alpha: float = 1.0) -> Path:
        """Write an artifact; an older one is replaced, the new one appears only when complete.

        Args:
            out: the folder.
            check: load it and compare before it appears.
            alpha: share of the trained weights in these, for the provenance.

        Raises:
            MemerError: a weight is not finite, or the check failed.
        """
        for name, tensor in self.weights.items():
            if not tensor.isfinite().all():
                raise MemerError(f"{name}: not finite after step {self.step}; nothing is exported")
        with new_folders([out], replace=True) as (folder,):
            self.module.save_model(folder, self.weights)
            self.module.contract.save(folder)
            write_provenance(
                folder,
                planner=self.module.planner,
                base_name=self.module.base_name,
                base_hash=self.module.base_hash,
                alpha=alpha,
                step=self.step,
            )
            if check:
                self.module.check_saved(folder, self.weights)
        return out


def check_has_base(module: SavesModel) -> None:
    """Refuse a merge of a model that began with random weights.

    Raises:
        UsageError: it did.
    """
    if not module.base_name:
        raise UsageError(
            "callbacks.merge: training began with random weights, there is no base to merge with; "
            "set callbacks.merge=null"
        )


def gathered_weights(trainer: Any, module: Any) -> Mapping[str, Tensor] | None:
    """The whole state of a module that saves its own model, None for others; every rank must call it."""
    if not isinstance(module, SavesModel):
        return None
    state: Mapping[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state
