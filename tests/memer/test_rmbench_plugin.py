import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from memer import rmbench_plugin
from memer.contract import CameraLayout, Contract
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.executors.base import ActionChunk
from memer.executors.table import TablePlanner
from memer.plan_policy import MapWamPolicy
from memer.plan_settings import CanvasLayout, CanvasRegion, PlanSettings
from memer.rmbench_plugin import HARNESS_KEYS, RmbenchPolicy, eval, get_model, reset_model
from tests.memer.plan_doubles import CountingLanguage, GreyVisual
from tests.test_imports import HEAVY, modules_after

ROOT = Path(__file__).parents[2]
CAMERAS = ("head_camera", "left_camera", "right_camera")
CANVAS = CanvasLayout(
    height=24,
    width=16,
    regions=(
        CanvasRegion(camera="head_camera", y=0, x=0, height=16, width=16),
        CanvasRegion(camera="left_camera", y=16, x=0, height=8, width=8),
        CanvasRegion(camera="right_camera", y=16, x=8, height=8, width=8),
    ),
)
CONTRACT = Contract(
    fps=16.7,
    cameras=CameraLayout(camera_keys=CAMERAS, view_width=20, view_height=15, jpeg_round_trip=False),
    plan=PlanSettings(canvas=CANVAS, action_mode="absolute"),
)


class StubEnv:
    """The benchmark's environment as the harness sees it: names, types and silence after the end."""

    def __init__(self, *, step_lim: int = 40, success_at: int | None = None) -> None:
        self.step_lim, self.success_at = step_lim, success_at
        self.take_action_cnt = 0
        self.eval_success = False
        self.observed: list[int] = []
        self.actions: list[np.ndarray] = []

    def get_instruction(self) -> str:
        return "press the left button twice"

    def get_obs(self) -> dict:
        self.observed.append(self.take_action_cnt)
        views = {
            key: {"rgb": np.full((24, 32, 3), 10 * k + self.take_action_cnt, np.uint8)}
            for k, key in enumerate(CAMERAS)
        }
        vector = np.arange(14, dtype=np.float64) + self.take_action_cnt
        return {"observation": views, "joint_action": {"vector": vector}, "endpose": {}}

    def take_action(self, action, action_type="qpos") -> None:
        if self.take_action_cnt == self.step_lim or self.eval_success:
            return
        assert action_type == "qpos"
        assert action.shape == (14,)
        self.take_action_cnt += 1
        self.actions.append(action)
        self.eval_success = self.take_action_cnt == self.success_at


class Executor14:
    """Actions name the state's first number and the place in the chunk; progress 0.1 more with every action.

    Args:
        fails_at: control step at which the service is gone.
    """

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.states: list[list[float]] = []
        self.resets: list[tuple[str, int]] = []

    def reset(self, instruction, *, seed) -> None:
        self.resets.append((instruction, seed))

    def start_segment(self, references, text) -> None:
        self.done = 0

    def act(self, canvas, state, progress) -> ActionChunk:
        if self.fails_at is not None and len(self.states) >= self.fails_at:
            raise ConnectionError("no route to the model")
        self.states.append(state.tolist())
        actions = np.zeros((16, 14), np.float32)
        actions[:, 0], actions[:, 1] = state[0], np.arange(16)
        scores = 0.1 * (self.done + 1 + np.arange(16))
        self.done += 4
        return ActionChunk(actions, scores.astype(np.float32))

    def finished(self, canvas, state) -> float:
        raise AssertionError("progress is a modality here")


class Visual24(GreyVisual):
    def plan(self, text, canvas) -> np.ndarray:
        super().plan(text, canvas)
        return np.zeros((8, *canvas.shape), np.uint8)


def model(executor=None, **settings) -> RmbenchPolicy:
    policy = MapWamPolicy(
        CountingLanguage(),
        Visual24(),
        executor or Executor14(),
        CONTRACT,
        replan=4,
        window=1,
        calibration="none",
    )
    return RmbenchPolicy(policy, **settings)


def harness(env: StubEnv, played: RmbenchPolicy) -> list[int]:
    """The loop of script/eval_policy.py: the number of actions of every call."""
    reset_model(played)
    calls = []
    while env.take_action_cnt < env.step_lim:
        before = env.take_action_cnt
        observation = env.get_obs()
        eval(env, played, observation)
        calls.append(env.take_action_cnt - before)
        if env.eval_success:
            break
    return calls


def test_a_call_is_a_chunk_and_the_gate_ends_it_early():
    """Ten actions make a segment (0.1 each, strictly above 0.95): chunks of 4, 4 and 2."""
    env, played = StubEnv(step_lim=21), model()
    assert harness(env, played) == [4, 4, 2, 4, 4, 2, 1]
    assert len(env.actions) == 21
    assert [segment.start for segment in played.policy.segments] == [0, 10, 20]
    # Chunks start from the state that was seen last, and the place starts at 0 in each.
    assert [a[0] for a in env.actions[:12]] == [0] * 4 + [4] * 4 + [8] * 2 + [10] * 2
    assert [a[1] for a in env.actions[:12]] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1]


