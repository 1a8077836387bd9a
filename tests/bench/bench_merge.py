"""Streaming merge of two models of 1.2 GB against copying the same two folders, and the memory it needs.

Run: python -m tests.bench.bench_merge

Every tensor differs, so nothing is saved by copying: the worst case. Copy and merge take turns on warm files;
before each the disk's pending writes are finished, so neither pays for the other's. Peak memory is that of a
process that merges once, above what it had after its imports.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from memer.merge import merge_weights
from memer.weights import INDEX_FILE, WeightFiles
from tests.bench.report import emit
from tests.memer.model_folders import MEASURE

ROOT = Path(__file__).parents[2]
NUM_SHARDS = 4
MODEL_DIM, FEEDFORWARD_DIM, VOCABULARY = 1024, 4096, 151_936


def write_random_model(folder: Path, *, gigabytes: float, seed: int) -> None:
    """A bfloat16 model in four shards: a large embedding, then matrices until the size is reached."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.language_model.embed_tokens.weight": (VOCABULARY, MODEL_DIM)}
    left = gigabytes * 1e9 - 2 * VOCABULARY * MODEL_DIM
    per_layer = 2 * FEEDFORWARD_DIM * MODEL_DIM
    for layer in range(max(NUM_SHARDS, round(left / per_layer))):
        shapes[f"model.language_model.layers.{layer}.mlp.up_proj.weight"] = (FEEDFORWARD_DIM, MODEL_DIM)
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for k in range(NUM_SHARDS):
        file = f"model-{k + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        part = {n: torch.randn(shapes[n], generator=generator).bfloat16() for n in names[k::NUM_SHARDS]}
        save_file(part, str(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def timed(action: Callable[[], object], *, remove: list[Path]) -> float:
    """Seconds of one run; what it wrote is removed afterwards."""
    os.sync()
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    for folder in remove:
        shutil.rmtree(folder)
    return seconds


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.2, help="size of each model")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="disk to work on, default: temporary")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        root = Path(made)
        base, tuned, out = root / "base", root / "tuned", root / "out"
        write_random_model(base, gigabytes=given.gigabytes, seed=0)
        write_random_model(tuned, gigabytes=given.gigabytes, seed=1)
        copies = [root / "copy_of_base", root / "copy_of_tuned"]

        def copy() -> None:
            for source, target in zip((base, tuned), copies, strict=True):
                shutil.copytree(source, target)

        def merge() -> None:
            report = merge_weights(base, tuned, out, alpha=0.8)
            assert report.num_changed == report.num_tensors

        copying, merging = [], []
        for run in range(given.warmup + given.runs):
            seconds = timed(copy, remove=copies), timed(merge, remove=[out])
            if run >= given.warmup:
                copying.append(seconds[0])
                merging.append(seconds[1])
        peak = int(
            subprocess.run(
                [sys.executable, "-c", MEASURE, str(base), str(tuned), str(out)],
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
            ).stdout
        )
        size = WeightFiles.open(base).num_bytes
    median, naive = statistics.median(merging), statistics.median(copying)
    emit(
        "merge",
        model_bytes=size,
        num_shards=NUM_SHARDS,
        dtype="bfloat16",
        cores=os.cpu_count(),
        warmup=given.warmup,
        runs=given.runs,
        median_s=median,
        p95_s=sorted(merging)[min(len(merging) - 1, int(0.95 * len(merging)))],
        naive="copy both folders",
        naive_median_s=naive,
        ratio=median / naive,
        ratios_per_run=[round(m / c, 3) for m, c in zip(merging, copying, strict=True)],
        peak_bytes_above_imports=peak,
    )


if __name__ == "__main__":
    main()
