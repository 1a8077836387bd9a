"""Swap blocks: what can be seen, what counts, what the controller does."""

import numpy as np
import pytest

from memer.tabletop import demonstrate, make_controller, make_world
from memer.tabletop.swap_blocks.layout import BLOCK_COLORS, MIDDLE, PADS, TRAVEL_Z
from memer.tabletop.swap_blocks.world import to_middle_text, to_place_of_text

TASK = "swap_blocks"


@pytest.fixture
def world():
    return make_world(TASK, split="val", index=0)


def carry_out(world, *texts, steps=80):
    controller = make_controller(TASK)
    for text in texts:
        for _ in range(steps):
            world.step(controller.act(world, text))
            if controller.status == "done" and world.gripper[2] >= TRAVEL_Z - 0.01:
                break
    return controller.status


def set_down(world, block, place, *, error=(0.0, 0.0)):
    """Take a block and let it go over a place, as an executor would."""
    thing = world.things[block]
    for _ in range(3):
        world.gripper[:] = thing.position
        world.step(np.array([0, 0, 0, 1], dtype=np.float32))
    assert world.held is thing
    world.gripper[:] = (place[0] + error[0], place[1] + error[1], 0.09)
    for _ in range(3):
        world.step(np.array([0, 0, 0, -1], dtype=np.float32))
    world.gripper[2] = TRAVEL_Z


def exchange(world, **how):
    first, second = world.blocks
    set_down(world, first, MIDDLE, **how)
    set_down(world, second, PADS[world.goal[second]], **how)
    assert not world.finished
    set_down(world, first, PADS[world.goal[first]], **how)


def test_colours_and_pads_vary():
    worlds = [make_world(TASK, index=index) for index in range(60)]
    assert len({tuple(w.start.values()) for w in worlds}) >= 10
    assert {block for w in worlds for block in w.blocks} == {f"{color} block" for color in BLOCK_COLORS}


def test_texts_name_blocks_and_no_pad():
    for index in range(10):
        first, second = make_world(TASK, index=index).blocks
        labels = [segment.label for segment in demonstrate(TASK, index=index, frame_size=16).segments]
        assert labels == [
            f"move the {first} to the middle",
            f"move the {second} to where the {first} was",
            f"move the {first} to where the {second} was",
        ]


def test_segments_have_a_learnable_length_and_end_raised_and_free():
    for index in range(15):
        episode = demonstrate(TASK, index=index, frame_size=16)
        for segment in episode.segments:
            assert 20 <= segment.end - segment.start <= 50
            assert episode.state[segment.end - 1, 2] > TRAVEL_Z - 0.02
            assert episode.state[segment.end - 1, 3] == 0.0


def test_the_picture_after_the_first_move_does_not_tell_where_the_block_stood():
    """Same colours, same pad of the second block, another pad of the first one."""
    groups = {}
    for index in range(150):
        world = make_world(TASK, index=index)
        first, second = world.blocks
        groups.setdefault((first, second, world.start[second]), []).append(world)
    pairs = [g for g in groups.values() if len({w.start[w.blocks[0]] for w in g}) > 1]
    assert len(pairs) >= 5
    for worlds in pairs:
        for world in worlds:
            carry_out(world, to_middle_text(world.blocks[0]))
            world.gripper[:] = world.home
        pictures = [world.paint(32) for world in worlds]
        for later in pictures[1:]:
            for key in ("base", "wrist"):
                np.testing.assert_array_equal(later[key], pictures[0][key])


def test_the_first_picture_shows_both_blocks_on_their_pads(world):
    picture = world.paint(128)["base"]
    for block in world.blocks:
        x, y = PADS[world.start[block]]
        pixel = picture[round((0.95 - 0.8 * y) * 128), round(x * 128)].astype(int)
        assert pixel.max() - pixel.min() > 100


@pytest.mark.parametrize("error", [(0.0, 0.0), (0.08, -0.08), (-0.09, 0.05)])
def test_success_needs_both_blocks_on_the_exchanged_pads(world, error):
    exchange(world, error=error)
    assert world.finished
    assert world.measures() == {"success": True, "placed": 2, "wrong_pads": 0, "moves": 2}


def test_a_grasp_beside_the_centre_holds(world):
    thing = world.things[world.blocks[0]]
    world.gripper[:] = thing.position + np.array([0.06, -0.06, 0.07])
    for _ in range(2):
        world.step(np.array([0, 0, 0, 1], dtype=np.float32))
    assert world.held is thing
    # One opening step by mistake does not lose it.
    world.step(np.array([0, 0, 0, -1], dtype=np.float32))
    world.step(np.array([0, 0, 0, 1], dtype=np.float32))
    assert world.held is thing


def test_a_wrong_pad_ends_the_episode(world):
    first, _ = world.blocks
    wrong = next(pad for pad in PADS if pad not in world.start.values())
    set_down(world, first, PADS[wrong])
    assert world.finished
    assert (world.measures()["success"], world.measures()["wrong_pads"]) == (False, 1)


def test_the_pad_of_the_block_itself_is_not_wrong(world):
    first, _ = world.blocks
    set_down(world, first, MIDDLE)
    set_down(world, first, PADS[world.start[first]])
    assert not world.finished


def test_a_slip_over_a_wrong_pad_is_no_failure(world):
    controller = make_controller(TASK)
    while world.held is None:
        world.step(controller.act(world, to_middle_text(world.blocks[0])))
    wrong = next(pad for pad in PADS if pad not in world.start.values())
    world.gripper[:2] = PADS[wrong]
    assert world._slip()
    assert world.things[world.blocks[0]].place == wrong
    assert not world.finished
    assert carry_out(world, to_middle_text(world.blocks[0])) == "done"


def test_a_taken_place_is_waited_for(world):
    first, second = world.blocks
    assert carry_out(world, to_place_of_text(first, second)) == "missing"
    assert world.held is world.things[first]
    assert world.things[second].place == world.start[second]


def test_a_block_dropped_on_another_lies_beside_it_and_can_be_taken_up(world):
    first, second = world.blocks
    set_down(world, first, PADS[world.start[second]])
    assert world.things[first].place == "table"
    assert not world.finished
    assert carry_out(world, to_middle_text(first)) == "done"
    assert world.things[first].place == "middle"


def test_another_block_in_hand_is_set_down_first(world):
    first, second = world.blocks
    controller = make_controller(TASK)
    while world.held is None:
        world.step(controller.act(world, to_middle_text(first)))
    carry_out(world, to_middle_text(second), steps=120)
    assert world.things[second].place == "middle"
    assert world.things[first].place == world.start[first]


@pytest.mark.parametrize("text", ["move the pink block to the middle", "move it", "swap the blocks"])
def test_other_texts_hold_still(world, text):
    before = world.state
    assert carry_out(world, text, steps=5) == "unknown"
    np.testing.assert_array_equal(world.state, before)
