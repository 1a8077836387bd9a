"""Executor samples per second in the training process: `python -m tests.bench.bench_executor_loading`.

50 demonstrations of press_button with a canvas of 32 x 32 px, batches of 8 in training order, no loader
workers. Ours paints each canvas once; the naive way decodes and paints the 14 pictures of every sample.
"""

import tempfile
import time
from pathlib import Path

from data.datamodule import ShardDataModule
from data.shards import BuildSettings, build_shards
from data.tabletop import TabletopSource
from data.views.executor import ExecutorViewConfig
from memer.contract import CameraLayout
from tests.bench.report import emit

EPISODES, BATCH, NAIVE_BATCHES = 50, 8, 60
CANVAS = {
    "height": 32,
    "width": 32,
    "regions": [{"camera": "base", "y": 0, "x": 0, "height": 32, "width": 32}],
}


def samples_per_second(module: ShardDataModule, *, skip: int, batches: int) -> float:
    """Rate of `batches` batches after the first `skip`."""
    stream = iter(module.train_dataloader())
    for _ in range(skip):
        next(stream)
    start = time.perf_counter()
    for _ in range(batches):
        next(stream)
    return batches * BATCH / (time.perf_counter() - start)


def main() -> None:
    """Build the demonstrations, measure the first epoch, the second one and the naive way."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "shards"
        layout = CameraLayout(camera_keys=("base",), view_width=32, view_height=32)
        source = TabletopSource(task="press_button", num_episodes=EPISODES, frame_size=32)
        build_shards(source, out=root, settings=BuildSettings(cameras=layout), progress=False)

        def module(cache_mib: int) -> ShardDataModule:
            return ShardDataModule(
                train={"demos": {"root": root}},
                val=None,
                view=ExecutorViewConfig(contract={"plan": {"canvas": CANVAS}}),
                batch_size=BATCH,
                num_workers=0,
                seed=0,
                clip_steps=1,
                chunk_clips=1024,
                cache_mib=cache_mib,
            )

        ours = module(1024)
        epoch = len(ours.train_table) // BATCH
        first = samples_per_second(ours, skip=0, batches=epoch)
        warm = samples_per_second(ours, skip=epoch, batches=epoch)
        naive = samples_per_second(module(0), skip=2, batches=NAIVE_BATCHES)
        emit(
            "executor_loading",
            samples=len(ours.train_table),
            canvas="32x32",
            batch=BATCH,
            first_epoch_samples_per_s=first,
            warm_samples_per_s=warm,
            naive_samples_per_s=naive,
            ratio=warm / naive,
        )


if __name__ == "__main__":
    main()
