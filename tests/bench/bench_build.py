"""Shards against random access: `python -m tests.bench.bench_build [ROOT]`.

Ours is the whole build of a LeRobot data set in one process: decode, resize, code, tar, index, hashes. The
naive way only decodes, one frame at a time by random access (open, seek to the key frame before, decode
forward), as data sets that are read by index do. Without ROOT a paint set with 250 frames between key frames
is made; the counter proves that a build decodes each frame once. With a key frame every 2 frames random
access decodes hardly more than needed, and the two come out alike.
"""

import itertools
import shutil
import sys
import tempfile
from pathlib import Path

from data.lerobot import LeRobotReader, decode_counter
from data.shards import BuildSettings, build_shards
from memer.contract import CameraLayout
from tests.bench.report import emit, time_runs
from tests.fixtures.paint import BASE, WRIST, PaintSet

#: Frames between those that the naive way decodes; its time per frame does not depend on how many there are.
NAIVE_STRIDE = 7


def main(arguments: list[str]) -> None:
    """Measure one set and print the line."""
    with tempfile.TemporaryDirectory() as folder:
        if arguments:
            root, what = Path(arguments[0]), Path(arguments[0]).name
            keys = LeRobotReader(root).camera_keys
            width, height = 320, 180
        else:
            root, what, keys = Path(folder) / "paint", "paint h264 gop 250", (BASE, WRIST)
            width, height = 96, 54
            PaintSet(lengths=(300, 250), cameras=keys, codec="libx264", gop=250).build(root)
        settings = BuildSettings(cameras=CameraLayout(camera_keys=keys, view_width=width, view_height=height))
        source = LeRobotReader(root, camera_keys=keys)
        source.indices()  # checking the set is work of the reader, done once before any build
        names = itertools.count()

        def build() -> dict[str, object]:
            out = Path(folder) / f"out{next(names)}"
            try:
                return build_shards(source, out=out, settings=settings, progress=False)
            finally:
                shutil.rmtree(out, ignore_errors=True)

        def random_access() -> int:
            done = 0
            for index in source.indices():
                episode = source.episode(index)
                for key in keys:
                    for k in range(0, episode.num_frames, NAIVE_STRIDE):
                        next(episode.cameras[key].frames([k]))
                        done += 1
            return done

        decode_counter.reset()
        images = int(build()["num_images"])  # type: ignore[call-overload]
        decoded = decode_counter.decoded
        decode_counter.reset()
        naive_images = random_access()
        naive_decoded = decode_counter.decoded
        ours = time_runs(build, warmup=0, runs=5)
        naive = time_runs(random_access, warmup=0, runs=3)
        ours_per_s, naive_per_s = images / ours.median_s, naive_images / naive.median_s
        emit(
            "build",
            data=what,
            images=images,
            naive_images=naive_images,
            warmup=1,
            runs=ours.runs,
            median_s=ours.median_s,
            p95_s=ours.p95_s,
            images_per_s=ours_per_s,
            naive_median_s=naive.median_s,
            naive_p95_s=naive.p95_s,
            naive_images_per_s=naive_per_s,
            ratio=ours_per_s / naive_per_s,
            decoded=decoded,
            naive_decoded=naive_decoded,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
