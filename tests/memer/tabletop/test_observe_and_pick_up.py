"""Observe and pick up: what is shown and hidden, what counts, what the controller does."""

import numpy as np
import pytest

from memer.tabletop import demonstrate, make_controller, make_world
from memer.tabletop.observe_and_pick_up.layout import BLOCK_COLORS, STILL, TRAVEL_Z
from memer.tabletop.observe_and_pick_up.world import PICK_UP, WAIT

TASK = "observe_and_pick_up"


@pytest.fixture
def world():
    return make_world(TASK, split="val", index=0)


def wait_for_the_wall(world):
    controller = make_controller(TASK)
    while world.wall < 1.0:
        world.step(controller.act(world, WAIT))
    return controller


def lift(world, thing, *, error=(0.0, 0.0)):
    world.gripper[:] = thing.position + np.array([*error, 0.0])
    for _ in range(2):
        world.step(np.array([0, 0, 0, 1], dtype=np.float32))
    for _ in range(5):
        world.step(np.array([0, 0, 1, 1], dtype=np.float32))


def test_each_colour_is_shown_and_lies_anywhere():
    worlds = [make_world(TASK, index=index) for index in range(60)]
    assert {w.target.color for w in worlds} == set(BLOCK_COLORS)
    assert len({tuple(w.things) for w in worlds}) >= 15
    assert all(len(w.things) == 4 for w in worlds)


def test_texts_and_instruction_name_no_colour():
    for index in range(5):
        episode = demonstrate(TASK, index=index, frame_size=16)
        assert [segment.label for segment in episode.segments] == [WAIT, PICK_UP]
        assert not any(color in episode.instruction_at(0) for color in BLOCK_COLORS)


def test_segments_have_a_learnable_length():
    for index in range(20):
        episode = demonstrate(TASK, index=index, frame_size=16)
        assert all(20 <= segment.end - segment.start <= 45 for segment in episode.segments)
        assert episode.state[-1, 2] > TRAVEL_Z - 0.01


def test_pictures_tell_the_colour_before_the_wall_stands_and_never_after(world):
    def pictures():
        """One per colour that might have been shown, all else equal."""
        shown = world.target
        seen = []
        for thing in world.things.values():
            world.target = thing
            seen.append(world.paint(32))
        world.target = shown
        return seen

    before = pictures()
    assert len({picture["base"].tobytes() for picture in before}) == 4
    assert len({picture["wrist"].tobytes() for picture in before}) == 1
    wait_for_the_wall(world)
    after = pictures()
    for key in ("base", "wrist"):
        assert len({picture[key].tobytes() for picture in after}) == 1


def test_to_move_before_the_wall_stands_is_a_failure(world):
    controller = make_controller(TASK)
    while not world.finished:
        world.step(controller.act(world, PICK_UP))
    assert world.wall < 1.0
    assert (world.measures()["success"], world.measures()["moved_early"]) == (False, True)


def test_to_drift_a_little_while_waiting_is_allowed(world):
    world.gripper += np.array([STILL - 0.01, -(STILL - 0.01), 0.0])
    wait_for_the_wall(world)
    assert not world.finished


@pytest.mark.parametrize("error", [(0.0, 0.0), (0.06, -0.06)])
def test_success_is_the_block_shown(world, error):
    wait_for_the_wall(world)
    lift(world, world.target, error=error)
    assert world.finished
    assert world.measures() == {"success": True, "moved_early": False, "wrong_block": False}


def test_another_block_is_a_failure_also_when_the_right_one_follows(world):
    wait_for_the_wall(world)
    wrong = next(thing for thing in world.things.values() if thing is not world.target)
    lift(world, wrong)
    assert world.finished
    assert (world.measures()["success"], world.measures()["wrong_block"]) == (False, True)
    for _ in range(3):
        world.step(np.array([0, 0, 0, -1], dtype=np.float32))
    lift(world, world.target)
    assert not world.measures()["success"]


def test_a_touched_block_that_stays_down_is_no_failure(world):
    wait_for_the_wall(world)
    wrong = next(thing for thing in world.things.values() if thing is not world.target)
    world.gripper[:] = wrong.position
    for grip in (1, 1, -1, -1):
        world.step(np.array([0, 0, 0, grip], dtype=np.float32))
    assert world.held is None
    assert not world.finished


def test_guessing_succeeds_as_often_as_chance():
    """A policy that takes the leftmost block, whatever was shown."""
    successes = 0
    for index in range(100):
        world = make_world(TASK, split="test", index=index)
        wait_for_the_wall(world)
        lift(world, next(iter(world.things.values())))
        successes += world.measures()["success"]
    assert 12 <= successes <= 40


def test_a_block_that_slips_is_taken_up_again(world):
    controller = wait_for_the_wall(world)
    while world.held is None:
        world.step(controller.act(world, PICK_UP))
    assert world._slip()
    while not world.finished:
        world.step(controller.act(world, PICK_UP))
    assert world.measures()["success"]


@pytest.mark.parametrize("text", ["pick up the red block", "wait"])
def test_other_texts_hold_still(world, text):
    before = world.state
    controller = make_controller(TASK)
    for _ in range(5):
        world.step(controller.act(world, text))
    assert controller.status == "unknown"
    np.testing.assert_array_equal(world.state, before)
