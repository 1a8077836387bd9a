"""Press button: what counts as a press, what ends the episode, what can be seen, repeated commands."""

import numpy as np
import pytest

from memer.tabletop import demonstrate, demonstration_steps, make_controller, make_env, make_world
from memer.tabletop.press_button.layout import BUTTONS, PRESS_Z, RELEASE_Z
from memer.tabletop.press_button.world import CONFIRM, press_text

TASK = "press_button"


@pytest.fixture
def world():
    """Asks for at least two presses of the left button."""
    worlds = (make_world(TASK, split="val", index=index) for index in range(50))
    return next(w for w in worlds if w.asked["left"] >= 2)


def carry_out(world, text, *, command_id, controller=None, steps=80):
    controller = controller or make_controller(TASK)
    for _ in range(steps):
        world.step(controller.act(world, text, command_id=command_id))
        if world.finished or controller.status == "done":
            break
    return controller


def press_at(world, x, y, *, low=0.1):
    for z in (0.4, low, 0.4):
        world.gripper[:] = (x, y, z)
        world._after_step()


def test_every_count_from_one_to_three_is_asked_for():
    asked = {tuple(make_world(TASK, index=index).asked.values()) for index in range(50)}
    assert {n for pair in asked for n in pair} == {1, 2, 3}
    assert len(asked) >= 8


def test_repeated_presses_stay_segments_of_their_own():
    for index in range(10):
        episode = demonstrate(TASK, index=index, frame_size=16)
        script = make_world(TASK, index=index).script
        assert [s.label for s in episode.segments] == [press_text(button) for button in script]
        assert episode.segments[0].start == 0
        assert episode.segments[-1].end == episode.num_frames
        for one, two in zip(episode.segments, episode.segments[1:], strict=False):
            assert one.end == two.start
        for segment in episode.segments:
            assert 20 <= segment.end - segment.start <= 45
            assert episode.state[segment.end - 1, 2] > 0.37


def test_the_picture_above_a_button_is_the_same_before_and_after_a_press(world):
    pictures = []
    for _ in range(3):
        world.gripper[:] = (*world.button_position("left"), 0.4)
        pictures.append(world.paint(32))
        press_at(world, *world.button_position("left"))
    assert len(world.presses) == 3
    for later in pictures[1:]:
        for key in ("base", "wrist"):
            np.testing.assert_array_equal(later[key], pictures[0][key])


@pytest.mark.parametrize("height", [0.25, 0.15, 0.1])
def test_going_down_and_coming_up_look_alike(world, height):
    x, y = world.button_position("left")
    world.gripper[:] = (x, y, height)
    going_down = world.paint(32)
    for z in (0.1, height):
        world.gripper[:] = (x, y, z)
        world._after_step()
    assert world.presses == ["left"]
    coming_up = world.paint(32)
    for key in ("base", "wrist"):
        np.testing.assert_array_equal(coming_up[key], going_down[key])


def test_a_button_must_be_left_before_it_can_be_pressed_again(world):
    x, y = world.button_position("left")
    for z in (0.4, PRESS_Z - 0.01, RELEASE_Z - 0.01, 0.1, PRESS_Z, 0.05):
        world.gripper[:] = (x, y, z)
        world._after_step()
    assert world.presses == ["left"]
    press_at(world, x, y)
    assert world.presses == ["left", "left"]


def test_a_dip_that_is_too_high_or_beside_the_buttons_is_no_press(world):
    x, y = world.button_position("middle")
    press_at(world, x, y, low=PRESS_Z + 0.01)
    press_at(world, x + 0.15, y)
    press_at(world, x, y + 0.2)
    assert world.presses == []
    assert not world.finished


@pytest.mark.parametrize("error", [(0.08, 0.0), (0.0, -0.08), (-0.08, 0.08)])
def test_a_press_off_the_centre_counts(world, error):
    x, y = world.button_position("left")
    press_at(world, x + error[0], y + error[1])
    assert world.presses == ["left"]
    assert not world.failed


@pytest.mark.parametrize("wrong", ["middle", "confirm"])
def test_a_wrong_press_ends_the_episode(world, wrong):
    press_at(world, *world.button_position("left"))
    press_at(world, *world.button_position(wrong))
    measures = world.measures()
    assert world.finished
    assert (measures["success"], measures["wrong_press"], measures["presses"]) == (False, True, 2)


def test_a_surplus_press_ends_the_episode(world):
    for _ in range(world.asked["left"] + 1):
        press_at(world, *world.button_position("left"))
    assert world.finished
    assert not world.measures()["success"]


def test_success_needs_every_press_and_the_confirm_button(world):
    for button in world.script:
        assert not world.finished
        press_at(world, *world.button_position(button))
    assert world.finished
    assert world.measures()["success"]


def test_a_command_number_presses_once_and_a_new_one_again(world):
    controller = make_controller(TASK)
    for command_id in range(2):
        carry_out(world, press_text("left"), command_id=command_id, controller=controller)
        assert controller.status == "done"
        for _ in range(60):
            world.step(controller.act(world, press_text("left"), command_id=command_id))
        assert world.presses == ["left"] * (command_id + 1)


def test_another_text_under_the_same_number_is_another_command(world):
    controller = make_controller(TASK)
    world.step(controller.act(world, "dance", command_id=4))
    carry_out(world, press_text("left"), command_id=4, controller=controller)
    assert world.presses == ["left"]


def test_a_standing_text_without_a_number_presses_again(world):
    controller = make_controller(TASK)
    for _ in range(70):
        world.step(controller.act(world, press_text("left")))
    assert world.presses[:2] == ["left", "left"]


def test_an_oracle_that_gives_the_segments_one_by_one_succeeds():
    for index in range(10):
        env = make_env(TASK, index=index, frame_size=16)
        env.reset()
        controller = make_controller(TASK)
        terminated = truncated = False
        while not (terminated or truncated):
            command_id, text = env.world.expert_segment()
            *_, terminated, truncated, _ = env.step(controller.act(env.world, text, command_id=command_id))
        assert env.measures()["success"]


def test_the_segment_number_changes_exactly_where_a_segment_ends():
    for index in range(5):
        steps = [(s.segment_id, s.subtask) for s in demonstration_steps(TASK, split="val", index=index)]
        assert [number for number, _ in dict.fromkeys(steps)] == list(range(len(dict.fromkeys(steps))))
        assert [text for _, text in dict.fromkeys(steps)] == [
            press_text(b) for b in make_world(TASK, split="val", index=index).script
        ]


@pytest.mark.parametrize(
    "text", ["press the right button one time", "press the confirm button one time", "press the left button"]
)
def test_other_texts_hold_still(world, text):
    before = world.state
    controller = make_controller(TASK)
    for _ in range(5):
        world.step(controller.act(world, text))
    assert controller.status == "unknown"
    np.testing.assert_array_equal(world.state, before)


def test_confirm_is_spelled_without_a_number():
    assert press_text("confirm") == CONFIRM
    assert set(BUTTONS) == {"left", "middle", "confirm"}
