from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.wap import PlanCache, WapBatch, WapModel, WapOutput
from tests.models.wap_samples import random_batch, small_model

#: Every row of the specification's table of switches, and the executor's own options.
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "without visual plan": {"visual_plan": "none"},
    "without visual memory": {"visual_plan": "current_only"},
    "classification": {"progress_mode": "classification", "progress_condition": False},
    "without progress condition": {"progress_condition": False},
    "full history": {"executor_context": "full_history"},
    "plan+global": {"target_text": "plan+global"},
    "shared positions": {"rope": "shared"},
    "separate": {"action_progress": "separate"},
    "episodic plan": {"plan_latents": 2},
    "one masked attention": {"attention": "masked"},
}


def joint(model: WapModel, batch: WapBatch, *, future: bool = True, **changes: Any) -> WapOutput:
    """The training pass at fixed times on the batch's own values as noisy ones."""
    inputs: dict[str, Any] = {
        "z_plan": batch.z_plan,
        "z_obs": batch.z_clip[:, :, :1],
        "text": model.context(batch.text_plan, batch.text_global),
        "state": batch.state,
        "progress": batch.progress,
        "noisy_actions": batch.actions,
        "noisy_progress": batch.progress_target.unsqueeze(2),
        "t_chunk": torch.full((len(batch.state),), 0.6),
        "noisy_future": batch.z_clip[:, :, 1:] if future else None,
        "t_video": torch.full((len(batch.state),), 0.3),
    }
    return model(**{**inputs, **changes})


