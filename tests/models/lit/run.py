"""A short training run in a process of its own: `python -m tests.models.lit.run BASE OUT`."""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from models.lit.planner import PlannerModule
from models.lora import LoraSettings
from models.optim import OptimSettings
from tests.models.lit.stream import Stream
from tests.models.samples import SUBTASKS, sample, tiny_contract


class Kill(Callback):
    """End the process as a power cut would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)

    module = PlannerModule(
        args.base,
        contract=tiny_contract(),
        optim=OptimSettings(total_steps=7, learning_rate=1e-4, eps=1e-4),
        pack_tokens=512,
        lora=LoraSettings(rank=args.lora) if args.lora else None,
    )
    samples = [
        sample(
            episode=i, subtask=SUBTASKS[i % 3] * (1 + i % 2), positions=tuple(range(1, 1 + i % 4)), recent=3
        )
        for i in range(9)
    ]
    callbacks: list[Callback] = [Kill(args.kill_at)] if args.kill_at else []
    found = None
    if args.checkpoints:
        callbacks.append(
            ModelCheckpoint(args.checkpoints, every_n_train_steps=2, save_top_k=1, filename="last")
        )
        found = next(iter(args.checkpoints.glob("*.ckpt")), None)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=DDPStrategy(process_group_backend="gloo") if args.devices > 1 else "auto",
        max_steps=args.steps,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=bool(args.checkpoints),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    stream = Stream(module.make_collator(), samples, batch_size=args.batch)
    trainer.fit(module, stream, ckpt_path=found)
    if trainer.is_global_zero:
        torch.save(module.state_dict(), args.out)


if __name__ == "__main__":
    main()
