"""Planner samples per second of one loader worker: `python -m tests.bench.bench_loading`.

Ours is worker 0 of 4 on shards with the default windows, order and cache. The naive way reads one JSON file
and up to 16 JPEG files per sample, in shuffled order, as exporters write them; pictures have the same size
(two stacked 320 x 180 views) and lie in the page cache for both.
"""

import itertools
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data.dataset import ChosenShards, SampleTable, TrainBatches
from data.order import OrderSettings
from data.shards import BuildSettings, ShardSet, build_shards
from data.views.frames import FrameCache
from data.views.planner import PlannerView
from memer.contract import CameraLayout
from memer.episode import Episode, InstructionSpan, Segment
from memer.keyframes import KeyframeRules
from tests.bench.report import Timing, emit, time_runs

EPISODES, FRAMES, WORKERS, BATCH = 4, 1200, 4, 8
NAIVE_SAMPLES = 240


class Scenes:
    """Episodes of smooth moving pictures with a subtask of 60 frames each, so that memory is mostly full."""

    name, fps, camera_keys = "scenes", 15.0, ("base", "wrist")

    def indices(self) -> list[int]:
        """Episode numbers."""
        return list(range(EPISODES))

    def report(self) -> dict[str, object]:
        """Nothing to tell."""
        return {}

    def episode(self, index: int) -> Episode:
        """One episode, its pictures made when asked for."""
        cameras = {key: _Moving(index * 2 + k) for k, key in enumerate(self.camera_keys)}
        return Episode(
            source=self.name,
            episode_index=index,
            fps=self.fps,
            cameras=cameras,
            state=np.zeros((FRAMES, 8), np.float32),
            action=np.zeros((FRAMES, 7), np.float32),
            instructions=(InstructionSpan(0, "put the three objects into the white bin"),),
            segments=tuple(Segment(a, a + 60, f"look inside bin {a // 60}") for a in range(0, FRAMES, 60)),
        )


class _Moving:
    prepared = False

    def __init__(self, seed: int) -> None:
        coarse = np.random.default_rng(seed).integers(0, 256, (24, 44, 3), dtype=np.uint8)
        wide = Image.fromarray(coarse).resize((480, 260), Image.Resampling.BICUBIC)
        self._world = np.array(wide)

    def __len__(self) -> int:
        return FRAMES

    def frames(self, indices: Sequence[int] | None = None) -> Iterator[NDArray[np.uint8]]:
        """A window that wanders over a larger picture."""
        for k in range(FRAMES) if indices is None else indices:
            x, y = k % 160, (k // 3) % 80
            yield self._world[y : y + 180, x : x + 320]


def main() -> None:
    """Measure and print the line."""
    with tempfile.TemporaryDirectory() as folder:
        layout = CameraLayout(camera_keys=Scenes.camera_keys)
        build_shards(
            Scenes(),
            out=Path(folder) / "shards",
            settings=BuildSettings(cameras=layout),
            num_workers=2,
            progress=False,
        )
        shards = ShardSet(Path(folder) / "shards")
        view = PlannerView(shards.contract, rules=KeyframeRules.all_last())
        chosen = ChosenShards(shards=shards, episodes=tuple(shards.episode_indices()))
        table = SampleTable({"scenes": chosen}, view)
        per_epoch = len(table) // (BATCH * WORKERS)
        caches: list[FrameCache] = []

        def ours() -> None:
            """A whole epoch of this worker from an empty cache: opening chunks costs, so none is left out."""
            batches = TrainBatches(
                table,
                settings=OrderSettings(batch_size=BATCH),
                rank=0,
                world_size=WORKERS,
                first_batch=0,
                cache_bytes=1024**3,
            )
            for _ in itertools.islice(batches, per_epoch):
                pass
            caches.append(batches.frames)

        timing = time_runs(ours, warmup=1, runs=3)
        naive = _naive(table, Path(folder) / "files")
        ours_per_s = per_epoch * BATCH / timing.median_s
        naive_per_s = NAIVE_SAMPLES / naive[0].median_s
        emit(
            "loading",
            samples=per_epoch * BATCH,
            picture_px="320x360",
            workers=WORKERS,
            batch=BATCH,
            warmup=1,
            runs=timing.runs,
            median_s=timing.median_s,
            p95_s=timing.p95_s,
            samples_per_s=ours_per_s,
            naive_median_s=naive[0].median_s,
            naive_p95_s=naive[0].p95_s,
            naive_samples_per_s=naive_per_s,
            ratio=ours_per_s / naive_per_s,
            pictures_shown=caches[-1].served,
            pictures_decoded=caches[-1].decoded,
            naive_pictures_per_sample=naive[1],
            cache_mib=caches[-1].num_bytes / 2**20,
        )


def _naive(table: SampleTable, folder: Path) -> tuple[Timing, float]:
    """Write some samples as files, then time reading them; (timing, pictures per sample)."""
    folder.mkdir()
    cache = FrameCache(max_bytes=2**30)
    numbers = random.Random(0).sample(range(len(table)), NAIVE_SAMPLES)
    pictures = 0
    for name, number in enumerate(sorted(numbers)):
        sample = table.sample(number, frames=cache)
        paths = []
        for k, key in enumerate(sample.question.image_keys):
            paths.append(f"{name}_{k}.jpg")
            Image.fromarray(sample.question.frames[key]).save(folder / paths[-1], quality=90)
        pictures += len(paths)
        record = {"image": paths, "subtask": sample.subtask, "positions": sample.positions}
        (folder / f"{name}.json").write_text(json.dumps(record))
    order = list(range(NAIVE_SAMPLES))
    random.Random(1).shuffle(order)

    def read() -> None:
        for name in order:
            record = json.loads((folder / f"{name}.json").read_text())
            for path in record["image"]:
                with Image.open(folder / path) as image:
                    np.array(image.convert("RGB"))

    return time_runs(read, warmup=1, runs=3), pictures / NAIVE_SAMPLES


if __name__ == "__main__":
    main()
