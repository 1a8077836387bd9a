"""Training of world model and executor: exact resume, checks before a step, checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from memer.contract import Contract
from memer.errors import MemerError, UsageError
from memer.plan_settings import CodecSettings
from models.lit.flow import FlowModule, warn_unless_normalised
from models.lit.wap import ExecutorModule
from tests.models.lit.flow_kinds import Make, state
from tests.models.plan_samples import (
    SampleData,
    chunks,
    contract,
    executor_module,
    fit,
    memories,
    optim,
    world_module,
)


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")


# Training


def test_every_weight_that_the_loss_reaches_trains(kind: tuple[Make, list[Any]]) -> None:
    make, samples = kind
    module = make()
    before = state(module)
    fit(module, samples, steps=3)
    same = [n for n, t in module.state_dict().items() if torch.equal(t, before[n]) and "rope" not in n]
    assert not same
    assert not any("codec" in name or "text_encoder" in name for name in before)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_to_the_same_weights(
    kind: tuple[Make, list[Any]], tmp_path: Path, accumulate: int
) -> None:
    make, samples = kind
    whole = make()
    fit(
        whole,
        samples,
        steps=4,
        enable_checkpointing=True,
        callbacks=[saving(tmp_path)],
        accumulate_grad_batches=accumulate,
    )
    again = make()
    torch.manual_seed(77)  # nothing may depend on torch's own random numbers
    fit(again, samples, steps=4, ckpt_path=tmp_path / "step=2.ckpt", accumulate_grad_batches=accumulate)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_noise_depends_on_seed_and_number_alone(kind: tuple[Make, list[Any]]) -> None:
    make, samples = kind
    module, other = make(), make(seed=1)
    batch = module.make_collator()(samples[:2])
    module.configure_model()
    other.model = module.model

    def loss(of: FlowModule[Any], stream: int, number: int) -> float:
        return float(of.losses(batch, generator=of.generator(stream, number))[0].detach())

    torch.manual_seed(1)
    first = loss(module, 0, 5)
    torch.manual_seed(2)
    assert loss(module, 0, 5) == first
    assert len({first, loss(module, 0, 6), loss(module, 1, 5), loss(other, 0, 5)}) == 4


def test_initial_weights_depend_on_the_seed_alone(kind: tuple[Make, list[Any]]) -> None:
    make, _ = kind
    torch.manual_seed(3)
    one = state(make())
    torch.manual_seed(4)
    two, other = state(make()), state(make(seed=9))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_a_loss_that_is_no_number_names_its_samples(kind: tuple[Make, list[Any]]) -> None:
    make, samples = kind
    module = make()
    module.configure_model()
    before = state(module)
    broken = next(p for n, p in module.named_parameters() if n.endswith("proj_out.bias"))
    with torch.no_grad():
        broken.fill_(float("nan"))
    with pytest.raises(MemerError, match=rf"step 1: loss is nan; samples made/{samples[0].sample_id}, "):
        fit(module, samples)
    after = module.state_dict()
    assert all(torch.equal(after[n], t) for n, t in before.items() if after[n].isfinite().all())


def test_validation_is_the_same_each_time_and_measures_generated_results(
    kind: tuple[Make, list[Any]],
) -> None:
    make, samples = kind
    module = make(max_sampled=4)
    trainer = fit(module, samples, steps=2, limit_val_batches=2, val_check_interval=2)
    data = SampleData(module.make_collator(), samples)
    first = trainer.validate(module, data, verbose=False)[0]
    assert trainer.validate(module, data, verbose=False)[0] == first
    names = {"val/loss"} | (
        {"val/action_mse", "val/progress_mae", "val/progress_error", "val/loss_video"}
        if isinstance(module, ExecutorModule)
        else {"val/plan_psnr", "val/plan_psnr_1", "val/plan_psnr_8", "val/plan_last_error"}
    )
    assert names <= first.keys()
    assert all(np.isfinite(value) for value in first.values())


def test_generated_samples_are_spread_over_the_validation_batches() -> None:
    module = executor_module(max_sampled=5)
    assert [module.due(k, batches=10) for k in range(10)] == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert [module.due(k, batches=2) for k in range(2)] == [2, 3]


@pytest.mark.parametrize(
    "switches",
    [
        {"visual_plan": "current_only"},
        {"visual_plan": "none"},
        {"progress_mode": "classification"},
        {"progress_condition": False},
        {"target_text": "plan+global"},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_the_switches_train_and_generate(switches: dict[str, Any]) -> None:
    made = contract(**switches)
    plan_frames = 0 if switches.get("visual_plan") == "none" else 9
    module = executor_module(made)
    fit(module, chunks(plan_frames=plan_frames), steps=1, limit_val_batches=1, val_check_interval=1)
    if "visual_plan" not in switches or switches["visual_plan"] == "current_only":
        alone = [s for s in memories() if len(s.texts) == 1]
        fit(world_module(made), alone, steps=1, limit_val_batches=1, val_check_interval=1)


def test_a_precision_that_loses_updates_is_refused(kind: tuple[Make, list[Any]]) -> None:
    make, samples = kind
    with pytest.raises(UsageError, match=r"trainer\.precision: 'bf16-true'"):
        fit(make(), samples, precision="bf16-true")


@pytest.mark.parametrize("option", ["plan_noise", "condition_jitter"])
def test_an_executor_can_train_with_inexact_plans_and_progress(option: str) -> None:
    """Validation measures what is true."""
    exact, inexact = executor_module(), executor_module(settings={"video_prediction": "data", option: 0.5})
    batch = exact.make_collator()(chunks(2))
    losses = []
    for module in (exact, inexact):
        module.configure_model()
        losses.append(module.losses(batch, generator=module.generator(0, 0))[0])
        module.eval()
        losses.append(module.losses(batch, generator=module.generator(1, 0))[0])
    assert losses[0] != losses[2]
    assert losses[1] == losses[3]
    with pytest.raises(UsageError, match=f"{option}: -1"):
        executor_module(settings={option: -1})


@pytest.mark.parametrize(
    "switches",
    [{}, {"visual_plan": "none"}, {"progress_mode": "classification"}, {"progress_condition": False}],
    ids=lambda s: "-".join(map(str, s.values())) or "paper",
)
def test_no_weight_is_left_without_a_gradient(switches: dict[str, Any]) -> None:
    """DDP waits for the gradient of every weight that it knows."""
    made = contract(**switches)
    module = executor_module(made)
    module.configure_model()
    samples = chunks(2, plan_frames=0 if switches.get("visual_plan") == "none" else 9)
    batch = module.make_collator()(samples)
    module.losses(batch, generator=module.generator(0, 0))[0].backward()
    assert [name for name, p in module.named_parameters() if p.grad is None] == []


# Checkpoints


def test_checkpoints_load_without_code_and_bring_their_settings(
    kind: tuple[Make, list[Any]], tmp_path: Path
) -> None:
    make, samples = kind
    module = make()
    fit(module, samples, steps=1).save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert Contract.from_dict(saved["memer"]["contract"]) == module.contract
    json.dumps(saved["hyper_parameters"])
    again = type(module).load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu", weights_only=True)
    assert again.contract == module.contract
    assert all(torch.equal(state(again)[name], tensor) for name, tensor in state(module).items())


def test_checkpoints_of_another_contract_or_size_are_refused(
    kind: tuple[Make, list[Any]], tmp_path: Path
) -> None:
    make, samples = kind
    module = make()
    fit(module, samples, steps=1).save_checkpoint(tmp_path / "last.ckpt")
    changed = contract(action_clamp=4.0)
    with pytest.raises(MemerError, match=r"plan\.action_clamp: 5\.0 against 4\.0"):
        fit(make(changed), samples, ckpt_path=tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    name = next(name for name in module.own_settings if not name.endswith("base"))
    other = {**saved, "hyper_parameters": {**saved["hyper_parameters"], name: "other"}}
    torch.save(other, tmp_path / "other.ckpt")
    with pytest.raises(MemerError, match=rf"checkpoint: {name}: 'other' before, .* now; restore it"):
        fit(make(), samples, ckpt_path=tmp_path / "other.ckpt")
    gone = next(name for name in saved["state_dict"] if name.endswith("proj_out.bias"))
    count = len(saved["state_dict"])
    del saved["state_dict"][gone]
    torch.save(saved, tmp_path / "cut.ckpt")
    with pytest.raises(MemerError, match=rf"{count - 1} of {count} tensors match.*{gone}"):
        fit(make(), samples, ckpt_path=tmp_path / "cut.ckpt")


# The progress gate


def test_latents_far_from_the_noise_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    noise = torch.Generator().manual_seed(0)
    frames = 0.25 * torch.randn(2, 3, 5, 8, 8, generator=noise) + 0.4
    assert not warn_unless_normalised(frames, CodecSettings())
    found = re.search(r"codec\.mean=\[(\S+)\] and contract\.plan\.codec\.std=\[(\S+)\]", caplog.text)
    assert found is not None
    mean, std = (tuple(float(v) for v in text.split(",")) for text in found.groups())
    assert warn_unless_normalised(frames, CodecSettings(mean=mean, std=std))
    # What is proposed for a colour that never changes is accepted too.
    warn_unless_normalised(torch.ones(1, 3, 1, 8, 8), CodecSettings())
    assert "codec.std=[0.05,0.05,0.05]" in caplog.text


def test_a_gate_that_cannot_fire_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    module = executor_module()
    assert not module.check_gate(20)
    assert "window of 2" in caplog.text
    caplog.clear()
    assert module.check_gate(72)
    assert not caplog.text


def test_an_optimizer_with_the_papers_numbers(kind: tuple[Make, list[Any]]) -> None:
    make, _ = kind
    module = make(optim=optim(beta2=0.95, weight_decay=0.01, final_ratio=0.01))
    module.configure_model()
    made: Any = module.configure_optimizers()
    groups = {group["name"]: group for group in made["optimizer"].param_groups}
    assert groups["matrices"]["weight_decay"] == 0.01
    assert groups["vectors"]["weight_decay"] == 0.0
    assert groups["matrices"]["betas"] == (0.9, 0.95)
