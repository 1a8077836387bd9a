"""The tasks by name, and the seeds of their episodes."""

from collections.abc import Sequence
from typing import Final, Literal, get_args

import numpy as np

from memer.errors import UsageError
from memer.tabletop.controller import SubtaskController
from memer.tabletop.counting_scoops.controller import CountingScoopsController
from memer.tabletop.counting_scoops.world import CountingScoopsWorld
from memer.tabletop.dust_and_replace.controller import DustAndReplaceController
from memer.tabletop.dust_and_replace.world import DustAndReplaceWorld
from memer.tabletop.object_search.controller import ObjectSearchController
from memer.tabletop.object_search.world import ObjectSearchWorld
from memer.tabletop.observe_and_pick_up.controller import ObserveAndPickUpController
from memer.tabletop.observe_and_pick_up.world import ObserveAndPickUpWorld
from memer.tabletop.perturbations import USUAL, Perturbations
from memer.tabletop.press_button.controller import PressButtonController
from memer.tabletop.press_button.world import PressButtonWorld
from memer.tabletop.swap_blocks.controller import SwapBlocksController
from memer.tabletop.swap_blocks.world import SwapBlocksWorld
from memer.tabletop.world import World

Split = Literal["train", "val", "test"]
SPLITS: Final[tuple[str, ...]] = get_args(Split)

_WORLDS: Final[dict[str, type[World]]] = {
    world.task: world
    for world in (
        ObjectSearchWorld,
        CountingScoopsWorld,
        DustAndReplaceWorld,
        PressButtonWorld,
        SwapBlocksWorld,
        ObserveAndPickUpWorld,
    )
}
_CONTROLLERS: Final[dict[str, type[SubtaskController]]] = {
    controller.task: controller
    for controller in (
        ObjectSearchController,
        CountingScoopsController,
        DustAndReplaceController,
        PressButtonController,
        SwapBlocksController,
        ObserveAndPickUpController,
    )
}
TASKS: Final[tuple[str, ...]] = tuple(_WORLDS)


def world_class(task: str) -> type[World]:
    """The world of a task; an unknown name is a UsageError."""
    if task not in _WORLDS:
        raise UsageError(f"tabletop task {task!r}: unknown, must be one of {', '.join(TASKS)}")
    return _WORLDS[task]


def make_controller(task: str, *, speed: float = 0.9) -> SubtaskController:
    """The controller that obeys this task's subtask texts."""
    world_class(task)
    return _CONTROLLERS[task](speed=speed)


def episode_streams(task: str, *, split: str, index: int, seed: int = 0) -> list[np.random.Generator]:
    """Three independent random streams of one episode: layout, perturbations, style of the demonstrator.

    Splits never overlap: the split is part of the spawn key, whatever index and seed are.

    Args:
        task: name of the task.
        split: train, val or test.
        index: number of the episode within the split, >= 0.
        seed: of the whole set, >= 0.
    """
    world_class(task)
    if split not in SPLITS:
        raise UsageError(f"tabletop split {split!r}: unknown, must be one of {', '.join(SPLITS)}")
    if index < 0 or seed < 0:
        raise UsageError(f"tabletop index {index}, seed {seed}: must not be negative")
    # Keys spell the task's name, so that adding a task moves no other's seeds.
    sequence = np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split), *task.encode(), index))
    return [np.random.default_rng(child) for child in sequence.spawn(3)]


def make_world(
    task: str,
    *,
    split: str = "train",
    index: int = 0,
    seed: int = 0,
    perturb: float = 0.0,
    perturb_kinds: Sequence[str] = USUAL,
) -> World:
    """The world of one episode at its first step.

    Args:
        task: name of the task.
        split: train, val or test.
        index: number of the episode within the split.
        seed: of the whole set.
        perturb: chance per second that a perturbation starts, 0..1.
        perturb_kinds: what may happen, of freeze, slip, displace and drift.

    Raises:
        UsageError: an unknown kind, none, or a chance outside 0..1.
    """
    if not 0.0 <= perturb <= 1.0:
        raise UsageError(f"tabletop perturb {perturb!r}: a chance per second, must lie in 0..1")
    layout, disturbances, _ = episode_streams(task, split=split, index=index, seed=seed)
    return world_class(task)(layout, perturbations=Perturbations(perturb, disturbances, perturb_kinds))
