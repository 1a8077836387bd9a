"""Object search: what can be seen, what counts as retrieved and as optimal, what the controller does."""

import copy

import numpy as np
import pytest

from memer.tabletop import make_controller, make_world
from memer.tabletop.object_search.layout import BINS, REVEAL_Z, WHITE_BIN
from memer.tabletop.object_search.world import look_text, take_text

TASK = "object_search"


@pytest.fixture
def world():
    return make_world(TASK, split="val", index=4)


def carry_out(world, subtask, *, steps=60):
    controller = make_controller(TASK)
    for _ in range(steps):
        world.step(controller.act(world, subtask))
    return controller.status


def arrange(**places):
    """A world whose targets, in order, lie in the named bins (keys first, second, third)."""
    wanted = [places["first"], places["second"], places["third"]]
    for index in range(500):
        world = make_world(TASK, split="val", index=index)
        if [world.things[t].place for t in world.targets] == wanted:
            return world
    raise AssertionError(f"no episode with {wanted}")


def test_every_bin_holds_one_or_two_of_three_to_five_things():
    sizes = set()
    for index in range(60):
        world = make_world(TASK, index=index)
        assert len(set(world.targets)) == 3
        assert {len(world.contents(name)) for name in BINS} <= {1, 2}
        sizes.add(len(world.things))
    assert sizes == {3, 4, 5}


@pytest.mark.parametrize("bin_name", list(BINS))
def test_contents_show_only_in_the_wrist_view_from_low_above(world, bin_name):
    other = copy.deepcopy(world)
    for thing in other.contents(bin_name):
        thing.color = "pink" if thing.color != "pink" else "cyan"
    for height in np.arange(0.05, 0.5, 0.01):
        for view in (world, other):
            view.gripper[:] = (*BINS[bin_name], height)
        ours, theirs = world.paint(64), other.paint(64)
        np.testing.assert_array_equal(ours["base"], theirs["base"])
        assert np.array_equal(ours["wrist"], theirs["wrist"]) == (height > REVEAL_Z)


def test_no_view_tells_the_contents_of_other_bins(world):
    other = copy.deepcopy(world)
    for thing in other.contents("right"):
        thing.color = "pink" if thing.color != "pink" else "cyan"
    for view in (world, other):
        view.gripper[:] = (*BINS["left"], 0.2)
    for key in ("base", "wrist"):
        np.testing.assert_array_equal(world.paint(64)[key], other.paint(64)[key])


def test_each_slot_fills_its_quarter_of_the_wrist_view():
    world = next(
        w
        for w in (make_world(TASK, index=i) for i in range(50))
        if any(len(w.contents(b)) == 2 for b in BINS)
    )
    from memer.tabletop.painting import COLORS

    name = next(b for b in BINS if len(world.contents(b)) == 2)
    world.gripper[:] = (*BINS[name], 0.25)
    wrist = world.paint(128)["wrist"]
    left, right = sorted(world.contents(name), key=lambda t: t.position[0])
    for quarter, thing in ((wrist[:64, :64], left), (wrist[:64, 64:], right)):
        assert (quarter == COLORS[thing.color]).all(axis=2).mean() > 0.6


def test_the_instruction_names_the_next_target_only_after_the_release(world):
    first, second = world.targets[:2]
    assert first in world.instruction
    controller = make_controller(TASK)
    subtask = take_text(first, world.things[first].place)
    while world.things[first].place != "white":
        assert world.instruction == f"put the {first} in the white bin"
        world.step(controller.act(world, subtask))
    assert world.instruction == f"put the {second} in the white bin"


def test_looking_twice_into_a_bin_is_not_optimal():
    world = arrange(first="center", second="right", third="left")
    for subtask in (look_text("left"), look_text("right"), look_text("left")):
        carry_out(world, subtask)
    for target, place in zip(world.targets, ("center", "right", "left"), strict=True):
        carry_out(world, take_text(target, place))
    measures = world.measures()
    assert (measures["retrieved"], measures["optimal_path"], measures["success"]) == (3, 2, False)


def test_any_order_of_new_bins_is_optimal():
    world = arrange(first="center", second="right", third="left")
    for subtask in (look_text("right"), look_text("left"), look_text("center")):
        carry_out(world, subtask)
    for target, place in zip(world.targets, ("center", "right", "left"), strict=True):
        carry_out(world, take_text(target, place))
    assert world.measures()["success"] is True
    assert world.measures()["optimal_path"] == 3


def test_looking_elsewhere_when_the_target_was_seen_is_not_optimal():
    world = arrange(first="center", second="left", third="right")
    carry_out(world, look_text("left"))
    carry_out(world, look_text("center"))
    carry_out(world, take_text(world.targets[0], "center"))
    carry_out(world, look_text("right"))
    carry_out(world, take_text(world.targets[1], "left"))
    carry_out(world, take_text(world.targets[2], "right"))
    assert world.measures()["retrieved"] == 3
    assert world.optimal == [True, False, True]


