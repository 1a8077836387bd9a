from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from data.views.executor import ExecutorView, ExecutorViewConfig
from data.views.frames import FrameCache
from memer.contract import Contract
from memer.episode import Episode
from memer.errors import MemerError, UsageError
from memer.sample import ExecutorSample
from memer.windows import bucket_last_indices
from tests.data.plans import episode_with, plan_contract, plan_values, shown
from tests.data.synthetic import LAYOUT


def make_view(*, plan: dict[str, Any] | None = None, **choices: Any) -> ExecutorView:
    return ExecutorView(plan_contract(**(plan or {})), **choices)


def sample_at(t: int, episode: Episode, **choices: Any) -> ExecutorSample:
    return make_view(**choices).sample(episode, t)


def steps_of(episode: Episode, **choices: Any) -> tuple[int, ...]:
    view = make_view(**choices)
    return view.steps(view.targets(episode.segments, num_frames=episode.num_frames)).steps


def test_every_step_but_the_last_of_a_segment_is_a_sample() -> None:
    # [2, 6), a frame alone, [7, 10); frames 0, 1 and 10.. belong to no segment.
    episode = episode_with([6, 7, 10], 14, first=2)
    assert steps_of(episode) == (2, 3, 4, 7, 8)
    assert steps_of(episode, sample_stride=2) == (2, 4, 7)
    assert steps_of(episode, plan={"progress_mode": "classification"}) == (2, 3, 4, 5, 7, 8, 9)


def test_the_first_steps_of_a_segment_may_be_used_more_often() -> None:
    """By frames, not samples: with a stride fewer of them lie in the same stretch."""
    episode = episode_with([6, 7, 10], 14, first=2)

    def weights(**choices: Any) -> tuple[float, ...]:
        view = make_view(start_weight=5.0, **choices)
        return view.steps(view.targets(episode.segments, num_frames=episode.num_frames)).weights

    assert weights(start_steps=1) == (5, 1, 1, 5, 1)
    assert weights(start_steps=2) == (5, 5, 1, 5, 5)
    assert weights(start_steps=2, sample_stride=2) == (5, 1, 5)
    assert weights(start_steps=0) == (1,) * 5


def test_commands_lead_to_the_frames_they_stand_for() -> None:
    episode = episode_with([30], 40)
    sample = sample_at(5, episode)
    # Row n - 1 leads to frame t + n: it is what was commanded one frame before.
    for n in range(1, 17):
        assert np.array_equal(sample.actions[n - 1], episode.action[5 + n - 1])
    assert sample.action_valid.all()
    assert sample.latent_valid.tolist() == [True]
    assert np.array_equal(sample.state, episode.state[5])
    assert sample.progress == pytest.approx(5 / 29)
    assert sample.progress_target == pytest.approx([(5 + n) / 29 for n in range(1, 17)])
    assert (sample.text, sample.instruction, sample.step) == ("task 0", "tidy up", 5)


def test_delta_padding_stands_still_and_holds_the_gripper() -> None:
    episode = episode_with([20], 40)
    sample = sample_at(12, episode)  # frames 13..19 exist: 7 commands
    assert sample.action_valid.tolist() == [True] * 7 + [False] * 9
    assert np.array_equal(sample.actions[:7], episode.action[12:19])
    assert (sample.actions[7:, 0] == 0).all()
    assert (sample.actions[7:, 1] == episode.action[18, 1]).all()
    assert episode.action[18, 1] != 0
    assert sample.progress_target[7:].tolist() == [1.0] * 9
    assert sample.progress_target[6] == 1.0
    assert np.array_equal(sample.progress_valid, sample.action_valid)


def test_absolute_padding_repeats_the_last_command() -> None:
    episode = episode_with([20], 40)
    sample = sample_at(12, episode, plan={"action_mode": "absolute"})
    assert (sample.actions[7:] == episode.action[18]).all()


def test_padding_changes_neither_the_episode_nor_the_next_sample() -> None:
    episode = episode_with([20], 40)
    before = episode.action.copy()
    assert np.array_equal(sample_at(18, episode).actions, sample_at(18, episode).actions)
    assert np.array_equal(episode.action, before)


def test_frames_of_plan_and_clip() -> None:
    episode = episode_with([10, 30], 40)
    sample = sample_at(17, episode)
    assert [shown(c) for c in sample.plan_frames] == [(3, k) for k in [10, *bucket_last_indices(10, 30)]]
    assert [shown(c)[1] for c in sample.clip_frames] == [17, 21, 25, 29, 29]
    assert sample_at(17, episode, plan={"visual_plan": "none"}).plan_frames.shape == (0, 112, 96, 3)
    current = sample_at(17, episode, plan={"visual_plan": "current_only"})
    assert np.array_equal(current.plan_frames, sample.plan_frames)


