import pytest

from memer.closed_loop import ClosedLoopEpisode, rollout_closed_loop, window_phases
from memer.contract import CameraLayout, Contract, WindowSettings
from memer.errors import UsageError
from memer.keyframes import KeyframeRules
from memer.planners.base import PlannerResult
from memer.planners.baselines import ConstantPlanner
from memer.planners.oracle import ExpertPlanner
from memer.tabletop import make_controller, make_env
from memer.windows import recent_indices
from tests.memer.planner_doubles import PicturePlanner, without_timing

TASK = "object_search"
CONTRACT = Contract(
    fps=15.0,
    cameras=CameraLayout(camera_keys=("base", "wrist"), view_width=16, view_height=16),
    memory_form="image_text",
)
RULES = KeyframeRules.from_value([{"pattern": "^look inside the .* bin$", "select": "last"}])


def plays(indices):
    for index in indices:
        yield ClosedLoopEpisode(
            index, make_env(TASK, split="val", index=index, frame_size=32), make_controller(TASK)
        )


def run(planner, indices=range(4), **settings):
    return {r.episode_index: r for r in rollout_closed_loop(plays(indices), planner, CONTRACT, **settings)}


def rows_of(rollouts):
    return {index: [without_timing(row) for row in r.rows] for index, r in rollouts.items()}


def test_expert_planner_succeeds_along_the_optimal_path():
    rollouts = run(ExpertPlanner(CONTRACT, RULES))
    for rollout in rollouts.values():
        assert rollout.extra["outcome"] == "success"
        assert rollout.extra["measures"]["success"] is True
        assert rollout.representatives, "looks into bins are remembered"
        assert all(row["normalized_correct"] for row in rollout.rows)
        assert [row["timestep"] for row in rollout.rows] == list(range(0, 5 * len(rollout.rows), 5))


def test_a_useless_planner_runs_out_of_time():
    (rollout,) = run(ConstantPlanner("look inside the left bin"), [0]).values()
    assert rollout.extra["outcome"] == "timeout"
    assert rollout.extra["measures"]["success"] is False
    assert rollout.extra["steps"] == make_env(TASK).time_limit


def test_lockstep_equals_one_by_one():
    """Answers depend on every picture, so a swapped or stale frame anywhere would show."""
    labels = [f"look inside the {name} bin" for name in ("left", "center", "right")]
    alone = run(PicturePlanner(parse_failures=True, labels=labels), batch_size=1)
    together = run(PicturePlanner(parse_failures=True, labels=labels), batch_size=3)
    assert any(rollout.extra["measures"]["visits"] for rollout in alone.values()), "the arm moves"
    assert rows_of(together) == rows_of(alone)
    assert {i: r.extra for i, r in together.items()} == {i: r.extra for i, r in alone.items()}


def test_low_level_obeys_the_last_good_subtask_after_a_parse_failure():
    class Flaky(ExpertPlanner):
        def plan(self, requests):
            return [
                result
                if request.request_id % 2
                else PlannerResult(status="parse_error", error="no JSON object")
                for request, result in zip(requests, super().plan(requests), strict=True)
            ]

    (rollout,) = run(Flaky(CONTRACT, RULES), [1]).values()
    assert rollout.extra["outcome"] in ("success", "failure", "timeout")  # counted, never planner_error
    assert rollout.extra["parse_failures"] == len(rollout.rows) // 2
    for before, row in zip(rollout.rows, rollout.rows[1:], strict=False):
        if row["stale"]:
            assert row["current_subtask"] == before["current_subtask"]


def test_three_infrastructure_faults_in_a_row_end_the_episode():
    class Broken(ExpertPlanner):
        def plan(self, requests):
            faulty = {1, 2, 4, 5, 6}
            return [
                PlannerResult(status="api_error", error="503") if request.request_id in faulty else result
                for request, result in zip(requests, super().plan(requests), strict=True)
            ]

    (rollout,) = run(Broken(CONTRACT, RULES), [0]).values()
    assert rollout.extra["outcome"] == "planner_error"
    assert [row["status"] for row in rollout.rows] == ["api_error"] * 2 + ["ok"] + ["api_error"] * 3


@pytest.mark.parametrize("stride", [1, 3, 5, 7, 15])
def test_window_phases_cover_every_window(stride):
    for s in (1, 4, 5):
        windows = WindowSettings(frame_subsample=s, recent_frames_length=6)
        contract = Contract(fps=15.0, cameras=CONTRACT.cameras, windows=windows)
        phases = window_phases(contract, stride)
        needed = {
            k % stride
            for t in range(0, 40 * stride, stride)
            for k in recent_indices(t, subsample=s, length=6)
        }
        assert needed == phases


@pytest.mark.parametrize("stride", [3, 8])
def test_any_stride_finds_its_frames(stride):
    (rollout,) = run(ExpertPlanner(CONTRACT, RULES), [0], planner_stride=stride).values()
    assert len(rollout.rows) > 5
    assert rollout.rows[5]["timestep"] == 5 * stride


def test_what_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="memory_source: 'gt'"):
        run(ConstantPlanner("x"), memory_source="gt")
    with pytest.raises(UsageError, match="planner_stride: 0"):
        run(ConstantPlanner("x"), planner_stride=0)