def test_a_wrong_thing_in_the_white_bin_counts_against_the_target():
    world = arrange(first="center", second="left", third="right")
    carry_out(world, take_text(world.targets[1], "left"))
    assert world.measures()["retrieved"] == 0
    assert world.measures()["wrong_objects"] == 1
    carry_out(world, take_text(world.targets[0], "center"))
    # The second target lies there already: named and done in the same step, but not along its path.
    assert world.measures()["retrieved"] == 2
    assert world.optimal == [False, False, True]


def test_without_memory_the_search_fails_mostly():
    """A planner that begins a new search for each target, from the left, and takes what it sees."""
    successes = 0
    for index in range(60):
        world = make_world(TASK, split="val", index=index)
        controller = make_controller(TASK)
        searched, current = set(), 0
        while not world.finished and world.step_count < world.time_limit:
            if world.current != current:
                searched, current = set(), world.current
            target = world.target
            here = world.visible_bin()
            if world.held is target or (here is not None and target.place == here):
                subtask = take_text(target.name, target.origin)
            else:
                searched.add(here)
                left = [name for name in BINS if name not in searched]
                subtask = look_text(left[0]) if left else None
            world.step(controller.act(world, subtask))
        assert world.measures()["retrieved"] == 3
        successes += world.measures()["success"]
    assert successes <= 0.3 * 60


# The controller's rules.


def test_after_a_look_it_hovers_with_the_contents_in_view(world):
    assert carry_out(world, look_text("center"), steps=60) == "done"
    assert world.visible_bin() == "center"
    assert carry_out(world, look_text("center"), steps=40) == "done"
    assert world.visible_bin() == "center"


def test_after_a_take_it_rests_at_home(world):
    target = world.targets[0]
    assert carry_out(world, take_text(target, world.things[target].place), steps=90) == "done"
    np.testing.assert_allclose(world.gripper, world.home, atol=0.01)
    assert world.measures()["retrieved"] == 1


def test_a_wrong_bin_is_visited_all_the_same(world):
    target = world.targets[0]
    wrong = next(name for name in BINS if name != world.things[target].place)
    assert carry_out(world, take_text(target, wrong)) == "missing"
    assert world.visible_bin() == wrong
    assert world.held is None


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "put the red block in the white bin",
        "look inside the white bin",
        "take the plaid block from the left bin and place it in the white bin",
        "look inside the left bin and sing",
    ],
)
def test_other_texts_hold_still(world, text):
    before = world.state
    assert carry_out(world, text, steps=5) == "unknown"
    np.testing.assert_array_equal(world.state, before)


def test_spaces_case_and_the_short_form_are_understood(world):
    target = world.targets[0]
    place = world.things[target].place
    text = take_text(target, place).replace("place it in", "place in").replace(" ", "  ").title()
    carry_out(world, text, steps=90)
    assert world.measures()["retrieved"] == 1


def test_a_changed_text_is_obeyed_at_once(world):
    controller = make_controller(TASK)
    for _ in range(4):
        world.step(controller.act(world, look_text("left")))
    x_before = world.gripper[0]
    for _ in range(3):
        world.step(controller.act(world, look_text("right")))
    assert world.gripper[0] > x_before + 0.1


def test_another_take_puts_the_held_thing_back_unseen():
    world = arrange(first="center", second="left", third="right")
    first, second = world.targets[:2]
    controller = make_controller(TASK)
    while world.held is None:
        world.step(controller.act(world, take_text(first, "center")))
    for _ in range(12):
        world.step(controller.act(world, take_text(first, "center")))
    visits = world.num_visits
    while world.held is not None:
        world.step(controller.act(world, take_text(second, "left")))
    assert world.things[first].place == "center"
    assert world.num_visits == visits
    carry_out(world, take_text(second, "left"), steps=90)
    assert world.things[second].place == "white"


def test_a_look_keeps_what_is_held():
    world = arrange(first="center", second="left", third="right")
    first = world.targets[0]
    controller = make_controller(TASK)
    while world.held is None:
        world.step(controller.act(world, take_text(first, "center")))
    carry_out(world, look_text("right"))
    assert world.held is world.things[first]
    assert world.visible_bin() == "right"


def test_the_controller_never_reads_the_instruction(world):
    class Blind(type(world)):
        @property
        def instruction(self):
            raise AssertionError("instruction read")

        def expert_subtask(self):
            raise AssertionError("expert asked")

    target, place = world.targets[0], world.things[world.targets[0]].place
    world.__class__ = Blind
    carry_out(world, look_text("right"))
    carry_out(world, take_text(target, place))
    assert world.things[target].place == "white"


def test_a_slip_to_the_table_is_picked_up_there(world):
    target = world.targets[0]
    subtask = take_text(target, world.things[target].place)
    controller = make_controller(TASK)
    while world.held is None or world.bin_below() is not None:
        world.step(controller.act(world, subtask))
    assert world._slip()
    assert world.things[target].place == "table"
    base = world.paint(128)["base"]
    world.things[target].place = "white"
    world.things[target].position[:] = (*WHITE_BIN, 0.1)
    assert not np.array_equal(base, world.paint(128)["base"])
    world.things[target].place = "table"
    world.things[target].position[:] = (0.4, 0.4, 0.1)
    carry_out(world, subtask, steps=90)
    assert world.measures()["retrieved"] == 1
