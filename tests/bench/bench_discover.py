"""Discovered segments against known ones: `python -m tests.bench.bench_discover [CR5_ROOT]`.

Tabletop demonstrations of the test split, and, where the folder is given, the CR5 episodes with their gripper
segments as reference; there, cuts at the gripper are right by definition, and `pauses` alone says more.
Floors: equal parts of the true number, and one single segment.
"""

import sys
import time
from collections.abc import Callable

from data.labels import GripperLabels
from data.lerobot import LeRobotReader
from data.tabletop import TabletopSource
from memer.boundaries import score_boundaries, summarize_boundaries
from memer.discover import ChangePoint, Events, SegmentProvider, Uniform, discover
from memer.episode import Episode
from tests.bench.report import emit

TASKS = ("object_search", "counting_scoops", "press_button")
EPISODES = 20

PROVIDERS: dict[str, Callable[[Episode], SegmentProvider]] = {
    "one_segment": lambda episode: Uniform(count=1),
    "uniform_true_count": lambda episode: Uniform(count=len(episode.segments)),
    "events": lambda episode: Events(),
    "pauses": lambda episode: Events(gripper=False),
    "gripper": lambda episode: Events(pauses=False),
    "change_point": lambda episode: ChangePoint(),
}


def main(arguments: list[str]) -> None:
    """Score every provider on every set; one line each."""
    sets: dict[str, list[Episode]] = {}
    for task in TASKS:
        source = TabletopSource(task=task, split="test", num_episodes=EPISODES, frame_size=32)
        sets[task] = [source.episode(index) for index in source.indices()]
    if arguments:
        reader = LeRobotReader(arguments[0])
        reference = GripperLabels(names=["pick up", "carry", "release"])
        sets["cr5_gripper"] = [reference(reader.episode(index)) for index in reader.indices()]
    for name, episodes in sets.items():
        for kind, provider in PROVIDERS.items():
            start = time.perf_counter()
            found = [discover(episode, provider(episode)).segments for episode in episodes]
            seconds = time.perf_counter() - start
            scores = [
                score_boundaries(episode.segments, segments, fps=episode.fps)
                for episode, segments in zip(episodes, found, strict=True)
            ]
            row = {
                key: round(value, 3) if isinstance(value, float) else value
                for key, value in summarize_boundaries(scores).items()
                if not key.startswith("f1_ci")
            }
            emit("discover", set=name, provider=kind, seconds_per_episode=seconds / len(episodes), **row)


if __name__ == "__main__":
    main(sys.argv[1:])