def test_every_observation_counts_once_although_the_harness_looks_twice():
    env, played = StubEnv(step_lim=21), model()
    harness(env, played)
    # Between two calls the same state is observed by us and by the harness.
    assert env.observed.count(4) == 2
    assert played.policy.segments[0].kept == [1, 2, 4, 5, 6, 8, 9, 10]
    assert [int(f[0, 0, 0]) for f in played.policy.records[0].frames] == [1, 2, 4, 5, 6, 8, 9, 10]


def test_success_ends_the_call_at_once():
    env, played = StubEnv(step_lim=40, success_at=6), model()
    assert harness(env, played) == [4, 2]
    eval(env, played, env.get_obs())  # a further call does nothing
    assert env.take_action_cnt == 6


def test_views_are_taken_as_they_are_and_states_as_they_come():
    env, played = StubEnv(step_lim=4), model()
    harness(env, played)
    canvas = played.policy._buffer[0]
    assert (canvas[0, 0, 0], canvas[16, 0, 0], canvas[16, 8, 0]) == (0, 10, 20)
    assert played.policy.executor.states[0] == list(range(14))


def test_a_reset_starts_from_nothing_with_another_seed():
    played = model(seed=3)
    harness(StubEnv(step_lim=13), played)
    first = played.policy.executor.resets[0]
    env = StubEnv(step_lim=4)
    harness(env, played)
    assert len(played.policy.segments) == 1
    assert played.policy.executor.resets[1][0] == "press the left button twice"
    assert played.policy.executor.resets[1][1] != first[1]
    assert played.policy.steps == 4


def test_the_log_tells_success_timeout_and_what_the_harness_broke_off(tmp_path):
    played = model(log=tmp_path / "log" / "episodes.jsonl")
    harness(StubEnv(success_at=12), played)
    harness(StubEnv(step_lim=5), played)
    reset_model(played)
    env = StubEnv()
    eval(env, played, env.get_obs())
    reset_model(played)
    lines = [json.loads(line) for line in played.log.read_text().splitlines()]
    assert [(line["episode"], line["outcome"], line["steps"]) for line in lines] == [
        (0, "success", 12),
        (1, "timeout", 5),
        (2, "aborted", 4),
    ]
    assert [s["ended_by"] for s in lines[0]["segments"]] == ["gate", None]


def test_an_unreachable_model_holds_still_and_is_noted(tmp_path):
    played = model(Executor14(fails_at=1), log=tmp_path / "episodes.jsonl")
    env = StubEnv(step_lim=8)
    calls = harness(env, played)
    assert calls == [4, 1, 1, 1, 1]  # every call executes an action
    assert env.actions[5].tolist() == list(np.arange(14.0) + 5)  # where the joints are
    (line,) = [json.loads(line) for line in played.log.read_text().splitlines()]
    assert line["outcome"] == "fault"
    assert "no route to the model" in line["fault"]
    with pytest.raises(ConnectionError):
        harness(StubEnv(), model(Executor14(fails_at=0), strict=True))


def test_what_is_missing_in_an_observation_is_named():
    env, played = StubEnv(), model()
    observation = env.get_obs()
    del observation["observation"]["left_camera"]
    with pytest.raises(MemerError, match=r"observation\.left_camera: missing; there is head_camera"):
        eval(env, played, observation)
    observation = env.get_obs()
    observation["joint_action"]["vector"] = np.zeros(7)
    with pytest.raises(MemerError, match=r"shape \[7\], must be \[14\]"):
        eval(env, model(), observation)


def test_an_environment_that_stands_still_is_an_error():
    env, played = StubEnv(), model()
    env.take_action = lambda action, action_type: None
    with pytest.raises(MemerError, match="its step count does not grow"):
        eval(env, played, env.get_obs())


def test_the_example_names_every_key_and_no_other():
    values = yaml.safe_load((ROOT / "conf" / "rmbench" / "deploy_policy.yml").read_text())
    own = set(values) - set(HARNESS_KEYS)
    assert own == set(rmbench_plugin.PluginSettings.__dataclass_fields__)
    assert {"policy_name", "task_name", "task_config", "ckpt_setting", "seed", "instruction_type"} < set(
        values
    )


def test_get_model_refuses_what_it_does_not_know(tmp_path):
    harness_keys = {"policy_name": "MemerMap", "seed": 0, "left_arm_dim": 6, "right_arm_dim": 6}
    with pytest.raises(UsageError, match="unknown key 'stepz'"):
        get_model({**harness_keys, "language": "a", "executor": "b", "stepz": 3})
    with pytest.raises(UsageError, match="executor is missing"):
        get_model({**harness_keys, "language": "a"})
    with pytest.raises(SourceUnavailableError, match="nowhere"):
        get_model({**harness_keys, "language": "t.json", "executor": str(tmp_path / "nowhere")})


def test_a_table_survives_its_file(tmp_path):
    table = TablePlanner({("do it", ()): "a", ("do it", ("a",)): "b"})
    assert TablePlanner.load(table.save(tmp_path / "table.json")).table == table.table
    (tmp_path / "bad.json").write_text('{"table": [["a"]]}')
    with pytest.raises(MemerError, match=r"bad\.json"):
        TablePlanner.load(tmp_path / "bad.json")


def test_the_plug_in_loads_neither_our_benchmark_nor_a_trainer():
    loaded = modules_after("import memer.rmbench_plugin")
    assert loaded & (HEAVY | {"gymnasium", "sapien", "diffusers"}) == set()
