import numpy as np
import pytest

from memer.episode import Segment
from memer.errors import MemerError, UsageError
from memer.executors.base import ActionChunk
from memer.plan_policy import MapWamPolicy
from memer.plan_windows import episode_plan_indices, finished_indices, segment_plan_indices
from memer.windows import bucket_last_indices
from tests.memer.plan_doubles import (
    HORIZON,
    CountingLanguage,
    GreyVisual,
    ScriptedExecutor,
    observation,
    small_contract,
)


def make(executor, *, contract=None, visual="grey", calibration="none", **settings) -> MapWamPolicy:
    return MapWamPolicy(
        CountingLanguage(),
        GreyVisual() if visual == "grey" else visual,
        executor,
        contract or small_contract(),
        **{"replan": 12, "window": 2, "calibration": calibration, **settings},
    )


def play(policy: MapWamPolicy, steps: int, *, instruction: str = "do it", seed: int = 0) -> list:
    policy.reset(instruction, seed=seed)
    return [policy.step(observation(step)) for step in range(steps)]


def ramp(length: int) -> list[float]:
    """Progress after the 1st, 2nd, ... action of a segment of `length` actions."""
    return [(n + 1) / length for n in range(length)]


def test_chunks_are_renewed_after_replan_actions():
    executor = ScriptedExecutor([0.0])
    actions = play(make(executor, replan=5), 12)
    assert [step for step, _ in executor.acts] == [0, 5, 10]
    assert [tuple(a) for a in actions] == [(s - s % 5, s % 5) for s in range(12)]


def test_the_gate_ends_a_segment_and_drops_the_rest_of_the_chunk():
    """Twenty actions at 0.05 each, window 2: the mean of the last two exceeds 0.95 after action 20."""
    executor = ScriptedExecutor(ramp(20))
    policy = make(executor)
    actions = play(policy, 24)
    # Chunks start at 0 and 12; the second one has 8 executed actions when the gate fires on observation 20.
    assert [step for step, _ in executor.acts] == [0, 12, 20]
    assert [tuple(a) for a in actions[19:22]] == [(12, 7), (20, 0), (20, 1)]
    first, second = policy.segments
    assert (first.end, first.ended_by, second.start) == (20, "gate", 20)
    assert [chunk.executed for chunk in policy.chunks] == [12, 8, 4]
    assert policy.chunks[1].score == pytest.approx(0.975)


def test_the_observation_that_fires_the_gate_is_the_last_and_the_first():
    executor = ScriptedExecutor(ramp(20))
    policy = make(executor)
    play(policy, 24)
    assert policy.records[0].frames[-1][0, 0, 0] == 20
    assert executor.segments[1] == ("subtask 2", [20, 10, 20, 30, 40, 50, 60, 70, 80])
    assert policy.visual.planned == [("subtask 1", 0), ("subtask 2", 20)]


def test_what_is_written_back_are_the_real_frames_that_training_would_choose():
    policy = make(ScriptedExecutor(ramp(20)))
    play(policy, 45)
    chosen = bucket_last_indices(0, 21)
    expected = [(chosen, "subtask 1"), ([20 + k for k in chosen], "subtask 2")]
    assert policy.visual.written == expected
    assert [segment.kept for segment in policy.segments[:2]] == [frames for frames, _ in expected]
    assert [int(f[0, 0, 0]) for f in policy.records[1].frames] == expected[1][0]


def test_references_and_records_are_those_of_the_training_views():
    """An annotated segment [0, 21) and the 21 observations of the same segment at run time."""
    executor = ScriptedExecutor(ramp(20))
    policy = make(executor)
    play(policy, 24)
    segment = Segment(0, 21, "subtask 1")
    assert policy.segments[0].kept == episode_plan_indices([segment])[1:]
    assert [0, *policy.segments[0].kept] == segment_plan_indices(segment.start, segment.end)
    assert policy.language.asked[1][2] == finished_indices([segment], 1)


def test_a_segment_shorter_than_eight_frames_repeats_frames():
    policy = make(ScriptedExecutor([0.0, 1.0, 1.0]), window=2)
    play(policy, 5)
    assert policy.visual.written[0][0] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_language_planner_sees_first_and_last_frames_and_repeated_texts():
    policy = make(ScriptedExecutor(ramp(20)))
    play(policy, 45, instruction="press both")
    assert policy.language.asked == [
        ("press both", [], [0]),
        ("press both", ["subtask 1"], [0, 20]),
        ("press both", ["subtask 1", "subtask 2"], [0, 20, 40]),
    ]


def test_scores_of_an_older_plan_never_count():
    """The first value of every segment is 1; it must not meet the last one of the segment before."""
    policy = make(ScriptedExecutor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]))
    play(policy, 13)
    assert [segment.start for segment in policy.segments] == [0, 6, 12]


def test_progress_goes_on_from_the_executed_action_and_starts_at_zero():
    executor = ScriptedExecutor(ramp(40))
    play(make(executor), 50)
    given = dict(executor.acts)
    assert (given[0], given[12], given[24]) == (0.0, pytest.approx(12 / 40), pytest.approx(24 / 40))
    assert given[39] == 0.0  # a new segment: the mean of 38/40 and 39/40 lies above 0.95


def test_alignment_averages_with_the_more_similar_reference():
    """At observation 12 progress is 0.3; of the references 2/8 (level 20) and 3/8 (level 30) 2 is nearer."""
    executor = ScriptedExecutor([0.025 * (n + 1) for n in range(40)])
    policy = make(executor, calibration="alignment", visual=GreyVisual(range(10, 90, 10)))
    play(policy, 13)
    assert dict(executor.acts)[12] == pytest.approx((0.3 + 0.25) / 2)
    chunk = policy.chunks[1]
    assert (chunk.progress_before, chunk.progress) == (pytest.approx(0.3), pytest.approx(0.275))


