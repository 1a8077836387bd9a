import numpy as np
import pytest

from memer.contract import Contract
from memer.episode import Segment
from memer.errors import UsageError
from memer.plan_windows import (
    clip_indices,
    episode_plan_indices,
    finished_indices,
    head_layout,
    next_subtask_question,
    segment_plan_indices,
)
from tests.data.plans import plan_contract
from tests.data.synthetic import LAYOUT


def test_the_published_example_of_116_frames() -> None:
    assert segment_plan_indices(100, 216) == [100, 114, 128, 143, 157, 172, 186, 201, 215]


def test_an_episode_is_its_first_frame_and_its_segments() -> None:
    segments = [Segment(5, 13, "a"), Segment(20, 21, "b")]
    assert episode_plan_indices(segments) == [0, *range(5, 13), *[20] * 8]


def test_a_clip_is_held_at_the_last_frame() -> None:
    assert clip_indices(0, last=100, horizon=32, stride=4) == list(range(0, 33, 4))
    assert clip_indices(7, last=7, horizon=16, stride=4) == [7] * 5
    with pytest.raises(ValueError, match="must not lie behind"):
        clip_indices(8, last=7, horizon=16, stride=4)


def test_finished_segments_are_counted_from_the_first() -> None:
    segments = [Segment(3, 7, "a"), Segment(9, 12, "b")]
    assert [finished_indices(segments, count) for count in range(3)] == [[0], [0, 6], [0, 6, 11]]
    with pytest.raises(ValueError, match="count: 3"):
        finished_indices(segments, 3)


def test_a_question_needs_one_image_more_than_finished_subtasks() -> None:
    picture = np.zeros((2, 2, 3), np.uint8)
    with pytest.raises(ValueError, match="images: 1, must be 2"):
        next_subtask_question(instruction="x", done=["a"], images=[picture], source="s", episode_index=0)


def test_the_head_view_needs_plan_settings() -> None:
    assert head_layout(plan_contract(head_camera="base")).stacked_size == (96, 54)
    with pytest.raises(UsageError, match="names the head camera"):
        head_layout(Contract(fps=1.0, cameras=LAYOUT))
