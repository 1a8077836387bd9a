"""What trainings of the planner leave behind: checkpoints and their resume, adapters, killed runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from memer.errors import MemerError, SourceUnavailableError, UsageError
from models.lit.planner import PlannerModule
from models.lora import LoraSettings
from tests.models.lit.planner_runs import fit, make_module, many_samples, state
from tests.models.reference import pixel_inputs
from tests.models.samples import mixed_samples, tiny_base, tiny_contract

# Checkpoints


def checkpoint_at(folder: Path, step: int) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step, save_top_k=-1)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, dropout=0.3)])
def test_resume_gives_the_uninterrupted_weights_bit_for_bit(
    base: Path, tmp_path: Path, lora: LoraSettings | None, accumulate: int
) -> None:
    samples = many_samples()
    common: dict[str, Any] = {"accumulate_grad_batches": accumulate, "batch_size": 3}
    whole = make_module(base, lora=lora)
    fit(whole, samples, max_steps=5, **common)

    torch.manual_seed(1)
    first = make_module(base, lora=lora)
    saving = {"enable_checkpointing": True, "callbacks": [checkpoint_at(tmp_path, 3)]}
    fit(first, samples, max_steps=3, **common, **saving)
    torch.manual_seed(2)
    second = make_module(base, lora=lora)
    fit(second, samples, max_steps=5, ckpt_path=tmp_path / "step=3.ckpt", **common)
    for name, tensor in state(whole).items():
        assert torch.equal(state(second)[name], tensor), name
    assert any(not torch.equal(state(first)[name], tensor) for name, tensor in state(whole).items())


def test_checkpoint_holds_trainable_tensors_and_plain_values(base: Path, tmp_path: Path) -> None:
    module = make_module(base)
    running = fit(module, many_samples(), max_steps=1)
    running.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == set(module.trainable())
    assert not any(".visual." in name or "lm_head" in name for name in saved["state_dict"])
    json.dumps(saved["hyper_parameters"])
    again = PlannerModule.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu", weights_only=True)
    for name, tensor in state(module).items():
        assert torch.equal(state(again)[name], tensor), name
    assert again.contract == module.contract
    assert again.contract.model_family == "qwen3_vl"


@pytest.mark.parametrize("prefix", ["net.", "_orig_mod."])
def test_weights_under_other_names_are_refused_with_counts(base: Path, tmp_path: Path, prefix: str) -> None:
    module = make_module(base)
    fit(module, many_samples(), max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    count = len(saved["state_dict"])
    saved["state_dict"] = {prefix + name: tensor for name, tensor in saved["state_dict"].items()}
    torch.save(saved, tmp_path / "other.ckpt")
    with pytest.raises(MemerError, match=f"0 of {count} trainable tensors match"):
        fit(make_module(base), many_samples(), ckpt_path=tmp_path / "other.ckpt")


def test_one_missing_trainable_tensor_is_refused(base: Path, tmp_path: Path) -> None:
    module = make_module(base)
    fit(module, many_samples(), max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    gone = "model.model.language_model.norm.weight"
    del saved["state_dict"][gone]
    torch.save(saved, tmp_path / "other.ckpt")
    with pytest.raises(MemerError, match=f"first missing {gone}"):
        fit(make_module(base), many_samples(), ckpt_path=tmp_path / "other.ckpt")


def test_resume_from_another_base_or_contract_or_without_base_is_refused(base: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "own"))
    fit(make_module(own), many_samples(), max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(MemerError, match=r"min_pixels: 1024 against 2048"):
        fit(
            make_module(own, contract=tiny_contract(min_pixels=2_048)),
            many_samples(),
            ckpt_path=tmp_path / "last.ckpt",
        )
    tiny_base(own, seed=5)
    with pytest.raises(MemerError, match="whose weights are not those of"):
        fit(make_module(own), many_samples(), ckpt_path=tmp_path / "last.ckpt")
    shutil.rmtree(own)
    with pytest.raises(SourceUnavailableError, match="own: no such folder"):
        PlannerModule.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu", weights_only=True)


# LoRA


def test_lora_trains_the_language_model_only_and_says_so_in_its_keys(base: Path, tmp_path: Path) -> None:
    module = make_module(base, lora=LoraSettings(rank=2, alpha=8))
    before = state(module)
    fit(module, many_samples(), max_steps=3)
    after = state(module)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("lora_" in name and ".language_model." in name for name in changed)
    assert changed == set(module.trainable())
    module.save_tuned(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 8)
    assert str(base) not in json.dumps(config)


def test_saved_adapter_merges_to_the_trained_model(base: Path, tmp_path: Path) -> None:
    module = make_module(base, lora=LoraSettings(rank=2, alpha=8))
    fit(module, many_samples(), max_steps=3)
    module.save_tuned(tmp_path)
    plain = AutoModelForImageTextToText.from_pretrained(base).eval()
    encoder = module.make_encoder()
    made = mixed_samples()[0]
    inputs = pixel_inputs(encoder, made.question, encoder.encode_sample(made))
    with torch.no_grad():
        untouched = plain(**inputs).logits
        trained = module.model.eval()(**inputs).logits
        merged = PeftModel.from_pretrained(plain, tmp_path).merge_and_unload()(**inputs).logits
    torch.testing.assert_close(merged, trained, atol=2e-5, rtol=0)
    assert (untouched - trained).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (r".*\.qkv", "outside the language model"),
        (r"language_model\.q_proj", "matches no linear layer"),
        ("(", "no regular expression"),
    ],
)
def test_lora_targets_must_lie_in_the_language_model(base: Path, targets: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_module(base, lora=LoraSettings(targets=targets))


# Processes


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_weights(base: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"

    def run(out: Path, *extra: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.models.lit.run", str(base), str(out), *extra]
        return subprocess.run(command, capture_output=True, text=True, timeout=240)

    assert run(whole).returncode == 0, run(whole).stderr
    killed = run(cut, "--checkpoints", str(tmp_path), "--kill-at", "5")
    assert killed.returncode == -9
    assert not cut.exists()
    resumed = run(cut, "--checkpoints", str(tmp_path))
    assert resumed.returncode == 0, resumed.stderr
    one, other = (torch.load(path, weights_only=True) for path in (whole, cut))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["0", "2"])
def test_two_processes_equal_one_and_leave_frozen_weights_alone(
    base: Path, tmp_path: Path, lora: str
) -> None:
    """Unequal token counts per rank: an average of averages would give other weights."""
    outs = {}
    for devices, batch in ((1, "4"), (2, "2")):
        out = tmp_path / f"{devices}.pt"
        command = [sys.executable, "-m", "tests.models.lit.run", str(base), str(out)]
        command += ["--devices", str(devices), "--batch", batch, "--steps", "2", "--lora", lora]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        outs[devices] = torch.load(out, weights_only=True)
    untouched = state(make_module(base))
    for name, tensor in outs[1].items():
        torch.testing.assert_close(outs[2][name], tensor, atol=2e-5, rtol=0)
        base_name = name.replace(".base_layer", "")
        if ".visual." in name or (lora != "0" and base_name in untouched):
            assert torch.equal(outs[2][name], untouched[base_name])
