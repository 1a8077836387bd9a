from typing import Any

import numpy as np
import pytest

from data.views.language_planner import LanguagePlannerView, LanguagePlannerViewConfig
from memer.cameras import prepare_frame
from memer.contract import Contract
from memer.episode import Episode
from memer.errors import UsageError
from memer.plan_windows import head_layout, next_subtask_question
from memer.sample import PlannerSample
from tests.data.plans import episode_with, plan_contract, plan_values
from tests.data.synthetic import LAYOUT
from tests.fixtures.paint import read_identity


def samples_of(episode: Episode, *, emit_done: bool = False, **choices: Any) -> list[PlannerSample]:
    view = LanguagePlannerView(plan_contract(**choices), emit_done=emit_done)
    targets = view.targets(episode.segments, num_frames=episode.num_frames)
    return [view.sample(episode, t, targets=targets) for t in view.steps(targets).steps]


def test_every_segment_is_asked_for_with_all_that_is_finished() -> None:
    samples = samples_of(episode_with([10, 20, 27], 40))
    assert [sample.subtask for sample in samples] == ["task 0", "task 1", "task 0"]
    assert [sample.step for sample in samples] == [0, 10, 20]
    assert [[k for _, _, k in s.question.memory_keys] for s in samples] == [[0], [0, 9], [0, 9, 19]]
    assert samples[2].question.history == ("task 0", "task 1")
    assert all(s.question.recent_keys == () and s.positions == () for s in samples)
    assert [s.question.instruction for s in samples] == ["tidy up", "tidy up", "tidy up again"]
    assert len({s.sample_id for s in samples}) == 3


def test_repeated_subtasks_stay_in_the_history() -> None:
    episode = episode_with([5, 10, 15, 20, 25, 30], 30)
    texts = ["task 0", "task 1"] * 3
    for k, sample in enumerate(samples_of(episode)):
        assert list(sample.question.history) == texts[:k]
        assert len(sample.question.memory_keys) == k + 1


@pytest.mark.parametrize(("head", "camera"), [("", 1), ("base", 0)])
def test_pictures_are_the_head_view_alone(head: str, camera: int) -> None:
    for sample in samples_of(episode_with([10, 20], 20), head_camera=head):
        for (_, episode, frame), picture in sample.question.frames.items():
            assert picture.shape == (54, 96, 3)
            assert read_identity(picture) == (episode, frame, camera)


def test_the_end_is_asked_for_when_wanted() -> None:
    last = samples_of(episode_with([10, 20], 30), emit_done=True)[-1]
    assert (last.subtask, last.step) == ("done", 19)
    assert [k for _, _, k in last.question.memory_keys] == [0, 9, 19]
    assert last.question.history == ("task 0", "task 1")


def test_training_asks_what_the_run_time_asks() -> None:
    episode = episode_with([10, 20, 27], 40)
    trained = samples_of(episode)[2].question
    layout = head_layout(plan_contract())
    images = [
        prepare_frame({key: next(iter(v.frames([k]))) for key, v in episode.cameras.items()}, layout)
        for k in (0, 9, 19)
    ]
    live = next_subtask_question(
        instruction="tidy up again", done=["task 0", "task 1"], images=images, source="live", episode_index=0
    )
    assert (live.instruction, live.history, live.recent_keys) == (
        trained.instruction,
        trained.history,
        trained.recent_keys,
    )
    for ours, theirs in zip(trained.image_keys, live.image_keys, strict=True):
        assert np.array_equal(trained.frames[ours], live.frames[theirs])


def test_histograms() -> None:
    view = LanguagePlannerView(plan_contract(), emit_done=True)
    targets = view.targets(episode_with([10, 20, 27], 40).segments, num_frames=40)
    counted = view.histograms([(targets, view.steps(targets))])
    assert counted["samples"] == 4
    assert counted["labels"] == {"done": 1, "task 0": 2, "task 1": 1}
    assert counted["images"] == {"1": 1, "2": 1, "3": 1, "4": 1}
    assert counted["segments_per_episode"] == {"3": 1}


def test_another_prompt_form_is_refused() -> None:
    values = plan_values()
    bound = LanguagePlannerViewConfig(contract=values, emit_done=True).bind(
        Contract(fps=10.0, cameras=LAYOUT)
    )
    assert bound.emit_done
    del values["prompt"]
    with pytest.raises(UsageError, match=r"prompt\.form: 'windows', must be segments"):
        LanguagePlannerViewConfig(contract=values).bind(Contract(fps=10.0, cameras=LAYOUT))
