"""Does an executor set out the right way? `python -m tests.bench.bench_heading EXPORT TASK [EPISODES]`.

At the first frame of every segment the state says nothing yet: plan and picture alone tell where to go.
Under the true plan of unseen demonstrations the executor gives one chunk; it is right where its first actions
lead to where the demonstrator was by then. The mean action error hides this: few training samples decide it.
"""

import sys

import numpy as np

from memer.canvas import canvases
from memer.plan_windows import segment_plan_indices
from memer.tabletop.expert import demonstrate
from memer.tabletop.world import MAX_STEP
from models.map_planners import ModelExecutor
from tests.bench.report import emit

#: Actions that are looked at, as many as an evaluation executes of a chunk.
EXECUTED = 12
#: Furthest from the demonstrator's place, table widths: within reach of what it went for.
NEAR = 0.07


def main(arguments: list[str]) -> None:
    """One line per place in the order of the segments: share of episodes that set out right."""
    if len(arguments) < 2:  # `make bench` has no trained executor
        print("heading: needs the export of a trained executor and its task")
        return
    export, task, episodes = arguments[0], arguments[1], int(arguments[2]) if len(arguments) > 2 else 60
    executor = ModelExecutor.from_artifact(export)
    plan = executor.plan_settings
    right: dict[int, list[bool]] = {}
    for index in range(episodes):
        episode = demonstrate(task, split="test", index=index, frame_size=32)
        painted = canvases(
            episode, range(episode.num_frames), canvas=plan.canvas, cameras=executor.contract.cameras
        )
        pictures = np.stack([painted[k] for k in range(episode.num_frames)])
        executor.reset(episode.instruction_at(0), seed=index)
        for number, segment in enumerate(episode.segments, start=1):
            start, then = segment.start, min(segment.start + EXECUTED, segment.end - 1)
            references = pictures[segment_plan_indices(start, segment.end)]
            executor.start_segment(None if plan.visual_plan == "none" else references, segment.label)
            chunk = executor.act(pictures[start], episode.state[start], 0.0)
            moved = MAX_STEP * np.clip(chunk.actions[: then - start, :2], -1, 1).sum(axis=0)
            missed = np.abs(episode.state[start, :2] + moved - episode.state[then, :2]).max()
            right.setdefault(number, []).append(bool(missed < NEAR))
    for number, found in right.items():
        emit("heading", export=export, segment=number, episodes=len(found), right=float(np.mean(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
