from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from memer.errors import MemerError, UsageError
from models.collate import PackedBatch
from models.lit.planner import PlannerModule
from models.optim import OptimSettings
from models.prompt_encoder import IGNORED, LABEL, POSITIONS
from tests.models.lit.planner_runs import fit, make_module, many_samples, state, trainer
from tests.models.reference import pixel_inputs
from tests.models.samples import mixed_samples, sample


def gradients(module: PlannerModule) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


class Fixed(torch.utils.data.Dataset):
    """One ready batch."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> PackedBatch:
        if index:
            raise IndexError
        return self.batch


# Loss


def test_loss_and_gradient_equal_the_librarys_full_logits(base: Path) -> None:
    module = make_module(base)
    encoder = module.make_encoder()
    plain = AutoModelForImageTextToText.from_pretrained(base)
    plain.model.visual.requires_grad_(False)
    total, count = torch.zeros(()), 0
    for made in mixed_samples():
        encoded = encoder.encode_sample(made)
        logits = plain(**pixel_inputs(encoder, made.question, encoded)).logits[0].float()
        labels = torch.from_numpy(encoded.labels)
        total = total + F.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORED, reduction="sum")
        count += int((labels != IGNORED).sum())
    (total / count).backward()

    batch = module.make_collator()(mixed_samples())
    losses, _ = module.answer_losses(batch)
    assert len(losses) == count
    assert losses.sum().item() == pytest.approx(total.item(), rel=1e-5)
    losses.mean().backward()
    ours = gradients(module)
    assert len(ours) > 40
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours.pop("model." + name), parameter.grad, atol=1e-5, rtol=1e-3)
    assert not ours


def test_head_sees_supervised_positions_only_however_long_the_prompt(base: Path) -> None:
    module = make_module(base)
    rows: list[int] = []
    module.model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(args[0].numel() // 128))
    batches = [module.make_collator()([sample(recent=r, memory=m)]) for r, m in ((1, 0), (4, 4))]
    for batch in batches:
        module.answer_losses(batch)
    assert batches[1].num_tokens > 2 * batches[0].num_tokens
    assert rows == [batches[0].num_targets] * 2


class Capture(Callback):
    """Gradients as the optimizer gets them, and what is logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.logged: list[dict[str, float]] = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer) -> None:
        found = gradients(pl_module)
        if found:
            self.steps.append(found)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_two_unequal_micro_batches_equal_one_batch(base: Path) -> None:
    long = sample(episode=1, subtask="LOOK INTO BIN 7 " * 5, positions=(1, 2, 3, 4))
    short = sample(episode=2, positions=())
    frozen = OptimSettings(total_steps=20, learning_rate=1e-9)
    whole, parts = Capture(), Capture()
    fit(
        make_module(base, optim=frozen),
        [long, short],
        batch_size=2,
        callbacks=[whole],
        gradient_clip_val=None,
    )
    fit(
        make_module(base, optim=frozen),
        [long, short],
        batch_size=1,
        accumulate_grad_batches=2,
        callbacks=[parts],
        gradient_clip_val=None,
    )
    assert len(whole.steps) == len(parts.steps) > 0
    for name, gradient in whole.steps[-1].items():
        torch.testing.assert_close(parts.steps[-1][name], gradient, atol=1e-6, rtol=1e-3)
    assert parts.logged[-1]["train/loss"] == pytest.approx(whole.logged[-1]["train/loss"], rel=1e-5)
    assert parts.logged[-1]["train/answer_tokens"] == whole.logged[-1]["train/answer_tokens"]

    module = make_module(base)
    one, other = (module.answer_losses(module.make_collator()([made]))[0].mean() for made in (long, short))
    mean_of_means = (one + other).item() / 2
    assert abs(mean_of_means - whole.logged[-1]["train/loss"]) > 1e-3, (
        "the control: unweighted is another number"
    )


