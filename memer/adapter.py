"""LoRA adapters as plain low-rank updates, read from the files that PEFT writes.

Interpolating a merged model with its base equals scaling the adapter: (1-a) W + a (W + s B A) = W + a s B A.
So the merge of an adapter needs no second model and is exact up to the one cast at its end.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from memer.errors import MemerError, SourceUnavailableError
from memer.folders import combined_hash, file_hash, read_json
from memer.weights import TORCH_DTYPES, WeightFiles, read_header

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """One update of a weight matrix.

    Attributes:
        down: float32[r, in], "A".
        up: float32[out, r], "B".
        scale: s, so that the update is s * B @ A.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def rows(self, first: int, count: int) -> torch.Tensor:
        """float32[count, in]: rows of B @ A, without the scale."""
        return self.up[first : first + count] @ self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Updates by the base's tensor names.

    Attributes:
        root: the adapter's folder.
        updates: weight name -> low-rank update.
        replaced: tensor name -> whole trained tensor (`modules_to_save`, trained biases).
    """

    root: Path
    updates: dict[str, LowRank]
    replaced: dict[str, torch.Tensor]

    @classmethod
    def is_adapter(cls, root: Path | str) -> bool:
        """Whether a folder holds an adapter and not whole weights."""
        return (Path(root) / ADAPTER_CONFIG).is_file()

    @classmethod
    def load(cls, root: Path | str, *, base: WeightFiles) -> Self:
        """Read an adapter and fit it to its base.

        Raises:
            SourceUnavailableError: a file is missing.
            MemerError: not a plain low-rank adapter, or names or shapes that the base lacks (as when it was
                trained on the text model alone); with counts.
        """
        root = Path(root)
        settings = read_json(root / ADAPTER_CONFIG)
        if not (root / ADAPTER_WEIGHTS).is_file():
            raise SourceUnavailableError(f"{root / ADAPTER_WEIGHTS}: no such file; the adapter is incomplete")
        for name, plain in (("use_dora", False), ("fan_in_fan_out", False), ("peft_type", "LORA")):
            if settings.get(name, plain) != plain:
                raise MemerError(f"{root}: {name}={settings[name]!r}: only plain LoRA adapters can be merged")
        files = WeightFiles(root, {ADAPTER_WEIGHTS: read_header(root / ADAPTER_WEIGHTS)})
        tensors = {name.removeprefix(_PREFIX): files.read(name) for name in files.entries}
        updates: dict[str, LowRank] = {}
        replaced: dict[str, torch.Tensor] = {}
        unknown: list[str] = []
        for name, tensor in tensors.items():
            if name.endswith(".lora_B.weight"):
                continue
            if not name.endswith(".lora_A.weight"):
                target = re.sub(r"\.(modules_to_save|base_layer)(\.default)?\.", ".", name)
                entry = base.entries.get(target)
                if entry is None or entry.shape != tuple(tensor.shape):
                    unknown.append(name)
                else:
                    replaced[target] = tensor.to(TORCH_DTYPES[entry.dtype])
                continue
            module = name.removesuffix(".lora_A.weight")
            up = tensors.get(f"{module}.lora_B.weight")
            entry = base.entries.get(f"{module}.weight")
            if up is None or entry is None or entry.shape != (up.shape[0], tensor.shape[1]):
                unknown.append(name)
                continue
            updates[f"{module}.weight"] = LowRank(
                down=tensor.float(), up=up.float(), scale=_scale(settings, module, rank=tensor.shape[0])
            )
        if unknown or not (updates or replaced):
            known = len(updates) + len(replaced)
            raise MemerError(
                f"{root}: {known} tensors of the adapter fit the base {base.root}, {len(unknown)} do not"
                + (f", first {unknown[0]!r}" if unknown else "")
                + "; train the adapter on the whole model class, with these names and shapes"
            )
        return cls(root=root, updates=updates, replaced=replaced)

    def hashes(self) -> dict[str, str]:
        """SHA-256 of the adapter's two files."""
        return {name: file_hash(self.root / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}

    def content_hash(self) -> str:
        """One hash for the adapter."""
        return combined_hash(self.hashes())


def _scale(settings: dict[str, Any], module: str, *, rank: int) -> float:
    """lora_alpha / r, or / sqrt(r) when rank-stabilised; patterns name single modules."""
    alpha = float(settings["lora_alpha"])
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
