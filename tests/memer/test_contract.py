import json
from pathlib import Path

import pytest

from memer.contract import CameraLayout, Contract, PromptSettings, WindowSettings
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.plan_settings import CanvasLayout, CanvasRegion, CodecSettings, PlanSettings


def make_contract(**changes: object) -> Contract:
    return Contract(fps=15.0, cameras=CameraLayout(camera_keys=("base", "wrist")), **changes)  # type: ignore[arg-type]


def test_a_contract_survives_its_file(tmp_path: Path) -> None:
    contract = make_contract(statistics={"state": {"mean": (1.5, 2.0)}}, rules_hash="ab")
    contract.save(tmp_path)
    assert Contract.load(tmp_path) == contract
    assert list(tmp_path.iterdir()) == [tmp_path / "contract.json"]


def test_differences_are_named_with_both_values() -> None:
    other = make_contract(windows=WindowSettings(frame_subsample=3))
    with pytest.raises(MemerError, match=r"shards against model: windows.frame_subsample: 5 against 3"):
        make_contract().check_same(other, what="shards against model")
    make_contract().check_same(other, what="shards against model", allow=["windows"])


def test_updates_merge_and_none_keeps() -> None:
    updated = make_contract().updated({"windows": {"keyframes_length": 2}, "prompt": {"system_text": None}})
    assert updated.windows == WindowSettings(keyframes_length=2)
    assert updated.prompt == make_contract().prompt


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": {"frame_subsample": 0}}, r"WindowSettings.frame_subsample: 0, must be an integer >= 1"),
        ({"windows": {"frame_subsample": True}}, r"WindowSettings.frame_subsample: True"),
        ({"memory_form": "tape"}, r"Contract.memory_form: 'tape'"),
        ({"min_pixels": 200_000}, r"Contract.min_pixels"),
    ],
)
def test_bad_values_name_class_field_and_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_contract().updated(changes)


def test_unknown_fields_versions_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MemerError, match="unknown field 'window'"):
        make_contract().updated({"window": {}})
    with pytest.raises(MemerError, match="version 99"):
        Contract.from_dict({**make_contract().to_dict(), "version": 99})
    with pytest.raises(SourceUnavailableError, match=r"contract.json"):
        Contract.load(tmp_path)
    (tmp_path / "contract.json").write_text("{")
    with pytest.raises(MemerError, match="not JSON"):
        Contract.load(tmp_path)


@pytest.mark.parametrize(
    ("form", "recent", "memory"),
    [("none", 1, 0), ("short", 8, 0), ("long", 32, 0), ("text", 8, 0), ("image", 8, 8), ("image_text", 8, 8)],
)
def test_memory_forms_choose_what_is_shown(form: str, recent: int, memory: int) -> None:
    shown = make_contract(memory_form=form).shown_windows
    assert (shown.recent_frames_length, shown.keyframes_length) == (recent, memory)


def test_no_memory_length_means_none_in_every_form() -> None:
    contract = make_contract(windows=WindowSettings(keyframes_length=0))
    assert contract.shown_windows.keyframes_length == 0


def make_plan(**changes: object) -> PlanSettings:
    region = CanvasRegion(camera="base", y=0, x=0, height=32, width=32)
    canvas = CanvasLayout(height=32, width=32, regions=(region,))
    return PlanSettings(canvas=canvas, **changes)  # type: ignore[arg-type]


def test_a_contract_with_a_plan_survives_its_file(tmp_path: Path) -> None:
    contract = make_contract(plan=make_plan(action_horizon=32), prompt=PromptSettings(form="segments"))
    contract.save(tmp_path)
    assert Contract.load(tmp_path) == contract


def test_a_contract_from_before_plans_still_loads() -> None:
    values = make_contract().to_dict()
    del values["plan"], values["prompt"]["form"]
    assert Contract.from_dict(values) == make_contract()


def test_plan_settings_merge_at_any_depth_and_differ_by_name() -> None:
    contract = make_contract(plan=make_plan())
    changed = contract.updated({"plan": {"codec": {"spatial_ratio": 2, "channels": 48, "kind": None}}})
    assert changed.plan is not None
    assert changed.plan.codec == CodecSettings(spatial_ratio=2, channels=48)
    assert changed.plan.canvas == make_plan().canvas
    assert set(contract.differences(changed)) == {"plan.codec.spatial_ratio", "plan.codec.channels"}
    with pytest.raises(MemerError, match="plan: codec: unknown field 'ratio'"):
        contract.updated({"plan": {"codec": {"ratio": 2}}})


def test_a_plan_can_be_given_to_a_contract_without_one() -> None:
    values = make_contract(plan=make_plan()).to_dict()["plan"]
    assert make_contract().updated({"plan": values}).plan == make_plan()
    with pytest.raises(MemerError, match="canvas"):
        make_contract().updated({"plan": {"plan_frames": 8}})


def test_the_plans_cameras_must_be_the_contracts() -> None:
    region = CanvasRegion(camera="head", y=0, x=0, height=32, width=32)
    plan = PlanSettings(canvas=CanvasLayout(height=32, width=32, regions=(region,)))
    with pytest.raises(UsageError, match=r"plan.canvas: no camera 'head'; cameras.camera_keys: base, wrist"):
        make_contract(plan=plan)
    with pytest.raises(UsageError, match=r"plan.head_camera: no camera 'top'"):
        make_contract(plan=make_plan(head_camera="top"))


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        (None, r"contract.json: Contract.statistics: None, must be a group of features"),
        ({"action": 3}, r"statistics.action.entries: 3, must be a list of numbers"),
        ({"action": {"mean": ["a"]}}, r"statistics.action.mean: \['a'\], must be a list of numbers"),
    ],
)
def test_damaged_statistics_are_named_with_the_file(tmp_path: Path, statistics, message: str) -> None:
    values = {**make_contract().to_dict(), "statistics": statistics}
    (tmp_path / "contract.json").write_text(json.dumps(values))
    with pytest.raises(MemerError, match=message):
        Contract.load(tmp_path)


def test_a_contract_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "contract.json").write_text("[]")
    with pytest.raises(MemerError, match=r"contract.json: expected a JSON object, found list"):
        Contract.load(tmp_path)
