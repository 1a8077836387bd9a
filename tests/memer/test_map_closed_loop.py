import itertools

import pytest

from memer.errors import UsageError
from memer.executors.oracles import ExecutorOracle, LanguageOracle, VisualOracle
from memer.executors.table import TablePlanner
from memer.map_closed_loop import PlayedEpisode, rollout_map_wam
from memer.plan_policy import MapWamPolicy
from memer.tabletop import demonstrate, make_env
from tests.memer.executors.test_oracles import contract

SIZE = 32


def plays(task, indices, **settings):
    for index in indices:
        yield PlayedEpisode(index, make_env(task, split="val", index=index, frame_size=SIZE, **settings))


def oracle_policy(language=None, *, visual=True, switches=None, **settings) -> MapWamPolicy:
    agreed = contract(**(switches or {}))
    return MapWamPolicy(
        language or LanguageOracle(agreed),
        VisualOracle(agreed, frame_size=SIZE) if visual else None,
        ExecutorOracle(agreed),
        agreed,
        **{"replan": 12, "window": 4, **settings},
    )


def run(policy, task="press_button", indices=range(3), **settings):
    return {r.episode_index: r for r in rollout_map_wam(plays(task, indices), policy, **settings)}


def test_oracles_succeed_and_leave_every_segment_at_its_end():
    for index, rollout in run(oracle_policy(), indices=range(3)).items():
        extra = rollout.extra
        assert extra["outcome"] == "success", index
        assert extra["segments"] == extra["measures"]["asked_presses"] == extra["replans"] + 1
        assert extra["gate_delays"] == [0] * extra["replans"]
        assert extra["missed_gates"] == 0


@pytest.mark.parametrize(
    "task",
    [
        "counting_scoops",
        "object_search",
        "dust_and_replace",
        "swap_blocks",
        "observe_and_pick_up",
    ],
)
def test_oracles_succeed_on_the_other_tasks(task):
    """Their segments end with what they are for, so none may be left early: only full progress counts."""
    (rollout,) = run(oracle_policy(tau=0.999, window=1), task, [0]).values()
    assert rollout.extra["outcome"] == "success"


@pytest.mark.parametrize(
    ("switches", "settings"),
    [
        ({"visual_plan": "none"}, {"visual": False, "calibration": "none"}),
        ({}, {"calibration": "none"}),
        ({"progress_mode": "classification"}, {"calibration": "none"}),
    ],
)
def test_oracles_succeed_under_the_switches(switches, settings):
    (rollout,) = run(oracle_policy(switches=switches, **settings), indices=[1]).values()
    assert rollout.extra["outcome"] == "success"


def test_a_table_of_demonstrations_is_as_good_as_the_oracle_where_all_was_demonstrated():
    shown = [demonstrate("press_button", split="val", index=k, frame_size=16) for k in range(2)]
    rollouts = run(oracle_policy(TablePlanner.from_episodes(shown)), indices=range(2))
    assert [rollout.extra["outcome"] for rollout in rollouts.values()] == ["success"] * 2


def test_lockstep_equals_one_by_one():
    alone = run(oracle_policy(), indices=range(2), batch_size=1)
    together = run(oracle_policy(), indices=range(2), batch_size=3)
    assert list(alone) == [0, 1]
    for index in alone:
        assert together[index].extra == alone[index].extra
        for a, b in zip(alone[index].rows, together[index].rows, strict=True):
            timeless = [
                {k: v for k, v in row.items() if k not in ("latency_ms", "timings_ms")} for row in (a, b)
            ]
            assert timeless[0] == timeless[1]
    with pytest.raises(UsageError, match="batch_size: 0"):
        run(oracle_policy(), batch_size=0)


def test_rows_are_chunks_with_their_progress_and_times():
    (rollout,) = run(oracle_policy(), indices=[0]).values()
    rows = rollout.rows
    assert sum(row["executed"] for row in rows) == rollout.extra["steps"]
    for before, after in itertools.pairwise(rows):
        assert after["timestep"] == before["timestep"] + before["executed"]
    plan = rollout.extra["plan"]
    for row in rows:
        first = row["timestep"] == plan[row["segment"] - 1]["start"]
        assert set(row["timings_ms"]) == ({"act", "language", "visual", "prefill"} if first else {"act"})
        assert row["text"] == plan[row["segment"] - 1]["text"]
        # The action that ended the episode was never observed after.
        assert len(row["predicted"]) == row["executed"] - (row is rows[-1])


def test_an_episode_ends_at_its_time_limit():
    policy = oracle_policy()
    policy.language = TablePlanner({("", ()): ""})
    policy.language.next = lambda *_: "stand on your head"
    (rollout,) = run(policy, indices=[0]).values()
    assert rollout.extra["outcome"] == "timeout"
    assert rollout.extra["steps"] == 650
