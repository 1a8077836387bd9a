import json
import shutil
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText

from callbacks.export import ExportCallback
from callbacks.merge import MergeCallback
from callbacks.reload import check_reload, load_processors, memory_logits, probe_inputs, reloaded_logits
from callbacks.tuned import TunedModel
from memer.artifact import Provenance, load_policy, verify_artifact
from memer.contract import Contract
from memer.errors import MemerError, SourceUnavailableError, UsageError
from memer.merge import merge_weights
from memer.weights import WeightFiles
from models.lit.planner import PlannerModule
from models.lora import LoraSettings
from models.optim import OptimSettings
from tests.models.samples import INSTRUCTION, frame, mixed_samples, tiny_base, tiny_contract

ROOT = Path(__file__).parents[2]
#: Not the bounds of the base, so that the export has to write them.
BOUNDS = {"min_pixels": 2_048, "max_pixels": 8_192}
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja")
EMBEDDING = "model.language_model.embed_tokens.weight"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_base(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "vocab.txt").write_bytes(b"kept as it is\r\n")
    return folder


def make_module(base: Path, *, lora: LoraSettings | None = None, lr: float = 1e-2) -> PlannerModule:
    torch.manual_seed(0)
    optim = OptimSettings(learning_rate=lr, total_steps=3, warmup_ratio=0.0)
    return PlannerModule(str(base), contract=tiny_contract(**BOUNDS), optim=optim, lora=lora)


def fit(module: PlannerModule, run_dir: Path, *callbacks: pl.Callback, steps: int = 2) -> pl.Trainer:
    loader = DataLoader(mixed_samples() * steps, batch_size=4, collate_fn=module.make_collator())
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run_dir,
        callbacks=list(callbacks),
    )
    trainer.fit(module, loader)
    return trainer


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        found |= load_file(str(path))
    return found


@pytest.fixture(scope="session")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlannerModule]:
    """A finished full fine-tuning with two alphas."""
    run_dir = tmp_path_factory.mktemp("run")
    module = make_module(base)
    fit(module, run_dir, ExportCallback(), MergeCallback([0.8, 0.5]))  # the export asks for the merge
    return run_dir, module


@pytest.fixture(scope="session")
def lora_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlannerModule]:
    run_dir = tmp_path_factory.mktemp("lora")
    module = make_module(base, lora=LoraSettings(rank=4, alpha=8))
    fit(module, run_dir, MergeCallback([0.5, 1.0]), ExportCallback())
    return run_dir, module


def test_a_run_leaves_tuned_merged_and_exported_artifacts(run: tuple[Path, PlannerModule]) -> None:
    run_dir, _ = run
    for name, alpha in {
        "tuned": 1,
        "merged/alpha_0.80": 0.8,
        "merged/alpha_0.50": 0.5,
        "export": 0.8,
    }.items():
        provenance = verify_artifact(run_dir / name)
        assert (provenance.alpha, provenance.step) == (alpha, 2)
    table = json.loads((run_dir / "merged" / "table.json").read_text())
    assert table["best"] == 0.8
    assert [row["folder"] for row in table["rows"]] == ["alpha_0.80", "alpha_0.50"]
    left = {path.name for path in run_dir.iterdir()} | {path.name for path in (run_dir / "merged").iterdir()}
    assert left == {"tuned", "merged", "export", "alpha_0.80", "alpha_0.50", "table.json"}


def test_tuned_joins_frozen_bytes_with_trained_weights(base: Path, run: tuple[Path, PlannerModule]) -> None:
    run_dir, module = run
    old, new = weights(base), weights(run_dir / "tuned")
    assert new.keys() == old.keys()
    trained = {name.removeprefix("model."): tensor for name, tensor in module.trainable().items()}
    assert 0 < len(trained) < len(old)
    for name, tensor in new.items():
        if name in trained:
            assert torch.equal(tensor, trained[name].detach().cpu().to(old[name].dtype)), name
        else:
            assert torch.equal(tensor, old[name]), name
    visual = [name for name in old if name.startswith("model.visual.")]
    assert visual
    assert not trained.keys() & set(visual)
    assert any(not torch.equal(new[name], old[name]) for name in trained)


def test_export_is_the_interpolation_with_the_base(base: Path, run: tuple[Path, PlannerModule]) -> None:
    run_dir, _ = run
    old, new, merged = weights(base), weights(run_dir / "tuned"), weights(run_dir / "export")
    for name in old:
        torch.testing.assert_close(merged[name], 0.2 * old[name] + 0.8 * new[name], rtol=1e-6, atol=1e-8)
    assert not torch.equal(merged[EMBEDDING], new[EMBEDDING])


