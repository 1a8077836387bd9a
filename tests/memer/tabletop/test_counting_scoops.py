"""Counting scoops: what can be seen, what is counted, what the controller does."""

import numpy as np
import pytest

from memer.tabletop import make_controller, make_world
from memer.tabletop.counting_scoops.layout import BOWLS, CONTAINERS
from memer.tabletop.counting_scoops.world import DROP, PICK_UP, RESET_SCOOPER, scoop_text

TASK = "counting_scoops"


@pytest.fixture
def world():
    return make_world(TASK, split="val", index=0)


def carry_out(world, *subtasks, steps=70):
    controller = make_controller(TASK)
    for subtask in subtasks:
        for _ in range(steps):
            world.step(controller.act(world, subtask))
    return controller.status


def test_the_instruction_gives_numbers_ingredients_and_bowls(world):
    for (ingredient, bowl), count in world.asked.items():
        assert f"{count} scoop" in world.instruction
        assert f"of {ingredient} in the {bowl} bowl" in world.instruction
    assert {bowl for _, bowl in world.asked} == {"left", "right"}


def test_pictures_do_not_tell_how_many_scoops_fell(world):
    pair = next(iter(world.asked))
    pictures = []
    carry_out(world, PICK_UP)
    for _ in range(4):
        carry_out(world, scoop_text(*pair), RESET_SCOOPER)
        for place in (*BOWLS.values(), *CONTAINERS.values()):
            for height in (0.12, 0.4):
                before = world.gripper.copy()
                world.gripper[:] = (*place, height)
                pictures.append(world.paint(64))
                world.gripper[:] = before
    assert world.done[pair] == 4
    per_scoop = len(pictures) // 4
    for k in range(per_scoop, len(pictures)):
        for key in ("base", "wrist"):
            np.testing.assert_array_equal(pictures[k][key], pictures[k % per_scoop][key])


def test_the_pour_itself_shows_bowl_and_ingredient(world):
    carry_out(world, PICK_UP)
    seen = []
    for pair in world.asked:
        carry_out(world, scoop_text(*pair))
        poured = world.paint(64)
        world.poured_here = None
        empty = world.paint(64)
        assert not np.array_equal(poured["wrist"], empty["wrist"])
        assert not np.array_equal(poured["base"], empty["base"])
        seen.append(poured["wrist"])
        carry_out(world, RESET_SCOOPER)
    assert not np.array_equal(*seen)


def test_one_text_pours_one_scoop_however_long_it_stands(world):
    pair = next(iter(world.asked))
    assert carry_out(world, PICK_UP, scoop_text(*pair), steps=200) == "done"
    assert world.done == {pair: 1}
    carry_out(world, RESET_SCOOPER, scoop_text(*pair))
    assert world.done == {pair: 2}


def test_missing_extra_and_misplaced_scoops_are_wrong_scoops(world):
    (first, count), (second, other_count) = world.asked.items()
    assert world.measures()["wrong_scoops"] == count + other_count
    carry_out(world, PICK_UP)
    for _ in range(count + 2):
        carry_out(world, scoop_text(*first), RESET_SCOOPER)
    assert world.measures()["wrong_scoops"] == 2 + other_count
    # The second ingredient into the wrong bowl: one more, and what was asked for stays missing.
    carry_out(world, scoop_text(second[0], first[1]), RESET_SCOOPER)
    assert world.measures()["wrong_scoops"] == 3 + other_count


def test_dropping_ends_the_episode_right_or_wrong(world):
    carry_out(world, PICK_UP, DROP)
    assert world.finished
    measures = world.measures()
    assert (measures["dropped"], measures["success"]) == (True, False)
    assert measures["wrong_scoops"] == measures["asked_scoops"]


def test_a_slip_is_no_drop_and_the_scooper_is_taken_up_again(world):
    pair = next(iter(world.asked))
    controller = make_controller(TASK)
    while world.load is None:
        world.step(controller.act(world, scoop_text(*pair)))
    for _ in range(10):
        world.step(controller.act(world, scoop_text(*pair)))
    assert world._slip()
    assert (world.held, world.load, world.measures()["dropped"]) == (None, None, False)
    carry_out(world, scoop_text(*pair), steps=150)
    assert world.done == {pair: 1}


def test_another_ingredient_replaces_the_load(world):
    first, second = world.stock
    controller = make_controller(TASK)
    while world.load is None:
        world.step(controller.act(world, scoop_text(first, "left")))
    carry_out(world, scoop_text(second, "left"), steps=100)
    assert world.done == {(second, "left"): 1}


@pytest.mark.parametrize(
    "text", ["place a scoop of gravel in the left bowl", "place a scoop of {} in the middle bowl", "stir"]
)
def test_other_texts_hold_still(world, text):
    before = world.state
    assert carry_out(world, text.format(next(iter(world.stock))), steps=5) == "unknown"
    np.testing.assert_array_equal(world.state, before)


def test_a_closed_empty_gripper_over_the_scooper_tries_again(world):
    controller = make_controller(TASK)
    while world.held is None:
        world.step(controller.act(world, PICK_UP))
    assert world._slip()
    assert (world.held, world.grip) == (None, 1.0)
    carry_out(world, PICK_UP, steps=20)
    assert world.held is world.scooper
