"""Sequential decoding against random access: `python -m tests.bench.bench_decode [ROOT]`.

The naive way opens the file and seeks to the key frame before for every single frame, as samplers that read
by index do. Without ROOT a paint set with H.264, 250 frames between key frames is made (found in public
sets); with a real LeRobot folder its first episode is read.
"""

import sys
import tempfile
from pathlib import Path

from data.lerobot import LeRobotReader, decode_counter
from tests.bench.report import emit, time_runs
from tests.fixtures.paint import BASE, PaintSet


def main(arguments: list[str]) -> None:
    """Measure one set and print the line."""
    with tempfile.TemporaryDirectory() as folder:
        if arguments:
            root, what = Path(arguments[0]), Path(arguments[0]).name
        else:
            root, what = Path(folder) / "paint", "paint h264 gop 250"
            PaintSet(lengths=(300,), cameras=(BASE,), codec="libx264", gop=250).build(root)
        reader = LeRobotReader(root)
        episode = reader.episode(reader.indices()[0])
        frames = next(iter(episode.cameras.values()))

        def sequential() -> None:
            for _ in frames.frames():
                pass

        def random_access() -> None:
            for k in range(len(frames)):
                next(frames.frames([k]))

        decode_counter.reset()
        sequential()
        decoded = decode_counter.decoded
        decode_counter.reset()
        random_access()
        naive_decoded = decode_counter.decoded
        ours = time_runs(sequential, warmup=1, runs=10)
        naive = time_runs(random_access, warmup=0, runs=3)
        emit(
            "decode",
            data=what,
            frames=len(frames),
            warmup=1,
            runs=ours.runs,
            median_s=ours.median_s,
            p95_s=ours.p95_s,
            frames_per_s=len(frames) / ours.median_s,
            naive_median_s=naive.median_s,
            naive_p95_s=naive.p95_s,
            ratio=naive.median_s / ours.median_s,
            decoded=decoded,
            naive_decoded=naive_decoded,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
