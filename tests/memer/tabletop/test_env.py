"""The environments from outside: Gymnasium's own check, determinism, seeds, limits, pickling."""

import pickle
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from memer.errors import UsageError
from memer.tabletop import SPLITS, TASKS, make_controller, make_env, make_world


def roll(task, *, steps=60, index=3, perturb=0.5, pickle_at=None):
    """Frames, states and instructions of seeded random actions."""
    env = make_env(task, index=index, perturb=perturb, frame_size=32)
    observation, info = env.reset()
    rng = np.random.default_rng(0)
    seen = []
    for k in range(steps):
        if k == pickle_at:
            env = pickle.loads(pickle.dumps(env))
        images = observation["images"]
        seen.append((images["base"], images["wrist"], observation["state"], info["instruction"]))
        action = rng.uniform(-1, 1, 4).astype(np.float32)
        observation, _, _, _, info = env.step(action)
    return seen


def assert_same(first, second):
    for left, right in zip(first, second, strict=True):
        for a, b in zip(left[:3], right[:3], strict=True):
            np.testing.assert_array_equal(a, b)
        assert left[3] == right[3]


@pytest.mark.parametrize("task", TASKS)
def test_gymnasium_check_passes_without_warnings(task):
    env = gymnasium.make(f"memer/{task}-v0", frame_size=32, render_mode="rgb_array").unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_and_actions_give_same_frames(task):
    assert_same(roll(task), roll(task))


@pytest.mark.parametrize("task", TASKS)
def test_a_pickled_environment_goes_on_the_same(task):
    assert_same(roll(task), roll(task, pickle_at=25))


@pytest.mark.parametrize("task", TASKS)
def test_observations_lie_in_the_declared_space_at_any_size(task):
    env = make_env(task, frame_size=48, render_mode="rgb_array")
    observation, info = env.reset()
    assert observation in env.observation_space
    assert info["instruction"] == env.unwrapped.world.instruction
    assert env.render().shape == (48, 96, 3)
    np.testing.assert_array_equal(env.render()[:, :48], observation["images"]["base"])


def test_reset_with_a_seed_starts_that_episode_of_the_split():
    env = make_env("object_search", index=0, frame_size=16)
    env.reset(seed=7)
    other = make_env("object_search", index=7, frame_size=16)
    other.reset()
    assert env.world.targets == other.world.targets
    env.reset()
    assert env.world.targets == make_world("object_search", split="test", index=0).targets


@pytest.mark.parametrize("task", TASKS)
def test_splits_and_seeds_share_no_random_stream(task):
    from memer.tabletop.tasks import episode_streams

    drawn = [
        stream.random(4).tobytes()
        for split in SPLITS
        for seed in (0, 1)
        for index in range(50)
        for stream in episode_streams(task, split=split, index=index, seed=seed)
    ]
    assert len(set(drawn)) == len(drawn) == 3 * 2 * 50 * 3


def test_perturbations_do_not_change_the_layout():
    calm, rough = (make_world("object_search", index=5, perturb=p) for p in (0.0, 1.0))
    assert calm.targets == rough.targets
    assert {n: t.place for n, t in calm.things.items()} == {n: t.place for n, t in rough.things.items()}


@pytest.mark.parametrize("task", TASKS)
def test_an_idle_robot_is_cut_off_at_the_time_limit(task):
    env = make_env(task, frame_size=16)
    env.reset()
    controller = make_controller(task)
    steps = 0
    while True:
        *_, terminated, truncated, _ = env.step(controller.act(env.world, None))
        steps += 1
        if terminated or truncated:
            break
    assert (steps, terminated, truncated) == (env.time_limit, False, True)
    assert env.unwrapped.measures()["success"] is False


def test_only_the_chosen_kinds_of_perturbation_happen():
    env = make_env("object_search", index=3, perturb=1.0, perturb_kinds=["freeze"], frame_size=16)
    env.reset()
    controller = make_controller("object_search")
    for _ in range(100):
        env.step(controller.act(env.world, env.expert_subtask()))
    assert {kind for _, kind in env.world.perturbations.events} == {"freeze"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"task": "stack"}, "stack"),
        ({"task": "object_search", "split": "dev"}, "dev"),
        ({"task": "object_search", "perturb": 1.5}, "1.5"),
        (
            {"task": "object_search", "perturb_kinds": ["freezes"]},
            "perturb_kinds.*freezes.*freeze, slip, displace",
        ),
        ({"task": "object_search", "perturb_kinds": []}, "perturb_kinds"),
        ({"task": "object_search", "perturb_kinds": "freeze"}, "must be a list"),
        ({"task": "object_search", "index": -1}, "-1"),
        ({"task": "object_search", "frame_size": 4}, "4"),
    ],
)
def test_impossible_arguments_are_usage_errors(arguments, named):
    with pytest.raises(UsageError, match=named):
        make_env(**arguments)
