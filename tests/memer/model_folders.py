"""Small model directories: written, read, compared."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from memer.weights import INDEX_FILE, WEIGHTS_FILE

EMBEDDING = "model.language_model.embed_tokens.weight"
FROZEN = "model.visual.patch_embed.proj.weight"
NORM = "model.language_model.norm.weight"
MATRIX = "model.language_model.layers.0.mlp.up_proj.weight"
BUFFER = "model.language_model.position_ids"
FLAG = "model.language_model.active"


def tensors(
    seed: int, *, dtype: torch.dtype = torch.bfloat16, vocabulary: int = 97
) -> dict[str, torch.Tensor]:
    fixed = torch.Generator().manual_seed(7)
    varied = torch.Generator().manual_seed(seed)
    return {
        EMBEDDING: torch.randn(vocabulary, 24, generator=varied).to(dtype),
        FROZEN: torch.randn(8, 3, 2, 4, 4, generator=fixed).to(dtype),
        NORM: torch.randn(24, generator=varied).to(dtype),
        MATRIX: torch.randn(33, 24, generator=varied).to(dtype),
        BUFFER: torch.arange(seed, seed + 5),
        FLAG: torch.tensor([bool(seed % 2), True]),
        "scalar": torch.randn((), generator=varied).to(dtype),
        "empty": torch.zeros(0, 24, dtype=dtype),
    }


def write_model(
    folder: Path, weights: dict[str, torch.Tensor], *, shards: int = 1, config: dict | None = None
) -> Path:
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    names = list(weights)
    if shards == 1:
        save_file(weights, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
        return folder
    weight_map = {}
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[k::shards]}
        save_file(part, str(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_model(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        loaded |= load_file(str(path))
    return loaded


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> bytes:
        return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()

    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and one[n].shape == other[n].shape and bits(one[n]) == bits(other[n])
        for n in one
    )


#: A program that merges once and prints the memory that this took, bytes above what its imports took.
MEASURE = """
import sys
from pathlib import Path
from memer.merge import merge_weights

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if name in line) * 1024

Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
imported = resident("VmRSS")
merge_weights(sys.argv[1], sys.argv[2], sys.argv[3], alpha=0.8)
print(resident("VmHWM") - imported)
"""
