"""Objects from plain nodes: what is built, what is refused, what reaches a library."""

from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from conf.compose import plain_config
from conf.instantiate import check_targets, instantiate, targets
from memer.contract import CameraLayout, Contract, WindowSettings
from memer.errors import UsageError

CAMERAS = {"_target_": "memer.contract.CameraLayout", "camera_keys": ["base", "wrist"], "view_width": 64}


def test_nested_nodes_become_objects() -> None:
    contract = instantiate(
        {
            "_target_": "memer.contract.Contract",
            "cameras": CAMERAS,
            "windows": {"_target_": "memer.contract.WindowSettings"},
        },
        fps=15.0,
    )
    assert isinstance(contract, Contract)
    assert contract.cameras.camera_keys == ("base", "wrist")
    assert contract.windows == WindowSettings()


def test_plain_values_stay_and_lists_are_walked() -> None:
    built = instantiate({"a": [1, {"_target_": "torch.nn.Identity"}], "b": None, "c": {"d": "x"}})
    assert built["a"][0] == 1
    assert isinstance(built["a"][1], torch.nn.Identity)
    assert (built["b"], built["c"]) == (None, {"d": "x"})


def test_partial_and_positional_and_unwalked_nodes() -> None:
    made = instantiate({"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.5})
    assert isinstance(made, partial)
    weights = torch.nn.Parameter(torch.zeros(2))
    assert made([weights]).param_groups[0]["lr"] == 0.5
    assert instantiate({"_target_": "torch.zeros", "_args_": [2, 3]}).shape == (2, 3)
    kept = instantiate({"_target_": "torch.nn.ParameterDict", "_recursive_": False, "parameters": {}})
    assert len(kept) == 0


def test_a_classmethod_is_a_target(tmp_path: Any) -> None:
    contract = Contract(fps=3, cameras=CameraLayout(camera_keys=("a",)))
    contract.save(tmp_path)
    assert instantiate({"_target_": "memer.contract.Contract.load", "folder": str(tmp_path)}) == contract


@pytest.mark.parametrize(
    ("node", "parts"),
    [
        ({"_target_": "os.system", "command": "true"}, ["os.system", "not allowed"]),
        ({"_target_": "memerx.contract.Contract"}, ["not allowed"]),
        ({"_target_": 3}, ["not allowed"]),
        ({"_target_": "memer.contract.Contrakt"}, ["Contrakt", "'Contract'"]),
        ({"_target_": "memer.nowhere.Thing"}, ["nowhere"]),
        ({"_target_": "memer.contract.CONTRACT_VERSION"}, ["cannot be called"]),
        ({"_target_": "memer.contract.WindowSettings", "frame_subsamples": 2}, ["'frame_subsample'"]),
        (
            {"_target_": "memer.contract.WindowSettings", "frame_subsample": 0},
            ["frame_subsample", "0", ">= 1"],
        ),
        ({"_target_": "memer.contract.CameraLayout"}, ["camera_keys"]),
    ],
)
def test_what_cannot_be_built_is_named(node: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        instantiate(node, where="view.part")
    assert str(caught.value).startswith("view.part: ")
    for part in parts:
        assert part in str(caught.value)


def test_errors_inside_a_class_stay_bugs() -> None:
    with pytest.raises(TypeError):
        instantiate({"_target_": "torch.nn.Linear", "in_features": "two", "out_features": 3})


def test_a_config_is_checked_before_anything_is_built() -> None:
    config = {"fine": {"_target_": "torch.nn.Identity"}, "list": [{"deep": {"_target_": "shutil.rmtree"}}]}
    assert [place for place, _ in targets(config)] == ["config.fine", "config.list[0].deep"]
    with pytest.raises(UsageError, match=r"config\.list\[0\]\.deep.*shutil\.rmtree"):
        check_targets(config)


def test_no_object_of_the_config_library_gets_through() -> None:
    config = OmegaConf.create({"size": [64, 32], "deep": {"list": [{"a": 1}], "same": "${size}"}})
    plain = plain_config(config)

    def walk(value: Any) -> None:
        assert not isinstance(value, DictConfig | ListConfig)
        for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(child)

    walk(plain)
    assert plain["deep"]["same"] == [64, 32]
    built = instantiate({**CAMERAS})
    assert type(built.camera_keys) is tuple
