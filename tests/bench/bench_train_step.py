"""One optimizer step on the tiny model: packed with shared frames, against padded with every frame anew.

    python -m tests.bench.bench_train_step [--samples 32] [--runs 10]

The naive way is the library's own: one padded batch, pixels of every picture of every sample, full logits.
The second part measures peak memory at the vocabulary of the full model, in fresh processes.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from memer.contract import WindowSettings
from memer.sample import PlannerSample
from models.lit.planner import PlannerModule
from models.optim import OptimSettings
from models.prompt_encoder import PromptEncoder
from tests.bench.report import emit, time_runs
from tests.models.reference import pixel_inputs
from tests.models.samples import INSTRUCTION, sample, tiny_base, tiny_contract

FULL_VOCABULARY = 151_936


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--loss", nargs=2, metavar=("WAY", "TOKENS"))
    args = parser.parse_args()
    if args.loss:
        print(peak_of_loss(args.base, args.loss[0], int(args.loss[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        base = tiny_base(Path(folder) / "base")
        bench_step(base, num_samples=args.samples, runs=args.runs)
        bench_loss(base)


def bench_step(base: Path, *, num_samples: int, runs: int) -> None:
    optim = OptimSettings(total_steps=100, learning_rate=1e-4)
    contract = tiny_contract(windows=WindowSettings())
    module = PlannerModule(str(base), contract=contract, optim=optim, pack_tokens=0)
    module.configure_model()
    # Two neighbouring steps of each episode, as consecutive samples of a shuffled stream within few episodes.
    samples = [
        sample(episode=i // 2, step=60 + 5 * (i % 2), recent=8, memory=4, positions=(1 + i % 8,))
        for i in range(num_samples)
    ]
    collate = module.make_collator()
    batch = collate(samples)
    optimizer: Any = module.configure_optimizers()["optimizer"]  # type: ignore[call-overload,index]

    def step() -> None:
        losses, _ = module.answer_losses(collate(samples))
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    naive = AutoModelForImageTextToText.from_pretrained(base)
    naive.model.visual.requires_grad_(False)
    trained = [p for p in naive.parameters() if p.requires_grad]
    naive_optimizer = torch.optim.AdamW(trained, lr=1e-4)
    encoder = module.make_encoder()

    def naive_step() -> None:
        inputs, labels = padded(encoder, samples)
        naive(**inputs, labels=labels).loss.backward()
        naive_optimizer.step()
        naive_optimizer.zero_grad()

    timing = time_runs(step, warmup=2, runs=runs)
    slow = time_runs(naive_step, warmup=1, runs=max(3, runs // 3))
    if batch.num_frames != len({key for made in samples for key in made.question.image_keys}):
        raise SystemExit("frames encoded per batch are not the distinct frames")
    emit(
        "train_step",
        samples=num_samples,
        tokens=batch.num_tokens,
        threads=torch.get_num_threads(),
        warmup=2,
        runs=timing.runs,
        median_s=timing.median_s,
        p95_s=timing.p95_s,
        naive_median_s=slow.median_s,
        ratio=slow.median_s / timing.median_s,
        frames_encoded=batch.num_frames,
        naive_frames_encoded=batch.num_image_slots,
    )


def padded(
    encoder: PromptEncoder, samples: list[PlannerSample]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One right-padded batch of everything, pixels included."""
    encoded = [encoder.encode_sample(made) for made in samples]
    single = [pixel_inputs(encoder, made.question, one) for made, one in zip(samples, encoded, strict=True)]
    width = max(len(one) for one in encoded)
    fill = {"input_ids": encoder.pad_id, "attention_mask": 0, "mm_token_type_ids": 0}
    inputs = {
        name: torch.cat([F.pad(one[name], (0, width - one[name].shape[1]), value=value) for one in single])
        for name, value in fill.items()
    }
    for name in ("pixel_values", "image_grid_thw"):
        inputs[name] = torch.cat([one[name] for one in single])
    labels = [F.pad(torch.from_numpy(one.labels), (0, width - len(one)), value=-100) for one in encoded]
    return inputs, torch.stack(labels)


def bench_loss(base: Path) -> None:
    """Peak memory of forward and backward for prompts of different length, the full model's vocabulary."""
    lengths = (500, 2_000)
    peaks: dict[str, list[float]] = {}
    for way in ("kept", "full"):
        command = [sys.executable, "-m", "tests.bench.bench_train_step", "--base", str(base), "--loss", way]
        peaks[way] = [
            float(subprocess.run([*command, str(n)], capture_output=True, text=True, check=True).stdout)
            for n in lengths
        ]
    emit(
        "train_loss_memory",
        vocabulary=FULL_VOCABULARY,
        prompt_tokens=lengths,
        kept_mib=[round(peak, 1) for peak in peaks["kept"]],
        full_mib=[round(peak, 1) for peak in peaks["full"]],
        kept_mib_per_token=(peaks["kept"][1] - peaks["kept"][0]) / 1_500,
        full_mib_per_token=(peaks["full"][1] - peaks["full"][0]) / 1_500,
        ratio=peaks["full"][1] / peaks["kept"][1],
    )


def peak_of_loss(base: Path, way: str, length: int) -> float:
    """MiB that one sample of `length` tokens takes at its peak, weights and their gradients not counted."""
    torch.set_num_threads(1)
    module = PlannerModule(str(base), contract=tiny_contract(), optim=OptimSettings(total_steps=1))
    module.configure_model()
    module.model.resize_token_embeddings(FULL_VOCABULARY, mean_resizing=False)
    encoder = module.make_encoder()
    short = len(encoder.encode_sample(sample(recent=1, memory=0)))
    made = sample(recent=1, memory=0, instruction=INSTRUCTION + "\t" * (length - short))
    batch = module.make_collator()([made])
    if abs(batch.num_tokens - length) > 5:
        raise SystemExit(f"prompt has {batch.num_tokens} tokens, {length} were meant")
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    inputs, labels = padded(encoder, [made])
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew (Linux)
    before = memory_kib("VmRSS")
    if way == "kept":
        module.answer_losses(batch)[0].mean().backward()
    else:
        module.model(**inputs, labels=labels, use_cache=False).loss.backward()
    return (memory_kib("VmHWM") - before) / 1024


def memory_kib(name: str) -> int:
    """A figure of /proc/self/status, KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


if __name__ == "__main__":
    main()
