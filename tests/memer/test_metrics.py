import numpy as np
import pytest

from memer.contract import CameraLayout, Contract, WindowSettings
from memer.episode import ArrayFrames, Episode, InstructionSpan, segments_from_labels
from memer.keyframes import KeyframeRules
from memer.metrics import (
    episode_row,
    label_table,
    latency_summary,
    score_episode,
    summarize,
)
from memer.planners.oracle import OraclePlanner
from memer.rollout import rollout_offline
from memer.truth import Truth

DEFAULTS = WindowSettings()


def make_row(t: int, predicted: str | None, **fields: object) -> dict[str, object]:
    row = {
        "timestep": t,
        "predicted_subtask": predicted,
        "parse_ok": predicted is not None,
        "predicted_keyframe_positions": [],
        "invalid_keyframe_positions": [],
        "memory_indices_before": [],
    }
    return {**row, **fields}


def score(rows, truth, representatives=(), **settings):
    return score_episode(rows, truth, episode_index=0, representatives=representatives, **settings)


def episode_of(labels, index=0) -> Episode:
    n = len(labels)
    return Episode(
        source="s",
        episode_index=index,
        fps=15.0,
        cameras={"c": ArrayFrames(np.zeros((n, 2, 2, 3), np.uint8))},
        state=np.zeros((n, 1), np.float32),
        action=np.zeros((n, 1), np.float32),
        instructions=(InstructionSpan(0, "do it"),),
        segments=segments_from_labels(labels),
    )


def contract_of(**windows: int) -> Contract:
    return Contract(
        fps=15.0,
        cameras=CameraLayout(camera_keys=("c",), view_width=4, view_height=4, jpeg_round_trip=False),
        windows=WindowSettings(**windows),
    )


# Accuracy


def test_accuracy_by_hand():
    labels = ["a  b"] * 5 + ["c"] * 5
    truth = Truth(labels, (), WindowSettings(prediction_horizon=0))
    said = ["a  b", "a b", "A B", None, "c", "c", "c", "c ", "C", "x"]
    result = score([make_row(t, text) for t, text in enumerate(said)], truth)
    assert result.raw_correct == 3  # t = 0, 5, 6
    assert result.normalized_correct == 5  # t = 1 and 7 besides
    assert result.parse_failures == 1
    folded = score([make_row(t, text) for t, text in enumerate(said)], truth, casefold=True)
    assert folded.normalized_correct == 7
    row = episode_row(result)
    assert (row["raw_accuracy"], row["normalized_accuracy"], row["parse_failure_rate"]) == (0.3, 0.5, 0.1)


def test_target_lies_ahead_and_is_held_at_the_end():
    labels = ["a"] * 20 + ["b"] * 5
    truth = Truth(labels, (), DEFAULTS)
    assert [truth.target(t) for t in (9, 10, 24)] == ["a", "b", "b"]
    assert truth.changes() == [10]


def test_unlabelled_targets_count_nowhere_but_parse_failures():
    labels = ["a", None, None, "a", "b"]
    truth = Truth(labels, (), WindowSettings(prediction_horizon=0))
    result = score([make_row(t, None) for t in range(5)], truth)
    assert (result.timesteps, result.unlabelled, result.labelled, result.parse_failures) == (5, 2, 3, 5)
    assert truth.changes() == [4]  # a, unlabelled, a is no change


def test_micro_weighs_steps_and_macro_episodes():
    truth = Truth(["a"] * 3, (), WindowSettings(prediction_horizon=0))
    short = Truth(["a"], (), WindowSettings(prediction_horizon=0))
    scores = [score([make_row(t, "x") for t in range(3)], truth), score([make_row(0, "a")], short)]
    metrics, ci = summarize(scores)
    assert metrics["normalized_accuracy"] == 0.25
    assert metrics["normalized_accuracy_macro"] == 0.5
    assert ci["normalized_accuracy_macro"] == [0.0, 1.0]
    alone, none = summarize(scores[:1])
    assert alone["normalized_accuracy"] == 0.0
    assert set(none.values()) == {None}