def test_predictions_above_one_are_clipped_for_the_condition_but_not_for_the_gate():
    executor = ScriptedExecutor([0.0] * 11 + [1.4, 0.55])
    policy = make(executor, window=2)
    play(policy, 14)
    assert dict(executor.acts)[12] == 1.0
    assert policy.segments[0].end == 13  # (1.4 + 0.55) / 2 > 0.95


def test_a_reset_leaves_nothing():
    fresh = make(ScriptedExecutor(ramp(20)))
    expected = play(fresh, 30)
    policy = make(ScriptedExecutor(ramp(20)))
    play(policy, 17)
    again = play(policy, 30, instruction="other", seed=7)
    assert [a.tolist() for a in again] == [a.tolist() for a in expected]
    assert policy.executor.resets == [("do it", 0), ("other", 7)]
    assert policy.visual.starts == [("do it", 0, 0), ("other", 0, 7)]
    assert [record.text for record in policy.records] == ["subtask 1"]
    assert policy.steps == 30


def test_segments_are_ended_by_force():
    policy = make(ScriptedExecutor([0.0]), max_segment_steps=7)
    play(policy, 22)
    assert [segment.start for segment in policy.segments] == [0, 7, 14, 21]
    assert {segment.ended_by for segment in policy.segments[:-1]} == {"limit"}


def test_without_a_visual_plan():
    executor = ScriptedExecutor(ramp(20))
    policy = make(executor, contract=small_contract(visual_plan="none"), visual=None)
    play(policy, 25)
    assert executor.segments == [("subtask 1", None), ("subtask 2", None)]
    assert policy.records[0].frames.shape[0] == 8


def test_classification_asks_at_chunk_starts_and_every_few_actions():
    contract = small_contract(progress_mode="classification", finish_margin=8)
    executor = ScriptedExecutor([0.0], finished=[0.1, 0.2, 0.3, 0.9, 0.0])
    policy = make(executor, contract=contract, check_every=8)
    play(policy, 30)
    # 8, 16, 24 by count, 12 as the start of a chunk; a segment's first chunk starts without a question.
    assert executor.questions == [8, 12, 16, 24]
    assert [(s.start, s.ended_by) for s in policy.segments] == [(0, "classified"), (24, None)]


def test_a_segment_always_executes_an_action():
    contract = small_contract(progress_mode="classification")
    executor = ScriptedExecutor([0.0], finished=[1.0])
    policy = make(executor, contract=contract, check_every=1)
    assert len(play(policy, 6)) == 6
    assert [segment.start for segment in policy.segments] == list(range(6))


def test_forks_share_no_state():
    policy = make(ScriptedExecutor(ramp(20)))
    play(policy, 15)
    other = policy.fork()
    assert (other.steps, other.records, other.chunks) == (0, [], [])
    assert policy.steps == 15
    other.executor = ScriptedExecutor(ramp(20))
    play(other, 3)
    assert policy.chunks[-1].executed == 3
    assert policy.progress == pytest.approx(14 / 20)


def test_the_halves_of_a_step_are_the_step():
    whole = play(make(ScriptedExecutor(ramp(20))), 25)
    policy = make(ScriptedExecutor(ramp(20)))
    policy.reset("do it")
    for step in range(25):
        request = policy.observe(observation(step))
        if request is not None:
            policy.take(policy.executor.act(request.canvas, request.state, request.progress))
        assert policy.next_action().tolist() == whole[step].tolist()
    with pytest.raises(MemerError, match="no chunk"):
        make(ScriptedExecutor()).next_action()


@pytest.mark.parametrize(
    ("switches", "settings", "words"),
    [
        ({}, {"replan": HORIZON + 1}, "replan: 17, must be in 1..16"),
        ({}, {"replan": 0}, "replan: 0"),
        ({}, {"visual": None}, "visual planner: there is none"),
        ({"visual_plan": "none"}, {}, "one was given"),
        (
            {"visual_plan": "none"},
            {"visual": None, "calibration": "alignment"},
            "there is no visual plan; use calibration=none",
        ),
        ({"progress_mode": "classification"}, {"calibration": "alignment"}, "progress is classified"),
        ({"progress_mode": "classification", "finish_margin": 4}, {"check_every": 5}, "use at most 4"),
        ({"executor_context": "full_history"}, {}, "one was given"),
        ({"plan_encoding": "episodic"}, {}, "both must be models"),
        ({}, {"max_segment_steps": 0}, "max_segment_steps: 0"),
        ({}, {"calibration": "maybe"}, "must be alignment or none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(switches, settings, words):
    with pytest.raises(UsageError, match=words):
        make(ScriptedExecutor(), contract=small_contract(**switches), **settings)


def test_bad_observations_and_chunks_are_one_line():
    policy = make(ScriptedExecutor())
    policy.reset("do it")
    with pytest.raises(MemerError, match=r"state\[1\] is nan"):
        policy.step(observation(0, state=(0.0, float("nan"))))
    with pytest.raises(MemerError, match="no camera 'base'"):
        policy.step({"images": {"wrist": np.zeros((4, 4, 3), np.uint8)}, "state": np.zeros(2)})

    class Broken(ScriptedExecutor):
        def act(self, canvas, state, progress):
            return ActionChunk(np.full((16, 2), np.inf, np.float32), np.zeros(16, np.float32))

    policy = make(Broken())
    policy.reset("do it")
    with pytest.raises(MemerError, match="not finite"):
        policy.step(observation(0))
