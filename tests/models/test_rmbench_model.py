"""`get_model` of the RMBench plug-in with exported tiny models: what a deployment loads."""

from dataclasses import replace

import numpy as np
import pytest

from memer.contract import CameraLayout, Contract
from memer.errors import MemerError
from memer.executors.table import TablePlanner
from memer.plan_settings import CanvasLayout, CanvasRegion, PlanSettings
from memer.rmbench_plugin import eval, get_model, reset_model
from models.map_planners import ModelExecutor, ModelVisualPlanner
from tests.memer.test_rmbench_plugin import CAMERAS, StubEnv
from tests.models import plan_exports

CANVAS = CanvasLayout(
    height=48,
    width=32,
    regions=(
        CanvasRegion(camera="head_camera", y=0, x=0, height=32, width=32),
        CanvasRegion(camera="left_camera", y=32, x=0, height=16, width=16),
        CanvasRegion(camera="right_camera", y=32, x=16, height=16, width=16),
    ),
)


def rmbench_contract(**switches) -> Contract:
    numbers = {"mean": (0.0,) * 14, "std": (1.0,) * 14}
    return Contract(
        fps=16.7,
        cameras=CameraLayout(camera_keys=CAMERAS, view_width=32, view_height=24),
        plan=PlanSettings(canvas=CANVAS, action_mode="absolute", **switches),
        statistics={"state": numbers, "action": numbers},
    )


@pytest.fixture
def exports(tmp_path):
    contract = rmbench_contract()
    table = TablePlanner({("press the left button twice", ()): "press the left button one time"})
    return {
        "language": str(table.save(tmp_path / "table.json")),
        "visual": str(plan_exports.export_world_model(tmp_path / "cwm", contract)),
        "executor": str(plan_exports.export_executor(tmp_path / "wap", contract, action_dim=14)),
        "device": "cpu",
        "steps": 2,
        "replan": 8,
    }


def test_exports_play_in_the_stub(exports, tmp_path):
    log = tmp_path / "episodes.jsonl"
    model = get_model({**exports, "policy_name": "MemerMap", "seed": 1, "log": str(log)})
    assert isinstance(model.policy.visual, ModelVisualPlanner)
    assert isinstance(model.policy.executor, ModelExecutor)
    assert model.policy.executor.steps == model.policy.visual.steps == 2
    assert model.policy.calibration == "alignment"
    actions = []
    for _ in range(2):
        env = StubEnv(step_lim=20)
        model.episode = -1  # the same seed again
        reset_model(model)
        while env.take_action_cnt < env.step_lim:
            eval(env, model, env.get_obs())
        actions.append(np.stack(env.actions))
    assert np.array_equal(*actions)
    assert np.isfinite(actions[0]).all()
    assert len(log.read_text().splitlines()) == 2


def test_parts_that_do_not_belong_together_are_refused(exports, tmp_path):
    other = replace(rmbench_contract(), fps=30.0)
    visual = plan_exports.export_world_model(tmp_path / "other", other)
    with pytest.raises(MemerError, match=r"executor and visual: fps: 16\.7 against 30\.0"):
        get_model({**exports, "visual": str(visual)})
    with pytest.raises(MemerError, match="trained with visual_plan 'memory'"):
        get_model({**exports, "visual": None})
