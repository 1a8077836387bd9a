"""The embedded benchmark: tabletop tasks that need memory, as Gymnasium environments.

The closed loop of a planner and the scripted low level:

    env = make_env("object_search", split="test", index=3, perturb=0.0)
    controller = make_controller("object_search")
    observation, info = env.reset()
    while True:
        subtask = ...                  # a planner's text, from observation["images"] and info["instruction"]
        action = controller.act(env.unwrapped.world, subtask)
        observation, reward, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            break
    env.unwrapped.measures()           # {"success": ..., ...} from the world's state

`info["instruction"]` may change at any step. `env.unwrapped.expert_subtask(lookahead=k)` names the expert's
subtask k steps ahead: the oracle planner. `env.unwrapped.world.expert_segment()` gives (number, text) of the
expert's segment; it changes exactly when a segment is over, also where the next one has the same text, and
`controller.act(..., command_id=number)` tells repeated commands apart by the number. The environments are
registered with Gymnasium, too, as `memer/object_search-v0` and so on. Demonstrations:
`demonstrate(task, split=..., index=...)`.
"""

from memer.tabletop.controller import SubtaskController
from memer.tabletop.env import TabletopEnv, make_env
from memer.tabletop.expert import CAMERA_KEYS, demonstrate, demonstration_steps, subtask_ahead
from memer.tabletop.tasks import SPLITS, TASKS, make_controller, make_world
from memer.tabletop.world import World

__all__ = [
    "CAMERA_KEYS",
    "SPLITS",
    "TASKS",
    "SubtaskController",
    "TabletopEnv",
    "World",
    "demonstrate",
    "demonstration_steps",
    "make_controller",
    "make_env",
    "make_world",
    "subtask_ahead",
]
