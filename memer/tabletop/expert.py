"""The scripted expert: names the subtask from the world's state and lets the controller carry it out."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memer.episode import ArrayFrames, Episode, InstructionSpan, segments_from_labels
from memer.errors import MemerError
from memer.tabletop.perturbations import FPS, USUAL
from memer.tabletop.tasks import episode_streams, make_controller, make_world
from memer.tabletop.world import World

CAMERA_KEYS = ("base", "wrist")
#: Range of the demonstrator's speed, drawn once per episode.
SPEEDS = (0.8, 1.0)
MAX_DEMONSTRATION = 2000


@dataclass(slots=True)
class DemonstrationStep:
    """What holds at one step, before its action is applied.

    Attributes:
        world: the world at this step; the same object in every step.
        instruction: in force.
        subtask: label of the expert.
        segment_id: sets segments of the same label that follow each other apart.
        action: float32[4], about to be applied.
    """

    world: World
    instruction: str
    subtask: str
    segment_id: int
    action: NDArray[np.float32]


def subtask_ahead(world: World, *, lookahead: int = 0, speed: float = 0.9) -> str:
    """The expert's subtask `lookahead` steps from now, if the expert carries on from here (privileged)."""
    if lookahead == 0:
        return world.expert_subtask()
    future = copy.deepcopy(world)
    future.perturbations.probability = 0.0
    controller = make_controller(world.task, speed=speed)
    for _ in range(lookahead):
        if future.demonstration_finished:
            break
        future.step(controller.act(future, future.expert_subtask()))
    return future.expert_subtask()


def demonstration_steps(
    task: str,
    *,
    split: str,
    index: int,
    seed: int = 0,
    perturb: float = 0.0,
    perturb_kinds: Sequence[str] = USUAL,
) -> Iterator[DemonstrationStep]:
    """Run the expert and yield every step before its action is applied; arguments as `make_world`."""
    world = make_world(
        task, split=split, index=index, seed=seed, perturb=perturb, perturb_kinds=perturb_kinds
    )
    style = episode_streams(task, split=split, index=index, seed=seed)[2]
    controller = make_controller(task, speed=float(style.uniform(*SPEEDS)))
    while not world.demonstration_finished:
        segment_id, subtask = world.expert_segment()
        action = controller.act(world, subtask)
        yield DemonstrationStep(world, world.instruction, subtask, segment_id, action)
        if world.step_count >= MAX_DEMONSTRATION:
            raise MemerError(
                f"{task} {split} episode {index} seed {seed}: the expert needs more than {MAX_DEMONSTRATION} "
                f"steps; lower perturb={perturb}"
            )
        world.step(action)


def demonstrate(
    task: str,
    *,
    split: str = "train",
    index: int = 0,
    seed: int = 0,
    perturb: float = 0.0,
    perturb_kinds: Sequence[str] = USUAL,
    frame_size: int = 128,
    source: str | None = None,
) -> Episode:
    """One demonstration as an episode.

    Args:
        task: name of the task.
        split: train, val or test.
        index: number of the episode within the split; becomes its episode_index.
        seed: of the whole set.
        perturb: chance per second that a perturbation starts, 0..1.
        perturb_kinds: what may happen, of freeze, slip, displace and drift.
        frame_size: edge of both square views, px.
        source: name of the data set, by default `tabletop_<task>_<split>`.

    Returns:
        State float32[T, 4] (x, y, z, grip), action float32[T, 4], cameras base and wrist.
    """
    states, actions, labels, segment_ids = [], [], [], []
    frames: dict[str, list[NDArray[np.uint8]]] = {key: [] for key in CAMERA_KEYS}
    spans: list[InstructionSpan] = []
    world: World | None = None
    steps = demonstration_steps(
        task, split=split, index=index, seed=seed, perturb=perturb, perturb_kinds=perturb_kinds
    )
    for k, step in enumerate(steps):
        world = step.world
        states.append(world.state)
        actions.append(step.action)
        labels.append(step.subtask)
        segment_ids.append(step.segment_id)
        for key, view in world.paint(frame_size).items():
            frames[key].append(view)
        if not spans or spans[-1].text != step.instruction:
            spans.append(InstructionSpan(k, step.instruction))
    assert world is not None, "a demonstration has at least one step"
    return Episode(
        source=source or f"tabletop_{task}_{split}",
        episode_index=index,
        fps=float(FPS),
        cameras={key: ArrayFrames(np.stack(views)) for key, views in frames.items()},
        state=np.stack(states),
        action=np.stack(actions),
        instructions=tuple(spans),
        segments=segments_from_labels(labels, segment_ids),
        metadata={
            "task": task,
            "split": split,
            "seed": seed,
            "perturb": perturb,
            "measures": world.measures(),
            "perturbations": [[at, kind] for at, kind in world.perturbations.events],
        },
    )
