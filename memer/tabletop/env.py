"""Gymnasium environments of the tabletop tasks."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from memer.errors import UsageError
from memer.tabletop.expert import CAMERA_KEYS, subtask_ahead
from memer.tabletop.perturbations import FPS, USUAL
from memer.tabletop.tasks import TASKS, make_world, world_class
from memer.tabletop.world import HIGH, LOW, Measures, World

Observation = dict[str, Any]


class TabletopEnv(gymnasium.Env[Observation, NDArray[np.float32]]):
    """One task as an environment.

    Observation: `images` {`base`, `wrist`} uint8[S, S, 3] RGB, `state` float32[4] (x, y, z in table widths,
    grip 0 open .. 1 closed). Action: float32[4], dx, dy, dz as fractions of the greatest step, grip > 0
    closes.
    Reward: progress made in this step, as `measures` counts it. `info["instruction"]` is the text in force.

    Args:
        task: name of the task.
        split: train, val or test.
        index: episode that `reset()` without a seed starts; `reset(seed=n)` starts episode n of the split.
        seed: of the whole set.
        perturb: chance per second that a perturbation starts, 0..1.
        perturb_kinds: what may happen, of freeze, slip, displace and drift.
        frame_size: edge of both square views, px.
        render_mode: `rgb_array` or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": FPS}

    def __init__(
        self,
        task: str,
        *,
        split: str = "test",
        index: int = 0,
        seed: int = 0,
        perturb: float = 0.0,
        perturb_kinds: Sequence[str] = USUAL,
        frame_size: int = 128,
        render_mode: str | None = None,
    ) -> None:
        if frame_size < 16:
            raise UsageError(f"tabletop frame_size {frame_size}: must be at least 16 px")
        self.task, self.split, self.index, self.seed = task, split, index, seed
        self.perturb, self.perturb_kinds = perturb, tuple(perturb_kinds)
        self.frame_size, self.render_mode = frame_size, render_mode
        self.time_limit = world_class(task).time_limit
        image = spaces.Box(0, 255, (frame_size, frame_size, 3), np.uint8)
        state = spaces.Box(
            np.array([*LOW, 0.0], dtype=np.float32),
            np.array([*HIGH, 1.0], dtype=np.float32),
            dtype=np.float32,
        )
        self.observation_space = spaces.Dict(
            {"images": spaces.Dict(dict.fromkeys(CAMERA_KEYS, image)), "state": state}
        )
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.world: World = self._new_world(index)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the episode `index`, or with `seed=n` episode n of the same split."""
        super().reset(seed=seed)
        self.world = self._new_world(self.index if seed is None else seed)
        return self._observation(), self._info()

    def step(self, action: NDArray[np.float32]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Apply one action; truncated at the time limit."""
        before = self.world.progress
        self.world.step(action)
        terminated = self.world.finished
        truncated = not terminated and self.world.step_count >= self.time_limit
        reward = float(self.world.progress - before)
        return self._observation(), reward, terminated, truncated, self._info()

    def render(self) -> NDArray[np.uint8] | None:
        """Both views side by side, uint8[S, 2 S, 3], in mode `rgb_array`."""
        if self.render_mode != "rgb_array":
            return None
        views = self.world.paint(self.frame_size)
        return np.concatenate([views[key] for key in CAMERA_KEYS], axis=1)

    def measures(self) -> Measures:
        """What has been achieved so far, from the world's state."""
        return self.world.measures()

    def expert_subtask(self, *, lookahead: int = 0) -> str:
        """The subtask that the scripted expert would name `lookahead` steps from now (privileged)."""
        return subtask_ahead(self.world, lookahead=lookahead)

    def _new_world(self, index: int) -> World:
        return make_world(
            self.task,
            split=self.split,
            index=index,
            seed=self.seed,
            perturb=self.perturb,
            perturb_kinds=self.perturb_kinds,
        )

    def _observation(self) -> Observation:
        return {"images": self.world.paint(self.frame_size), "state": self.world.state}

    def _info(self) -> dict[str, Any]:
        return {"instruction": self.world.instruction, "step": self.world.step_count}


def make_env(
    task: str,
    *,
    split: str = "test",
    index: int = 0,
    seed: int = 0,
    perturb: float = 0.0,
    perturb_kinds: Sequence[str] = USUAL,
    frame_size: int = 128,
    render_mode: str | None = None,
) -> TabletopEnv:
    """An environment of `task`; arguments as TabletopEnv."""
    return TabletopEnv(
        task,
        split=split,
        index=index,
        seed=seed,
        perturb=perturb,
        perturb_kinds=perturb_kinds,
        frame_size=frame_size,
        render_mode=render_mode,
    )


for _task in TASKS:
    gymnasium.register(
        f"memer/{_task}-v0",
        entry_point="memer.tabletop.env:TabletopEnv",
        kwargs={"task": _task},
    )
