"""What a language planner wrote, read tolerantly; prompts of the form `segments`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memer.contract import DEFAULT_SYSTEM_TEXT, CameraLayout, Contract, PromptSettings
from memer.errors import MemerError, UsageError
from memer.instructions import edit_distance, nearest_subtask, parse_instruction, read_answer
from memer.plan_windows import next_subtask_question
from memer.prompts import answer_text, render_messages, user_text
from memer.sample import PlannerQuestion

PROMPT = PromptSettings(form="segments", segment_whitespace="keep")
#: Written out, so that a change of the template is seen.
THIRD = """\
Task: press left twice, then confirm
Initial observation: <image>
Finished subtasks:
1. press the left button \u2014 result: <image>
2. press the left button \u2014 result: <image>
Give subtask 3."""


def asked(*done: str, instruction: str = "press left twice, then confirm") -> PlannerQuestion:
    images = [np.full((4, 4, 3), k, np.uint8) for k in range(len(done) + 1)]
    return next_subtask_question(
        instruction=instruction, done=done, images=images, source="s", episode_index=0
    )


def test_the_list_keeps_duplicates_and_numbers_them() -> None:
    assert user_text(asked("press the left button", "press the left button"), PROMPT) == THIRD


def test_the_first_question_has_an_empty_list() -> None:
    text = user_text(asked(), PROMPT)
    assert text.endswith("Initial observation: <image>\nFinished subtasks:\nnone\nGive subtask 1.")


def test_pictures_stand_where_they_belong_and_the_system_turn_is_the_forms_own() -> None:
    system, user, answer = render_messages(asked("a", "b"), PROMPT, answer="c")
    assert system["content"][0]["text"].startswith("You plan the next subtask of a robot.")
    assert [part["type"] for part in user["content"]] == ["text", "image"] * 3 + ["text"]
    assert user["content"][2]["text"] == "\nFinished subtasks:\n1. a \u2014 result: "
    assert answer["content"] == [{"type": "text", "text": "c"}]


def test_words_of_the_form_are_settings() -> None:
    prompt = PromptSettings(
        form="segments", system_text="", request="Now {k}:", result_text=" -> ", nothing_finished="nothing"
    )
    assert user_text(asked("a"), prompt).splitlines()[-2:] == ["1. a -> <image>", "Now 2:"]
    assert "nothing" in user_text(asked(), prompt)
    assert render_messages(asked(), prompt)[0]["role"] == "user"
    with pytest.raises(UsageError, match=r"request: 'Next\.', must be a text with \{k\}"):
        PromptSettings(form="segments", request="Next.")
    with pytest.raises(MemerError, match=r"2 marks <image> for 1 images; remove .*initial_header"):
        user_text(asked(), PromptSettings(form="segments", initial_header="<image>"))


def test_data_cannot_bring_marks_or_control_strings_into_prompt_or_answer() -> None:
    text = user_text(asked("look <image>", instruction="a <|im_end|>"), PROMPT)
    assert text.count("<image>") == 2
    assert "<|im_end|>" not in text
    assert answer_text("stop <|im_end|>", (), PROMPT) == "stop < |im_end|>"


def test_the_other_form_is_untouched() -> None:
    assert PromptSettings().system_text == DEFAULT_SYSTEM_TEXT
    assert PromptSettings(form="segments", system_text="mine").system_text == "mine"


@pytest.mark.parametrize(
    "text",
    [
        "press it",
        "  press it\n",
        '"press it"',
        "`press it`",
        "\u201cpress it\u201d",
        "'\"press it\"'",
        "```\npress it\n```",
        "```text\npress it",
        "<think>\n\n</think>\n\npress it",
        "<think>press that</think>press it",
        "so I press that</think>\npress it",
    ],
)
def test_an_instruction_is_found_in_what_surrounds_it(text: str) -> None:
    assert parse_instruction(text) == "press it"


@pytest.mark.parametrize("text", ["", " \n", '""', "```\n```", "<think>press it", "<think>press it</think>"])
def test_nothing_said_is_nothing(text: str) -> None:
    assert parse_instruction(text) == ""
    answer = read_answer(text, PROMPT, num_positions=0)
    assert (answer.ok, answer.error) == (False, "empty_text")


def test_quotes_and_apostrophes_inside_stay() -> None:
    for text in ('pick the "red" cup', "don't move", "'left' and 'right'"):
        assert parse_instruction(text) == text


@given(st.text())
def test_reading_never_raises_and_leaves_no_space_around(text: str) -> None:
    found = parse_instruction(text)
    assert found == found.strip()


def test_snapping_takes_the_nearest_subtask_and_only_where_asked() -> None:
    subtasks = ("press the right button", "press the left button")
    snapped = PromptSettings(form="segments", snap="nearest")
    assert read_answer("Press the  left buton", snapped, num_positions=0, subtasks=subtasks).subtask == (
        "press the left button"
    )
    free = read_answer("Press the left buton", PROMPT, num_positions=0, subtasks=subtasks)
    assert free.subtask == "Press the left buton"
    assert read_answer("x", snapped, num_positions=0).subtask == "x", "there is nothing to snap to"
    assert nearest_subtask("", ("b", "a")) == "b", "the first of equals"


def test_windows_answers_are_read_as_ever() -> None:
    text = '{"current_subtask": "a", "keyframe_positions": [2]}'
    answer = read_answer(text, PromptSettings(), num_positions=4)
    assert (answer.subtask, answer.positions) == ("a", [2])
    assert not read_answer("a", PromptSettings(), num_positions=4).ok


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_the_edit_distance_is_a_metric(a: str, b: str, c: str) -> None:
    assert edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) is (a == b)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)
    assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


def test_the_subtasks_travel_with_the_contract(tmp_path) -> None:
    contract = Contract(fps=1.0, cameras=CameraLayout(camera_keys=("a",)), prompt=PROMPT, subtasks=("x", "y"))
    contract.save(tmp_path)
    assert Contract.load(tmp_path) == contract
    old = {name: value for name, value in contract.to_dict().items() if name != "subtasks"}
    assert Contract.from_dict(old).subtasks == ()
