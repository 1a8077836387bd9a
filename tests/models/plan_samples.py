"""Small samples of visual planner and executor with random pictures, and trainings over them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from memer.contract import CameraLayout, Contract
from memer.plan_settings import CanvasLayout, CanvasRegion, CodecSettings, PlanSettings
from memer.sample import ExecutorSample, VisualPlannerSample
from models.lit.cwm import WorldModelModule
from models.lit.flow import FlowModule
from models.lit.wap import ExecutorModule
from models.optim import OptimSettings

SIZE = 8
HORIZON, STRIDE = 8, 1
NUMBERS = {"mean": (0.5, -0.5), "std": (2.0, 1e-9), "min": (-1.0, -1.0), "max": (1.0, 1.0)}


def contract(**switches: Any) -> Contract:
    """Canvas of 8 px, latents of 4 x 4 with 48 channels, chunks of 8 actions with 2 future latents."""
    region = CanvasRegion(camera="base", y=0, x=0, height=SIZE, width=SIZE)
    values: dict[str, Any] = {
        "canvas": CanvasLayout(height=SIZE, width=SIZE, regions=(region,)),
        "codec": CodecSettings(spatial_ratio=2, channels=48),
        "action_horizon": HORIZON,
        "frame_stride": STRIDE,
    }
    return Contract(
        fps=15.0,
        cameras=CameraLayout(camera_keys=("base",), view_width=SIZE, view_height=SIZE),
        plan=PlanSettings(**{**values, **switches}),
        statistics={"state": NUMBERS, "action": NUMBERS},
    )


def pictures(count: int, *, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)


def memory(episode: int, *, segments: int) -> VisualPlannerSample:
    return VisualPlannerSample(
        sample_id=f"episode_{episode:06d}",
        source="made",
        episode_index=episode,
        frames=pictures(1 + 8 * segments, seed=episode),
        texts=tuple(f"press button {k % 2}" for k in range(segments)),
        instruction="press them all",
    )


def memories(count: int = 6) -> list[VisualPlannerSample]:
    return [memory(k, segments=1 + k % 3) for k in range(count)]


def chunk(number: int, *, plan_frames: int = 9, **changes: Any) -> ExecutorSample:
    rng = np.random.default_rng(number)
    valid = np.arange(HORIZON) < HORIZON - number % 4
    values: dict[str, Any] = {
        "sample_id": f"episode_000000_t{number:06d}",
        "source": "made",
        "episode_index": 0,
        "step": number,
        "plan_frames": pictures(plan_frames, seed=number),
        "clip_frames": pictures(1 + HORIZON // STRIDE, seed=100 + number),
        "text": f"press button {number % 2}",
        "instruction": "press them all",
        "state": rng.normal(size=2).astype(np.float32),
        "progress": 0.25,
        "actions": rng.normal(size=(HORIZON, 2)).astype(np.float32),
        "action_valid": valid,
        "progress_target": np.linspace(0.3, 1, HORIZON).astype(np.float32),
        "latent_valid": np.array([True, number % 2 == 0]),
        "finished": number % 3 == 0,
        "progress_valid": valid,
    }
    return ExecutorSample(**{**values, **changes})


def chunks(count: int = 6, **changes: Any) -> list[ExecutorSample]:
    return [chunk(k, **changes) for k in range(count)]


def optim(**changes: Any) -> OptimSettings:
    return OptimSettings(**{"total_steps": 8, "learning_rate": 1e-3, "warmup_ratio": 0.0, **changes})


def world_module(made: Contract | None = None, **changes: Any) -> WorldModelModule:
    transformer = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "ffn_dim": 32,
        "num_layers": 2,
        "freq_dim": 16,
    }
    values: dict[str, Any] = {"optim": optim(), "transformer": transformer, "prediction": "data"}
    return WorldModelModule(contract=made or contract(), **{**values, **changes})


def executor_module(made: Contract | None = None, **changes: Any) -> ExecutorModule:
    heads = {"num_layers": 2, "num_heads": 2, "head_dim": 12}
    values: dict[str, Any] = {
        "optim": optim(),
        "video": {"hidden": 24, "ffn": 32, **heads},
        "action": {"hidden": 16, "ffn": 24, **heads},
        "progress": {"hidden": 8, "ffn": 16, **heads},
        "freq_dim": 16,
        "settings": {"video_prediction": "data"},
    }
    return ExecutorModule(contract=made or contract(), **{**values, **changes})


class Samples(IterableDataset[Any]):
    """Endless batches; as the real data module, from the batch on that the trainer has come to."""

    def __init__(self, data: "SampleData", first: int) -> None:
        self.data, self.first = data, first

    def __iter__(self) -> Iterator[Any]:
        number, samples = self.first, self.data.samples
        while True:
            rows = [samples[(number * 2 + k) % len(samples)] for k in range(2)]
            yield self.data.collate(rows)
            number += 1


class SampleData(pl.LightningDataModule):
    def __init__(self, collate: Callable[[Any], Any], samples: Sequence[Any]) -> None:
        super().__init__()
        self.collate, self.samples = collate, list(samples)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        done = self.trainer.fit_loop.epoch_loop.batch_progress.total.processed
        return DataLoader(Samples(self, done), batch_size=None)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=3, collate_fn=self.collate)


def fit(
    module: FlowModule[Any],
    samples: Sequence[Any],
    *,
    steps: int = 3,
    ckpt_path: Path | str | None = None,
    **settings: Any,
) -> pl.Trainer:
    """A training of a second."""
    torch.set_num_threads(1)
    values: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "gradient_clip_val": 1.0,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**values, **settings},
    )
    trainer.fit(module, SampleData(module.make_collator(), samples), ckpt_path=ckpt_path)
    return trainer