def test_boundary_accuracy_reaches_w_steps_to_both_sides():
    windows = WindowSettings(frame_subsample=2, prediction_horizon=1)
    truth = Truth(["a"] * 22 + ["b"] * 20, (), windows)  # target changes at 22 - 2 = 20
    rows = [make_row(t, "a") for t in range(42)]
    result = score(rows, truth, boundary_width=3)
    # 20 - 6 <= t < 20 + 6: six steps before (right) and six after (wrong).
    assert (result.boundary_steps, result.boundary_correct) == (12, 6)
    assert episode_row(score([make_row(0, "a")], Truth(["a"], (), windows)))["boundary_accuracy"] is None


def test_overlapping_boundaries_count_a_step_once():
    windows = WindowSettings(frame_subsample=1, prediction_horizon=0)
    truth = Truth(["a"] * 5 + ["b"] * 2 + ["a"] * 5, (), windows)  # changes at 5 and 7
    result = score([make_row(t, "a") for t in range(12)], truth, boundary_width=3)
    assert result.boundary_steps == 8  # 2..9


def test_switch_delay_is_signed_and_counts_missed_switches():
    windows = WindowSettings(prediction_horizon=0)
    truth = Truth(["a"] * 10 + ["b"] * 10 + ["c"] * 10 + ["d"] * 10, (), windows)
    said = ["a"] * 13 + ["b"] * 5 + ["c"] * 22  # b three late, c two early, d never
    result = score([make_row(t, text) for t, text in enumerate(said)], truth)
    assert sorted(result.switch_delays) == [-2, 3]
    assert result.missed_switches == 1
    assert summarize([result])[0]["switch_delay"] == 0.5


def test_a_late_echo_of_an_earlier_label_is_not_an_early_switch():
    windows = WindowSettings(prediction_horizon=0)
    truth = Truth(["b"] * 10 + ["a"] * 10 + ["b"] * 10, (), windows)
    said = ["b"] * 12 + ["a"] * 8 + ["b"] * 10  # leaves b two late, returns on time
    result = score([make_row(t, text) for t, text in enumerate(said)], truth)
    assert result.switch_delays == [2, 0]


def test_switch_delay_at_a_stride_starts_at_the_first_evaluated_step():
    truth = Truth(["a"] * 7 + ["b"] * 13, (), WindowSettings(prediction_horizon=0), 5)
    result = score([make_row(t, "b" if t >= 10 else "a") for t in truth.steps], truth)
    assert result.switch_delays == [0]


# Positions


def test_position_scores_by_hand():
    # Keyframe 30: at t = 60 the window is 25, 30, ..., 60 and the position 2.
    truth = Truth(["a"] * 100, (30,), DEFAULTS)
    rows = [
        make_row(60, "a", predicted_keyframe_positions=[2]),  # hit
        make_row(
            55, "a", predicted_keyframe_positions=[4, 4]
        ),  # window 20..55: position 3; one off, repeated
        make_row(50, "a", predicted_keyframe_positions=[9], invalid_keyframe_positions=[9]),  # invalid
        make_row(20, "a", predicted_keyframe_positions=[1]),  # nothing to nominate yet
    ]
    result = score(rows, truth)
    assert (result.positions_target, result.positions_distinct, result.positions_predicted) == (3, 4, 5)
    assert (result.positions_hit, result.positions_hit_tol1, result.positions_invalid) == (1, 2, 1)
    row = episode_row(result)
    assert row["position_precision"] == 1 / 4
    assert row["position_recall"] == 1 / 3
    assert row["position_f1"] == pytest.approx(2 / 7)
    assert row["position_f1_tol1"] == pytest.approx(4 / 7)
    assert row["invalid_position_rate"] == 1 / 5