def test_metrics_are_logged_per_part_of_the_answer_and_frames_per_batch(base: Path) -> None:
    seen = Capture()
    module = make_module(base)
    samples = mixed_samples()
    fit(module, samples, callbacks=[seen], max_steps=1)
    logged = seen.logged[0]
    losses, _ = make_module(base).answer_losses(batch := module.make_collator()(samples))
    for name, kind in (("label", LABEL), ("positions", POSITIONS)):
        expected = losses[batch.target_kinds == kind].mean().item()
        assert logged[f"train/loss_{name}"] == pytest.approx(expected, rel=1e-4)
    assert logged["train/loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert logged["train/frames_encoded"] == batch.num_frames
    assert logged["train/image_slots"] == batch.num_image_slots > batch.num_frames
    assert logged["train/grad_norm"] > 0


def test_validation_reports_samples_that_are_right_to_the_last_token(base: Path) -> None:
    module = make_module(base)
    samples = mixed_samples()
    right = {"always": False}
    batch = module.make_collator()(samples)

    def losses(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        hits = torch.ones(batch.num_targets, dtype=torch.bool)
        if not right["always"]:
            hits[(batch.target_kinds == LABEL).nonzero()[0]] = False
        return torch.ones(batch.num_targets), hits

    module.answer_losses = losses  # type: ignore[method-assign]
    found = trainer().validate(module, Fixed(batch), verbose=False)[0]
    assert found["val/exact"] == pytest.approx(3 / 4)
    assert found["val/exact_label"] == pytest.approx(3 / 4)
    assert found["val/exact_positions"] == 1
    right["always"] = True
    assert trainer().validate(module, Fixed(batch), verbose=False)[0]["val/exact"] == 1


# Freezing and optimizer


def test_frozen_tensors_are_bit_equal_after_steps_and_in_no_group(base: Path) -> None:
    module = make_module(base)
    before = state(module)
    running = fit(module, many_samples(), max_steps=3)
    after = state(module)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    tower = {name for name in before if ".visual." in name}
    assert tower
    assert not tower & changed
    assert changed == {name for name in before if ".visual." not in name}
    grouped = {id(p) for group in running.optimizers[0].param_groups for p in group["params"]}
    assert grouped == {id(p) for p in module.parameters() if p.requires_grad}
    assert not module.model.model.visual.training
    assert module.model.model.language_model.training


def test_groups_have_unique_names_and_vectors_no_decay(base: Path) -> None:
    module = make_module(base, optim=OptimSettings(total_steps=5, weight_decay=0.1))
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert [(group["name"], group["weight_decay"]) for group in groups] == [
        ("matrices", 0.1),
        ("vectors", 0.0),
    ]
    assert all(p.ndim >= 2 for p in groups[0]["params"])
    assert all(p.ndim < 2 for p in groups[1]["params"])


def test_rate_follows_the_schedule_to_its_end(base: Path) -> None:
    seen = Capture()
    optim = OptimSettings(total_steps=4, learning_rate=1e-3, warmup_ratio=0.5)
    fit(make_module(base, optim=optim), many_samples(), callbacks=[seen], max_steps=4)
    assert [round(step["train/lr"] * 1e3, 3) for step in seen.logged] == [0.5, 1.0, 1.0, 0.5]


# Faults


def test_an_infinite_loss_stops_before_the_weights_change(base: Path) -> None:
    module = make_module(base)
    before = state(module)
    original = module.answer_losses
    module.answer_losses = lambda batch: (original(batch)[0] * float("inf"), original(batch)[1])  # type: ignore
    with pytest.raises(MemerError, match=r"step 0: loss is inf; samples episode_"):
        fit(module, many_samples())
    assert all(torch.equal(before[name], tensor) for name, tensor in state(module).items())


def test_a_zero_gradient_stops(base: Path) -> None:
    module = make_module(base)
    original = module.answer_losses

    def flat(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        losses, hits = original(batch)
        return losses * 0 + 1, hits

    module.answer_losses = flat  # type: ignore[method-assign]
    with pytest.raises(MemerError, match="gradient norm is exactly 0"):
        fit(module, many_samples())


def test_a_zero_loss_stops(base: Path) -> None:
    module = make_module(base)
    original = module.answer_losses
    module.answer_losses = lambda batch: (original(batch)[0] * 0, original(batch)[1])  # type: ignore
    with pytest.raises(MemerError, match="loss is exactly 0"):
        fit(module, many_samples())


def test_sixteen_bit_weights_are_refused(base: Path) -> None:
    with pytest.raises(UsageError, match="bf16-true"):
        fit(make_module(base), many_samples(), precision="bf16-true")


def test_sharded_strategies_are_refused(base: Path) -> None:
    module = make_module(base)
    module._trainer = SimpleNamespace(strategy=FSDPStrategy.__new__(FSDPStrategy))  # type: ignore[assignment]
    with pytest.raises(UsageError, match="FSDPStrategy, must be one device, ddp or deepspeed"):
        module.setup("fit")


def test_too_many_dropped_samples_stop_the_run(base: Path) -> None:
    module = make_module(base, max_dropped_share=0.1)
    batch = module.make_collator()(mixed_samples()[:1])
    values = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    dropped = PackedBatch(**(values | {"dropped_ids": tuple(f"long {i}" for i in range(300))}))
    with pytest.raises(MemerError, match="300 of 301 samples exceed max_length=8192"):
        trainer().fit(module, Fixed(dropped))


def test_bf16_mixed_keeps_float32_weights(base: Path) -> None:
    module = make_module(base)
    fit(module, many_samples(), precision="bf16-mixed", max_steps=1)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_activation_checkpointing_changes_nothing_but_memory(base: Path) -> None:
    plain, saving = make_module(base), make_module(base, activation_checkpointing=True)
    for module in (plain, saving):
        fit(module, many_samples(), max_steps=2)
    for name, tensor in state(plain).items():
        torch.testing.assert_close(state(saving)[name], tensor, atol=1e-6, rtol=0)