@pytest.mark.parametrize(
    ("t", "valid"),
    [(0, [True, True]), (7, [True, True]), (8, [True, False]), (9, [True, False]), (15, [True, False])]
    + [(20, [True, False]), (22, [True, False]), (23, [True, False]), (24, [False, False])],
)
def test_a_future_latent_is_masked_once_all_its_frames_are_beyond_the_end(t: int, valid: list[bool]) -> None:
    # j = 27; latent 0 holds frames t + 4 .. t + 16, latent 1 t + 20 .. t + 32.
    sample = sample_at(t, episode_with([28], 60), plan={"action_horizon": 32})
    assert sample.latent_valid.tolist() == valid
    assert len(sample.clip_frames) == 9


def test_continue_supervises_the_next_segment_with_progress_held_at_one() -> None:
    episode = episode_with([20, 26, 27], 40)
    sample = sample_at(12, episode, tail="continue")
    assert sample.action_valid.tolist() == [True] * 14 + [False] * 2  # up to frame 26, then unlabelled
    assert np.array_equal(sample.actions[:14], episode.action[12:26])
    assert sample.progress_target[7:].tolist() == [1.0] * 9
    assert sample.progress_target[5] == pytest.approx(18 / 19)
    assert [shown(c)[1] for c in sample.clip_frames] == [12, 16, 20, 24, 26]


def test_continue_stops_at_a_gap() -> None:
    whole = episode_with([20, 30], 40)
    first, second = whole.segments
    gap = replace(whole, segments=(first, replace(second, start=22)))
    assert sample_at(12, gap, tail="continue").action_valid.sum() == 7


def test_progress_behind_the_end_may_be_supervised() -> None:
    sample = sample_at(12, episode_with([20], 40), progress_pad="one")
    assert sample.progress_valid is not None
    assert sample.progress_valid.all()
    assert sample.action_valid.sum() == 7


def test_classification_marks_the_last_steps() -> None:
    episode = episode_with([20], 40)
    view = make_view(plan={"progress_mode": "classification", "finish_margin": 3})
    steps = view.steps(view.targets(episode.segments, num_frames=40))
    finished = [view.sample(episode, t).finished for t in steps.steps]
    assert finished == [False] * 17 + [True] * 3
    last = view.sample(episode, 19)
    assert not last.action_valid.any()
    assert last.progress == 1.0
    assert last.actions[:, 1].tolist() == [float(episode.action[18, 1])] * 16


def test_a_step_outside_every_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="step 25 has no segment"):
        sample_at(25, episode_with([20], 40))


@pytest.mark.parametrize("field", ["state", "action"])
def test_a_value_that_is_no_number_is_named(field: str) -> None:
    episode = episode_with([20], 40)
    rows = getattr(episode, field).copy()
    rows[4, 1] = np.nan
    with pytest.raises(MemerError, match=f"episode 3 of synthetic: {field} at frame 4 is nan"):
        sample_at(4, replace(episode, **{field: rows}))


def test_each_canvas_is_painted_once() -> None:
    episode = episode_with([10, 20, 30], 30)
    view, cache = make_view(), FrameCache(max_bytes=1 << 24)
    for t in steps_of(episode):
        view.sample(episode, t, frames=cache)
    assert cache.decoded == 30


def test_histograms_count_padding_and_what_gives_no_sample() -> None:
    view = make_view()
    targets = view.targets(episode_with([20, 21, 38], 40).segments, num_frames=40)
    counted = view.histograms([(targets, view.steps(targets))])
    assert counted["samples"] == 19 + 16
    assert counted["labels"] == {"task 0": 35}
    assert counted["skipped_one_frame"] == 1
    valid = sum(min(16, 19 - t) for t in range(19)) + sum(min(16, 37 - t) for t in range(21, 37))
    assert counted["valid_actions"] == pytest.approx(valid / (35 * 16), abs=1e-4)
    assert counted["segment_frames"]["least"] == 1


@pytest.mark.parametrize(
    ("plan", "choices", "message"),
    [
        ({}, {"tail": "cut"}, "view.tail: 'cut', must be pad or continue"),
        ({}, {"progress_pad": "zero"}, "view.progress_pad: 'zero'"),
        ({}, {"sample_stride": 0}, "view.sample_stride: 0"),
        ({}, {"sample_stride": "x"}, "view.sample_stride: 'x', must be a number"),
        ({}, {"start_weight": 0}, "view.start_weight: 0, must be positive"),
        ({}, {"start_weight": "x"}, "view.start_weight: 'x', must be positive"),
        ({}, {"start_steps": -1}, "view.start_steps: -1, must be at least 0"),
        ({}, {"gripper": [2]}, r"view.gripper: \[2\], must be .* of the actions, -2\.\.1"),
        ({}, {"gripper": ["x"]}, r"view.gripper: \['x'\]"),
        ({"executor_context": "full_history"}, {}, "full_history is for latency"),
        ({"plan_encoding": "episodic"}, {}, "use self_contained"),
    ],
)
def test_what_the_view_cannot_serve_is_refused(
    plan: dict[str, Any], choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_view(plan=plan, **choices)


def test_validation_may_have_its_own_stride() -> None:
    config = ExecutorViewConfig(contract=plan_values(), tail="continue")
    view = config.bind(Contract(fps=10.0, cameras=LAYOUT), sample_stride=5, plain=True)
    assert (view.sample_stride, view.tail) == (5, "continue")
