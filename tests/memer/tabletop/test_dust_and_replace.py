"""Dust and replace: what can be seen, what counts as dusted and replaced, what the controller does."""

import copy

import numpy as np
import pytest

from memer.tabletop import make_controller, make_world
from memer.tabletop.dust_and_replace.layout import SHELVES
from memer.tabletop.dust_and_replace.world import (
    PICK_UP,
    PUT_DOWN,
    RESET_DUSTER,
    dust_text,
    place_text,
    take_text,
)

TASK = "dust_and_replace"


@pytest.fixture
def world():
    return make_world(TASK, split="val", index=0)


def carry_out(world, *subtasks, steps=90):
    controller = make_controller(TASK)
    for subtask in subtasks:
        for _ in range(steps):
            world.step(controller.act(world, subtask))
    return controller.status


def names(world):
    return world.owners["bottom"].name, world.owners["top"].name


def clear(world):
    bottom, top = names(world)
    carry_out(world, take_text(bottom, "bottom"), take_text(top, "top"))


def flags(world):
    measures = world.measures()
    return tuple(measures[f"{what}_{shelf}"] for what in ("dusted", "replaced") for shelf in SHELVES)


def test_the_whole_task_in_its_order(world):
    bottom, top = names(world)
    assert flags(world) == (False, False, False, False)
    clear(world)
    carry_out(world, PICK_UP, dust_text("bottom"))
    assert flags(world) == (True, False, False, False)
    carry_out(world, RESET_DUSTER, dust_text("top"), RESET_DUSTER, PUT_DOWN)
    assert flags(world) == (True, True, False, False)
    carry_out(world, place_text(bottom, "bottom"))
    assert flags(world) == (True, True, True, False)
    assert not world.finished
    carry_out(world, place_text(top, "top"))
    assert flags(world) == (True, True, True, True)
    assert world.finished
    assert world.measures()["success"] is True


def test_exchanged_things_are_not_replaced(world):
    bottom, top = names(world)
    clear(world)
    carry_out(world, dust_text("bottom"), dust_text("top"), PUT_DOWN)
    carry_out(world, place_text(bottom, "top"), place_text(top, "bottom"))
    assert flags(world) == (True, True, False, False)
    assert not world.finished


def test_things_never_taken_off_are_neither_replaced_nor_is_their_shelf_dusted(world):
    carry_out(world, PICK_UP, dust_text("bottom"), dust_text("top"), PUT_DOWN)
    assert flags(world) == (False, False, False, False)


def test_a_broken_off_sweep_does_not_dust(world):
    clear(world)
    carry_out(world, PICK_UP)
    controller = make_controller(TASK)
    while len(world.swept) < 3:
        world.step(controller.act(world, dust_text("bottom")))
    carry_out(world, RESET_DUSTER)
    assert world.dusted == set()


def test_pictures_tell_neither_dust_nor_where_things_belong(world):
    clear(world)
    other = copy.deepcopy(world)
    other.dusted = {"bottom", "top"}
    other.owners = {"bottom": other.owners["top"], "top": other.owners["bottom"]}
    for x in (0.1, 0.5, 0.8):
        for y in (0.2, 0.58, 0.85):
            for view in (world, other):
                view.gripper[:] = (x, y, 0.25)
            for key in ("base", "wrist"):
                np.testing.assert_array_equal(world.paint(64)[key], other.paint(64)[key])


def test_the_place_on_the_table_does_not_tell_the_shelf():
    left = set()
    for index in range(30):
        world = make_world(TASK, split="val", index=index)
        left.add(min(SHELVES, key=lambda shelf: world.spots[world.owners[shelf].name]))
    assert left == set(SHELVES)


def test_taking_shows_the_shelf_in_the_base_view(world):
    before = world.paint(64)["base"]
    moved = copy.deepcopy(world)
    bottom, top = names(moved)
    a, b = moved.things[bottom].position, moved.things[top].position
    moved.things[bottom].position, moved.things[top].position = b, a
    assert not np.array_equal(before, moved.paint(64)["base"])


def test_a_text_for_another_thing_first_puts_down_what_is_held(world):
    bottom = names(world)[0]
    clear(world)
    carry_out(world, PICK_UP)
    assert world.held is world.duster
    carry_out(world, place_text(bottom, "bottom"), steps=120)
    assert world.duster.place == "rest"
    assert world.things[bottom].place == "bottom"


def test_a_thing_on_the_other_shelf_is_not_found(world):
    bottom = names(world)[0]
    assert carry_out(world, take_text(bottom, "top")) == "missing"
    assert world.shelf_below() == "top"
    assert world.things[bottom].place == "bottom"


def test_a_slipped_duster_is_taken_up_again(world):
    clear(world)
    carry_out(world, PICK_UP)
    controller = make_controller(TASK)
    while len(world.swept) < 3:
        world.step(controller.act(world, dust_text("top")))
    assert world._slip()
    assert world.held is None
    carry_out(world, dust_text("top"), steps=120)
    assert world.dusted == {"top"}


@pytest.mark.parametrize(
    "text", ["dust middle shelf", "take the duster off top shelf", "place the vase on the top shelf", "wait"]
)
def test_other_texts_hold_still(world, text):
    before = world.state
    assert carry_out(world, text, steps=5) == "unknown"
    np.testing.assert_array_equal(world.state, before)