def test_tolerance_pairs_one_to_one():
    truth = Truth(["a"] * 100, (30, 35), DEFAULTS)
    row = make_row(60, "a", predicted_keyframe_positions=[3])  # wanted 2 and 3
    assert score([row], truth).positions_hit_tol1 == 1


# Keyframe events


@pytest.mark.parametrize(("gap", "groups"), [(29, 1), (30, 2)])
def test_events_join_as_a_perfect_planner_joins_them(gap, groups):
    truth = Truth(["a"] * 300, (100, 100 + gap), DEFAULTS)
    events, missed = truth.events()
    assert (len(events), missed) == (groups, 0)


def test_keyframes_that_no_evaluated_window_holds_are_counted_apart():
    truth = Truth(["a"] * 300, (120,), DEFAULTS, 100)  # windows 65..100 and 165..200
    assert truth.events() == ([], 1)
    assert score([make_row(t, "a") for t in truth.steps], truth).never_nominated == 1


def test_event_matching_by_hand():
    truth = Truth(["a"] * 400, (100, 200, 300), DEFAULTS)
    # 96 and 100 lie in [100 - 4, 100]: only one of them can match. 190 needs the tolerance. 399 is false.
    result = score([make_row(0, "a")], truth, representatives=[96, 100, 190, 399])
    assert (result.events, result.representatives, result.events_hit, result.events_hit_tol) == (3, 4, 1, 2)
    row = episode_row(result)
    assert row["keyframe_precision"] == 1 / 4
    assert row["keyframe_recall"] == 1 / 3
    assert row["keyframe_f1"] == pytest.approx(2 / 7)
    assert row["keyframe_f1_tol"] == pytest.approx(4 / 7)


def test_event_span_ends_s_minus_one_frames_early_and_at_the_keyframe():
    truth = Truth(["a"] * 400, (100,), DEFAULTS)
    hits = [score([make_row(0, "a")], truth, representatives=[rep]).events_hit for rep in (95, 96, 100, 101)]
    far = [
        score([make_row(0, "a")], truth, representatives=[rep]).events_hit_tol for rep in (70, 71, 125, 126)
    ]
    assert hits == [0, 1, 1, 0]
    assert far == [0, 1, 1, 0]


def test_episode_without_events_and_nominations_is_left_out_of_macro():
    truth = Truth(["a"] * 50, (), DEFAULTS)
    empty = score([make_row(0, "a")], truth)
    found = score([make_row(0, "a")], Truth(["a"] * 400, (100,), DEFAULTS), representatives=[100])
    metrics, _ = summarize([empty, found])
    assert metrics["keyframe_f1_macro"] == 1.0


# Memory


def test_memory_scores_by_hand():
    truth = Truth(["a"] * 400, (30, 60), DEFAULTS)
    # t = 122: the true memory is 27, 57 (spec example).
    assert truth.split(122)[0] == [27, 57]
    rows = [
        make_row(122, "a", memory_indices_before=[23, 80]),  # 23 within 4 of 27; 80 within 29 of 57
        make_row(122, "a", memory_indices_before=[]),  # nothing shown: recall 0, precision undefined
        make_row(20, "a", memory_indices_before=[3]),  # nothing to remember yet: counts nowhere
    ]
    row = episode_row(score(rows, truth))
    assert row["memory_recall"] == 0.25
    assert row["memory_precision"] == 0.5
    assert row["memory_recall_tol"] == 0.5
    assert row["memory_precision_tol"] == 1.0


# The perfect planner