def caches(model: WapModel, batch: WapBatch, **changes: Any) -> tuple[Any, ...]:
    """Plan, observation, text, state and progress as `sample` takes them."""
    values = {"state": batch.state, "progress": batch.progress, **changes}
    text = model.context(batch.text_plan, batch.text_global)
    plan = model.prefill_plan(batch.z_plan, text)
    obs = model.prefill_obs(plan, batch.z_clip[:, :, :1], text, values["state"], values["progress"])
    return plan, obs, text, values["state"], values["progress"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("future", [True, False])
def test_a_chunk_under_caches_is_the_joint_pass(name: str, future: bool) -> None:
    """One Euler step from the same noise, with the caches and as one pass over all groups."""
    model = small_model(**VARIANTS[name])
    batch = random_batch(model.settings)
    chunk = model.sample(*caches(model, batch), steps=1, generator=seeded())

    again = seeded()
    noisy_actions = torch.randn(batch.actions.shape, generator=again)
    noisy_progress = torch.randn(*batch.progress_target.shape, 1, generator=again)
    with torch.no_grad():
        out = joint(
            model,
            batch,
            future=future,
            noisy_actions=noisy_actions,
            noisy_progress=noisy_progress,
            t_chunk=torch.ones(2),
        )
    torch.testing.assert_close(chunk.actions, noisy_actions - out.action, atol=1e-5, rtol=1e-5)
    if chunk.progress is not None:
        expected = ((noisy_progress - out.progress).squeeze(2) + 1) / 2
        torch.testing.assert_close(chunk.progress, expected, atol=1e-5, rtol=1e-5)


def test_grouped_calls_and_one_masked_attention_are_equal() -> None:
    grouped, masked = small_model(), small_model(attention="masked")
    batch = random_batch(grouped.settings)
    with torch.no_grad():
        for ours, theirs in zip(joint(grouped, batch), joint(masked, batch), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    ours, _ = grouped.loss(batch, generator=seeded())
    theirs, _ = masked.loss(batch, generator=seeded())
    ours.backward()
    theirs.backward()
    for (name, a), b in zip(grouped.named_parameters(), masked.parameters(), strict=True):
        assert a.grad is not None, name
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


def test_the_imagined_future_does_not_change_the_chunk() -> None:
    model = small_model()
    batch = random_batch(model.settings)
    inputs = caches(model, batch)
    alone = model.sample(*inputs, steps=4, generator=seeded())
    beside = model.sample_joint(*inputs, steps=4, generator=seeded())
    assert alone.future is None
    assert beside.future is not None
    assert beside.future.shape == batch.z_clip[:, :, 1:].shape
    torch.testing.assert_close(alone.actions, beside.actions, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone.progress, beside.progress, atol=1e-5, rtol=1e-5)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


@pytest.mark.parametrize("attention", ["grouped", "masked"])
def test_future_and_chunk_get_no_gradient_from_each_other(attention: str) -> None:
    model = small_model(attention=attention)
    batch = random_batch(model.settings)
    future, actions = leaf(batch.z_clip[:, :, 1:]), leaf(batch.actions)
    progress = leaf(batch.progress_target.unsqueeze(2))
    inputs = (future, actions, progress)
    out = joint(model, batch, noisy_future=future, noisy_actions=actions, noisy_progress=progress)
    assert out.video is not None
    from_video = torch.autograd.grad(
        out.video.square().sum(), inputs, retain_graph=True, materialize_grads=True
    )
    from_action = torch.autograd.grad(
        out.action.square().sum(), inputs, retain_graph=True, materialize_grads=True
    )
    from_progress = torch.autograd.grad(out.progress.square().sum(), inputs, materialize_grads=True)
    assert [bool(g.any()) for g in from_video] == [True, False, False]
    assert [bool(g.any()) for g in from_action] == [False, True, True]
    assert [bool(g.any()) for g in from_progress] == [False, True, True]


def test_the_plan_sees_neither_state_nor_progress_nor_the_present() -> None:
    """Its keys and values in the joint pass stay the same to the last bit."""
    model = small_model()
    batch = random_batch(model.settings)
    seen: list[Tensor] = []

    def note(_module: object, _args: object, _kwargs: object, result: Any) -> None:
        seen.append(torch.cat([part.flatten() for part in result.keys["P"]]))

    for layer in model.mot.layers:
        layer.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        joint(model, batch)
        joint(
            model, batch, state=batch.state + 1, progress=1 - batch.progress, z_obs=batch.z_clip[:, :, :1] + 1
        )
    num_layers = model.settings.video.num_layers
    assert len(seen) == 2 * num_layers
    for before, after in zip(seen[:num_layers], seen[num_layers:], strict=True):
        assert torch.equal(before, after)


def test_state_and_progress_reach_the_chunk() -> None:
    model = small_model()
    batch = random_batch(model.settings)
    plain = model.sample(*caches(model, batch), steps=2, generator=seeded()).actions
    for change in ({"state": batch.state + 1}, {"progress": 1 - batch.progress}):
        other = model.sample(*caches(model, batch, **change), steps=2, generator=seeded()).actions
        assert (other - plain).abs().max() > 1e-3


def test_sampling_leaves_the_caches_alone_and_repeats() -> None:
    model = small_model()
    batch = random_batch(model.settings)
    inputs = caches(model, batch)
    before = [part.clone() for kv in (*inputs[0].keys, *inputs[1].keys) for part in kv]
    first = model.sample(*inputs, steps=3, generator=seeded(7))
    second = model.sample(*inputs, steps=3, generator=seeded(7))
    assert torch.equal(first.actions, second.actions)
    after = [part for kv in (*inputs[0].keys, *inputs[1].keys) for part in kv]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_several_episodes_in_lockstep_are_the_same_as_alone() -> None:
    model = small_model()
    batch = random_batch(model.settings, size=3)
    assert batch.z_plan is not None
    plans, chunks = [], []
    for i in range(3):
        row = slice(i, i + 1)
        plan = model.prefill_plan(batch.z_plan[row], batch.text_plan[row])
        inputs = (batch.text_plan[row], batch.state[row], batch.progress[row])
        obs = model.prefill_obs(plan, batch.z_clip[row, :, :1], *inputs)
        plans.append(plan)
        chunks.append(model.sample(plan, obs, *inputs, steps=3, generator=seeded(i)).actions)
    together = PlanCache.join(plans)
    inputs = (batch.text_plan, batch.state, batch.progress)
    obs = model.prefill_obs(together, batch.z_clip[:, :, :1], *inputs)
    actions = model.sample(together, obs, *inputs, steps=3, generator=[seeded(i) for i in range(3)]).actions
    torch.testing.assert_close(actions, torch.cat(chunks), atol=1e-5, rtol=1e-5)


# -- losses --------------------------------------------------------------------------------


def test_padded_steps_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    batch = random_batch(model.settings)
    valid = torch.arange(8).expand(2, 8) < torch.tensor([[3], [0]])
    latents = torch.tensor([[True, False], [False, False]])
    batch = replace(batch, action_valid=valid, latent_valid=latents)
    outputs: list[WapOutput] = []
    forward = model.forward

    def keep(**inputs: Any) -> WapOutput:
        out = forward(**inputs)
        for part in out:
            assert part is not None
            part.retain_grad()
        outputs.append(out)
        return out

    monkeypatch.setattr(model, "forward", keep)
    loss, _ = model.loss(batch, generator=seeded())
    loss.backward()
    (out,) = outputs
    assert out.video is not None
    for output, use in ((out.action.grad, valid), (out.progress.grad, valid)):
        assert output is not None
        assert not output[~use].any()
        assert output[use].all()
    assert out.video.grad is not None
    frames = out.video.grad.transpose(1, 2)
    assert not frames[~latents].any()
    assert frames[latents].any()
