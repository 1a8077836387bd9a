"""What trainings of world model and executor hand on: exports, initial weights of the next, merges."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from lightning.pytorch.callbacks import Callback

from callbacks.export import ExportCallback
from callbacks.merge import MergeCallback
from callbacks.summary import RunSummary
from callbacks.whole import WholeModel
from memer.artifact import verify_artifact
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.folders import file_hash
from models.cwm_files import load_world_model
from models.lit.flow import FlowModule
from models.wap_files import load_executor
from models.wap_weights import stock_video_state
from tests.models.lit.flow_kinds import KINDS, Make, state
from tests.models.plan_samples import (
    chunks,
    executor_module,
    fit,
    memories,
    world_module,
)

# Exports


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[FlowModule[Any], Path]]:
    """One finished run of each kind."""
    found = {}
    for name, (make, samples) in KINDS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        module = make()
        callbacks: list[Callback] = [ExportCallback(run_dir=folder, every_n_steps=1, keep_last=1)]
        fit(module, samples(), steps=2, callbacks=[*callbacks, RunSummary(run_dir=folder)])
        found[name] = (module, folder)
    return found


def test_an_exported_world_model_is_the_trained_one(exported: dict[str, Any]) -> None:
    module, folder = exported["world model"]
    provenance = verify_artifact(folder / "export")
    assert (provenance.step, provenance.alpha, provenance.base_name) == (2, 1.0, "")
    assert provenance.planner == "models.map_planners:ModelVisualPlanner"
    loaded, found = load_world_model(folder / "export")
    assert found == module.contract
    assert not loaded.training
    batch = module.make_collator()(memories(2))
    ours, theirs = (
        model.loss(
            *(lambda z, g, p: (z, batch.num_segments, g, p))(*module.inputs(batch)),
            generator=module.generator(0, 0),
        )[0]
        for model in (module.model, loaded)
    )
    assert torch.equal(ours, theirs)
    stock = WanTransformer3DModel.from_pretrained(folder / "export" / "transformer")
    trained = module.model.transformer.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in stock.state_dict().items())
    assert [p.name for p in sorted((folder / "exports").iterdir())] == ["step_00000002"]


def test_an_exported_executor_is_the_trained_one(exported: dict[str, Any]) -> None:
    module, folder = exported["executor"]
    assert verify_artifact(folder / "export").planner == "models.map_planners:ModelExecutor"
    loaded, found = load_executor(folder / "export")
    assert found == module.contract
    inputs = module.inputs(module.make_collator()(chunks(2)))
    ours, theirs = (
        model.loss(inputs, generator=module.generator(0, 0))[0] for model in (module.model, loaded)
    )
    assert torch.equal(ours, theirs)


def test_the_summary_has_the_figures_of_both(exported: dict[str, Any]) -> None:
    for module, folder in exported.values():
        figures = json.loads((folder / "summary.json").read_text())["metrics"]
        assert figures["steps"] == 2
        assert figures["parameters"] == sum(p.numel() for p in module.parameters())
        assert figures["train/loss"] > 0
        assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_a_changed_export_and_one_without_statistics_are_refused(
    exported: dict[str, Any], tmp_path: Path
) -> None:
    module, _ = exported["executor"]
    folder = tmp_path / "export"
    weights = module.state_dict()
    module_contract = module.contract
    try:
        module.contract = replace(module_contract, statistics={})
        WholeModel(module, step=1, weights=weights).export(folder, check=False)
    finally:
        module.contract = module_contract
    with pytest.raises(MemerError, match=r"export: contract\.statistics: 'state' is missing"):
        load_executor(folder)
    with pytest.raises(MemerError, match=r"no world_model\.json; this is no exported world model"):
        load_world_model(folder)
    (folder / "executor.json").write_text("{}")
    with pytest.raises(MemerError, match=r"executor\.json: \d+ bytes, \d+ were exported"):
        load_executor(folder)
    with pytest.raises(SourceUnavailableError, match="no such folder"):
        load_executor(tmp_path / "nowhere")


def test_weights_that_are_no_numbers_are_not_exported(exported: dict[str, Any], tmp_path: Path) -> None:
    module, _ = exported["world model"]
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    name = "model.transformer.proj_out.bias"
    weights[name][0] = float("inf")
    with pytest.raises(MemerError, match=f"{name}: not finite after step 3"):
        WholeModel(module, step=3, weights=weights).export(tmp_path / "export", check=True)
    assert not list(tmp_path.iterdir())


def test_an_export_that_holds_other_weights_is_refused(exported: dict[str, Any], tmp_path: Path) -> None:
    for name, (module, folder) in exported.items():
        others = {key: tensor + 1 for key, tensor in module.state_dict().items()}
        with pytest.raises(MemerError, match="is not what was trained"):
            module.check_saved(folder / "export", others)
        assert name


# Initial weights


def test_fine_tuning_starts_from_an_exported_world_model(exported: dict[str, Any]) -> None:
    module, folder = exported["world model"]
    tuned = world_module(base=str(folder / "export"))
    assert all(torch.equal(state(tuned)[name], tensor) for name, tensor in state(module).items())
    assert tuned.training
    assert tuned.base_name == "export"
    assert len(tuned.base_hash) == 64
    sizes = {**module.transformer, "num_layers": 3}
    with pytest.raises(UsageError, match="num_layers is 2, not 3"):
        world_module(base=str(folder / "export"), transformer=sizes).configure_model()
    with pytest.raises(SourceUnavailableError, match=r"transformer/config\.json"):
        world_module(base=str(folder)).configure_model()
    with pytest.raises(UsageError, match=r"transformer\.text_dim: fixed by contract\.plan"):
        world_module(transformer={**module.transformer, "text_dim": 3})


@pytest.mark.parametrize("init", ["interpolate", "random"])
def test_an_executor_starts_from_the_world_models_video(exported: dict[str, Any], init: str) -> None:
    world, folder = exported["world model"]
    module = executor_module(video_base=str(folder / "export"), expert_init=init)
    module.configure_model()
    trained = world.model.transformer.state_dict()
    found = stock_video_state(module.model)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in found.items())
    layer = module.model.mot.layers[0].experts
    narrow, wide = layer["action"].attn1.to_q.bias, layer["video"].attn1.to_q.bias
    assert torch.equal(narrow, wide) is (init == "interpolate")  # equal width: nothing to stretch
    with pytest.raises(UsageError, match="expert_init: 'zeros'"):
        executor_module(expert_init="zeros")


def test_the_base_is_named_by_its_content(exported: dict[str, Any]) -> None:
    _, folder = exported["world model"]
    module = executor_module(video_base=str(folder / "export"))
    assert module.base_hash == world_module(base=str(folder / "export")).base_hash
    assert module.base_hash != file_hash(folder / "export" / "world_model.json")


# Merges


@pytest.mark.parametrize("kind_name", ["world model", "executor"])
def test_a_fine_tuned_model_merges_with_what_it_began_with(
    exported: dict[str, Any], tmp_path: Path, kind_name: str
) -> None:
    base = str(exported["world model"][1] / "export")
    made: dict[str, Callable[[], FlowModule[Any]]] = {
        "world model": lambda: world_module(base=base, seed=3),
        "executor": lambda: executor_module(video_base=base, seed=3),
    }
    module, initial = made[kind_name](), state(made[kind_name]())
    merge = MergeCallback([0.25, 1.0], scorer=_prefers_quarter)
    fit(
        module,
        KINDS[kind_name][1](),
        steps=2,
        callbacks=[merge, ExportCallback(run_dir=tmp_path)],
        default_root_dir=tmp_path,
    )
    load = load_world_model if kind_name == "world model" else load_executor
    loaded, _ = load(tmp_path / "export")
    trained = module.state_dict()
    for name, tensor in loaded.state_dict().items():
        expected = torch.lerp(initial[f"model.{name}"], trained[f"model.{name}"], 0.25)
        assert torch.equal(tensor, expected), name
    assert verify_artifact(tmp_path / "export").alpha == 0.25
    assert verify_artifact(tmp_path / "merged" / "alpha_1.00").base_name == "export"
    table = json.loads((tmp_path / "merged" / "table.json").read_text())
    assert (table["best"], len(table["rows"])) == (0.25, 2)
    assert table["rows"][0]["num_changed"] > 10


def _prefers_quarter(folder: Path) -> dict[str, float]:
    return {"success": float(folder.name == "alpha_0.25")}


def test_there_is_nothing_to_merge_random_weights_with(kind: tuple[Make, list[Any]]) -> None:
    make, samples = kind
    with pytest.raises(UsageError, match=r"callbacks\.merge=null"):
        fit(make(), samples, callbacks=[MergeCallback([0.8])])