LABELS = {
    "far apart": ["a"] * 60 + ["b"] * 70 + ["c"] * 80 + ["d"] * 60,
    "merging": ["a"] * 40 + ["b"] * 20 + ["c"] * 12 + ["d"] * 90,
    "short and early": ["a"] * 2 + ["b"] * 3 + ["c"] * 100,
    "unlabelled": ["a"] * 30 + [None] * 20 + ["a"] * 40 + [None] * 10,
}


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("stride", [1, 5, 15])
def test_oracle_scores_one(name, stride):
    contract, rules = contract_of(), KeyframeRules.all_last()
    episode = episode_of(LABELS[name])
    (rollout,) = rollout_offline(
        [episode], OraclePlanner(contract, rules), contract, rules, eval_stride=stride
    )
    metrics, _ = summarize([rollout.score])
    for metric in (
        "raw_accuracy",
        "normalized_accuracy",
        "position_f1",
        "position_f1_tol1",
        "keyframe_precision",
        "keyframe_recall",
        "keyframe_f1",
        "keyframe_f1_tol",
    ):
        assert metrics[metric] == 1.0, metric
    assert metrics["parse_failure_rate"] == 0.0
    assert metrics["switch_delay"] in (0.0, None)
    assert metrics["missed_switches"] == 0
    assert metrics["memory_recall"] == metrics["memory_recall_oracle"]
    assert metrics["memory_precision"] == metrics["memory_precision_oracle"]


@pytest.mark.parametrize(
    ("keyframe", "representative", "votes"),
    [(0, 0, 8), (1, 1, 15), (2, 1, 22), (3, 2, 29), (4, 2, 36), (50, 48, 36), (199, 199, 1)],
)
def test_oracle_self_test_of_one_keyframe(keyframe, representative, votes):
    labels = ["a"] * (keyframe + 1) + ["b"] * (199 - keyframe)
    rules = KeyframeRules.from_value([{"exact": "a", "select": "last"}])
    contract = contract_of()
    (rollout,) = rollout_offline([episode_of(labels)], OraclePlanner(contract, rules), contract, rules)
    assert rollout.representatives == [representative]
    assert rollout.rows[-1]["num_votes"] == votes
    nominated = [row["timestep"] for row in rollout.rows if row["mapped_keyframe_indices"]]
    if 4 <= keyframe <= 164:
        assert nominated == list(range(keyframe, keyframe + 36))
    if 35 <= keyframe <= 164:  # the windows are full
        shown = [row["timestep"] for row in rollout.rows if row["memory_indices_before"]]
        assert shown[0] == keyframe + 34
    assert rollout.score.events_hit == rollout.score.events == 1


@pytest.mark.parametrize(("stride", "counts"), [(5, {8}), (15, {2, 3})])
def test_oracle_votes_on_one_frame_at_a_stride(stride, counts):
    contract, rules = contract_of(), KeyframeRules.from_value([{"exact": "a", "select": "last"}])
    labels = ["a"] * 61 + ["b"] * 140
    (rollout,) = rollout_offline(
        [episode_of(labels)], OraclePlanner(contract, rules), contract, rules, eval_stride=stride
    )
    voted = [index for row in rollout.rows for index in row["mapped_keyframe_indices"]]
    assert set(voted) == {60}
    assert len(voted) in counts


# Tables and latency


def test_label_table_by_hand():
    truth = Truth(["a b"] * 3 + ["c"], (), WindowSettings(prediction_horizon=0))
    said = ["a b", "a  b", None, "a b"]
    table = label_table([score([make_row(t, text) for t, text in enumerate(said)], truth)])
    assert table["labels"]["a b"] == {
        "support": 3,
        "raw_accuracy": pytest.approx(1 / 3),
        "normalized_accuracy": pytest.approx(2 / 3),
    }
    assert table["confusion"] == {"a b": {"": 1, "a b": 2}, "c": {"a b": 1}}


def test_latency_leaves_out_the_warm_up():
    rows = [
        {"latency_ms": ms, "timings_ms": {"generate": ms / 2}} for ms in (900.0, 800.0, 700.0, 10.0, 30.0)
    ]
    result = latency_summary(rows)
    assert result["total"]["max"] == 30.0
    assert result["total"]["p50"] == 20.0
    assert result["generate"]["mean"] == 10.0
    assert latency_summary(rows[:3]) == {}