def test_merging_again_gives_the_same_bytes(
    base: Path, run: tuple[Path, PlannerModule], tmp_path: Path
) -> None:
    run_dir, _ = run
    merge_weights(base, run_dir / "tuned", tmp_path / "again", alpha=0.8)
    ours = (run_dir / "merged" / "alpha_0.80" / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == ours
    assert verify_artifact(tmp_path / "again").planner == "models.planner:QwenVLPlanner"


def test_other_files_are_the_bases_but_for_pixel_bounds(base: Path, run: tuple[Path, PlannerModule]) -> None:
    export = run[0] / "export"
    ours = {"contract.json", "provenance.json", "merge_info.json"}
    names = {path.name for path in base.iterdir()}
    assert {path.name for path in export.iterdir()} == names | ours
    for name in names - {"model.safetensors", "preprocessor_config.json"}:
        assert (export / name).read_bytes() == (base / name).read_bytes(), name
    before = json.loads((base / "preprocessor_config.json").read_text())
    after = json.loads((export / "preprocessor_config.json").read_text())
    assert after.pop("size") == {"shortest_edge": 2_048, "longest_edge": 8_192} != before.pop("size")
    assert after == before


def test_export_reloads_to_the_logits_of_the_model_in_memory(run: tuple[Path, PlannerModule]) -> None:
    run_dir, module = run
    inputs = probe_inputs(run_dir / "export", module.contract)
    found = reloaded_logits(run_dir / "export", inputs)
    expected = memory_logits(module.model, run_dir / "export", inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    tuned = memory_logits(module.model, run_dir / "tuned", inputs)
    assert (found - tuned).abs().max() > 1e-3 * found.abs().max()  # the check would see another alpha


def test_the_reload_check_refuses_other_weights(
    base: Path, run: tuple[Path, PlannerModule], tmp_path: Path
) -> None:
    run_dir, module = run
    tuned = TunedModel(module, step=2)
    assert check_reload(run_dir / "export", tuned) < 1e-4
    folder = tmp_path / "broken"
    shutil.copytree(run_dir / "export", folder)
    changed = weights(folder)
    frozen = next(name for name in changed if name.startswith("model.visual.") and changed[name].ndim > 1)
    changed[frozen] = changed[frozen] * 2  # the model in memory keeps its own
    save_file(changed, str(folder / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(MemerError, match="logits differ"):
        check_reload(folder, tuned)
    del changed[frozen]
    save_file(changed, str(folder / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(MemerError, match="1 keys of the base are missing"):
        check_reload(folder, tuned)


FRESH = """
import sys
sys.modules["omegaconf"] = None  # any import of it fails
sys.modules["hydra"] = None
import json, torch
from pathlib import Path
from callbacks.reload import probe_inputs, reloaded_logits
from memer.contract import Contract
folder = Path(sys.argv[1])
inputs = probe_inputs(folder, Contract.load(folder))
print(json.dumps({"ids": inputs["input_ids"].tolist(), "grid": inputs["image_grid_thw"].tolist(),
                  "logits": reloaded_logits(folder, inputs)[0, -1].tolist()}))
"""


def test_export_loads_in_a_fresh_process_without_config_libraries(run: tuple[Path, PlannerModule]) -> None:
    run_dir, module = run
    output = subprocess.run(
        [sys.executable, "-c", FRESH, str(run_dir / "export")],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    fresh = json.loads(output.splitlines()[-1])
    inputs = probe_inputs(run_dir / "export", module.contract)
    assert fresh["ids"] == inputs["input_ids"].tolist()
    assert fresh["grid"] == inputs["image_grid_thw"].tolist()
    expected = memory_logits(module.model, run_dir / "export", inputs)[0, -1]
    torch.testing.assert_close(torch.tensor(fresh["logits"]), expected, rtol=1e-4, atol=1e-4)


def test_grid_and_ids_are_those_of_training(run: tuple[Path, PlannerModule]) -> None:
    run_dir, module = run
    encoder = module.make_encoder()
    tokenizer, image_processor = load_processors(run_dir / "export")
    text = "Task: look"
    assert tokenizer(text)["input_ids"] == encoder.tokenizer(text)["input_ids"]
    picture = frame(("made", 0, 0))
    grid = image_processor(images=[picture], return_tensors="pt")["image_grid_thw"][0].tolist()
    rows, columns = grid[1], grid[2]
    assert rows * columns * 256 <= 8_192
    assert (rows, columns) == (8, 4)


def test_export_becomes_a_policy(run: tuple[Path, PlannerModule]) -> None:
    run_dir, module = run
    policy = load_policy(run_dir / "export")
    assert policy.contract == Contract.load(run_dir / "export") == module.contract
    record = policy.step(
        {name: np.zeros((64, 64, 3), np.uint8) for name in ("base", "wrist")}, instruction=INSTRUCTION
    )
    assert record.timestep == 0


def test_deleting_a_processor_file_is_named(run: tuple[Path, PlannerModule], tmp_path: Path) -> None:
    for name in (
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "tokenizer.json",
        "model.safetensors",
    ):
        folder = tmp_path / name
        shutil.copytree(run[0] / "export", folder)
        (folder / name).unlink()
        with pytest.raises(MemerError, match=name):
            load_policy(folder)


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja"]
)
def test_an_incomplete_base_is_refused_before_training(base: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "incomplete"
    shutil.copytree(base, folder)
    (folder / name).unlink()
    module = make_module(folder)
    trainer = pl.Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")
    for callback in (MergeCallback(), ExportCallback()):
        with pytest.raises(MemerError, match=name):
            callback.setup(trainer, module, "fit")


def test_a_base_that_went_away_is_named(base: Path, run: tuple[Path, PlannerModule], tmp_path: Path) -> None:
    module = make_module(base)
    module.base = str(tmp_path / "gone")
    with pytest.raises(SourceUnavailableError, match="gone"):
        TunedModel(module, step=0)


def test_lora_is_kept_as_adapter_and_merged_exactly(base: Path, lora_run: tuple[Path, PlannerModule]) -> None:
    run_dir, module = lora_run
    old = weights(base)
    adapter = load_file(str(run_dir / "adapter" / "adapter_model.safetensors"))
    config = json.loads((run_dir / "adapter" / "adapter_config.json").read_text())
    assert str(base) not in json.dumps(config)
    assert Contract.load(run_dir / "adapter") == module.contract
    changed = set()
    for alpha in (0.5, 1.0):
        merged = weights(run_dir / "merged" / f"alpha_{alpha:.2f}")
        assert merged.keys() == old.keys()
        for name, tensor in merged.items():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" not in adapter:
                assert torch.equal(tensor, old[name]), name
                continue
            up, down = adapter[f"{stem}.lora_B.weight"].double(), adapter[f"{stem}.lora_A.weight"].double()
            expected = old[name].double() + alpha * (8 / 4) * (up @ down)
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-8)
            if not torch.equal(tensor, old[name]):
                changed.add(name)
    assert len(changed) == len(adapter) // 2


def test_merged_adapter_gives_the_adapters_own_output(lora_run: tuple[Path, PlannerModule]) -> None:
    run_dir, module = lora_run
    whole = run_dir / "merged" / "alpha_1.00"
    inputs = probe_inputs(whole, module.contract)
    module.model.eval()
    with torch.no_grad():
        adapted = module.model(**inputs, use_cache=False).logits.float()
    merged = reloaded_logits(whole, inputs)
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    plain = AutoModelForImageTextToText.from_pretrained(module.base, dtype=torch.float32).eval()
    with torch.no_grad():
        assert (plain(**inputs, use_cache=False).logits - merged).abs().max() > 1e-3


def test_scaling_the_adapter_equals_interpolating_its_merge(
    base: Path, lora_run: tuple[Path, PlannerModule], tmp_path: Path
) -> None:
    run_dir, _ = lora_run
    merge_weights(base, run_dir / "merged" / "alpha_1.00", tmp_path / "out", alpha=0.5)
    scaled, interpolated = weights(run_dir / "merged" / "alpha_0.50"), weights(tmp_path / "out")
    torch.testing.assert_close(scaled, interpolated, rtol=1e-5, atol=1e-7)


def test_base_in_bfloat16_is_exported_in_bfloat16(base: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(base, half)
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights(base).items()},
        str(half / "model.safetensors"),
        metadata={"format": "pt"},
    )
    module = make_module(half)
    fit(module, tmp_path / "run", ExportCallback(), steps=1)
    exported, old = weights(tmp_path / "run" / "export"), weights(half)
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    trained = {name.removeprefix("model."): tensor for name, tensor in module.trainable().items()}
    for name, tensor in exported.items():
        expected = trained[name].detach().bfloat16() if name in trained else old[name]
        assert torch.equal(tensor, expected), name


def test_exports_in_mid_training_load_by_themselves(base: Path, tmp_path: Path) -> None:
    module = make_module(base)
    fit(module, tmp_path, ExportCallback(every_n_steps=1, keep_last=2), steps=3)
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == [
        "step_00000002",
        "step_00000003",
    ]
    for step in (2, 3):
        folder = tmp_path / "exports" / f"step_{step:08d}"
        assert verify_artifact(folder).step == step
        assert load_policy(folder).contract == module.contract
    last, final = weights(tmp_path / "exports" / "step_00000003"), weights(tmp_path / "export")
    assert all(torch.equal(last[name], final[name]) for name in final)
    before = weights(tmp_path / "exports" / "step_00000002")
    assert any(not torch.equal(before[name], final[name]) for name in final)


def test_the_best_score_is_exported(base: Path, tmp_path: Path) -> None:
    seen: list[Path] = []

    def score(folder: Path) -> dict[str, float]:
        seen.append(folder)
        assert load_policy(folder) is not None
        return {"success": {0.25: 0.4, 0.5: float("nan"), 0.75: 0.9}[Provenance.load(folder).alpha]}

    fit(
        make_module(base),
        tmp_path,
        MergeCallback([0.25, 0.5, 0.75], scorer=score, keep="best"),
        ExportCallback(),
        steps=1,
    )
    assert len(seen) == 3
    assert Provenance.load(tmp_path / "export").alpha == 0.75
    table = json.loads((tmp_path / "merged" / "table.json").read_text())
    assert (table["best"], table["metric"]) == (0.75, "success")
    assert [row["success"] for row in table["rows"]] == [0.4, None, 0.9]
    assert [path.name for path in sorted((tmp_path / "merged").glob("alpha_*"))] == ["alpha_0.75"]


def test_a_score_that_is_not_there_is_named(base: Path, tmp_path: Path) -> None:
    callback = MergeCallback([0.5], scorer=lambda folder: {"accuracy": 1.0})
    with pytest.raises(MemerError, match=r"'success'.*accuracy"):
        fit(make_module(base), tmp_path, callback, steps=1)


def test_an_interrupted_export_leaves_the_old_one_whole(base: Path, tmp_path: Path) -> None:
    module = make_module(base)
    fit(module, tmp_path, ExportCallback(), steps=1)
    before = weights(tmp_path / "export")

    def stop(folder: Path) -> None:
        raise KeyboardInterrupt

    tuned = TunedModel(module, step=9)
    with pytest.raises(KeyboardInterrupt):
        tuned.export(tmp_path / "export", check=stop)
    assert verify_artifact(tmp_path / "export").step == 1
    assert weights(tmp_path / "export").keys() == before.keys()
    assert {path.name for path in tmp_path.iterdir()} == {"export"}


def test_weights_that_are_not_finite_are_not_exported(base: Path, tmp_path: Path) -> None:
    module = make_module(base)
    module.configure_model()
    with torch.no_grad():
        next(iter(module.trainable().values())).view(-1)[0] = float("nan")
    with pytest.raises(MemerError, match="not finite"):
        TunedModel(module, step=3).export(tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_trained_names_without_a_place_in_the_base_are_counted(base: Path, tmp_path: Path) -> None:
    module = make_module(base)
    module.configure_model()
    real = module.trainable()
    module.trainable = lambda: {f"net.{name}": tensor for name, tensor in real.items()}  # type: ignore[method-assign]
    with pytest.raises(MemerError, match=rf"0 of {len(real)} trained tensors.*net\."):
        TunedModel(module, step=1).export(tmp_path / "export")
    module.trainable = lambda: {  # type: ignore[method-assign]
        name.replace("model.", "model._orig_mod.", 1): tensor for name, tensor in real.items()
    }
    TunedModel(module, step=1).export(tmp_path / "export")
    assert WeightFiles.open(tmp_path / "export").entries.keys() == WeightFiles.open(base).entries.keys()


def test_settings_that_make_no_sense_are_refused() -> None:
    for alphas in ([], [1.2], [0.5, 0.5]):
        with pytest.raises(UsageError, match="alphas"):
            MergeCallback(alphas)
    with pytest.raises(UsageError, match="mode"):
        MergeCallback(mode="best")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="every_n_steps"):
        ExportCallback(every_n_steps=-1)
