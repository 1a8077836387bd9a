"""Progress after alignment against true progress: `python -m tests.bench.bench_align`.

Along tabletop demonstrations of the test split the true progress is shifted by a drift and aligned once with
the true plan of the segment; lower is better, the drift itself is what no alignment leaves.
"""

from typing import get_args

import numpy as np

from data.tabletop import TabletopSource
from memer.canvas import canvases
from memer.contract import CameraLayout
from memer.plan_settings import CanvasLayout, CanvasRegion
from memer.progress import UpdateRule, align_progress, progress_labels
from memer.similarity import make_similarity
from memer.windows import bucket_last_indices
from tests.bench.report import emit

TASKS = ("object_search", "press_button")
EPISODES = 5
DRIFTS = (-0.2, -0.1, 0.0, 0.1, 0.2)
STRIDE = 4

CAMERAS = CameraLayout(camera_keys=("base",), view_width=32, view_height=32)
CANVAS = CanvasLayout(
    height=32, width=32, regions=(CanvasRegion(camera="base", y=0, x=0, height=32, width=32),)
)


def main() -> None:
    """Measure every similarity and rule on every task; one line each."""
    for task in TASKS:
        source = TabletopSource(task=task, split="test", num_episodes=EPISODES, frame_size=32)
        cases = []  # (true progress, references, frame)
        for index in source.indices():
            episode = source.episode(index)
            painted = canvases(episode, range(episode.num_frames), canvas=CANVAS, cameras=CAMERAS)
            for segment in episode.segments:
                chosen = [segment.start, *bucket_last_indices(segment.start, segment.end)]
                references = np.stack([painted[k] for k in chosen])
                labels = progress_labels(segment.start, segment.end)
                for k in range(0, len(labels), STRIDE):
                    cases.append((float(labels[k]), references, painted[segment.start + k]))
        for kind in ("rgb_mae", "feature_cosine"):
            for rule in get_args(UpdateRule):
                errors = {}
                for drift in DRIFTS:
                    similarity = make_similarity(kind)
                    left = [
                        abs(align_progress(p + drift, refs, frame, similarity=similarity, rule=rule) - p)
                        for p, refs, frame in cases
                    ]
                    errors[f"error@{drift:+g}"] = round(float(np.mean(left)), 4)
                emit("align", task=task, similarity=kind, rule=rule, cases=len(cases), **errors)


if __name__ == "__main__":
    main()
