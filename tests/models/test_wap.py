import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from memer.errors import MemerError, UsageError
from memer.plan_settings import CanvasLayout, CanvasRegion, PlanSettings
from models.mot import ExpertSize
from models.rope import RopeTables, rope_1d, rope_rows
from models.wap import PlanCache, WapBatch, WapModel, WapOutput, WapSettings, tiny_settings
from models.wap_tokens import history_mask, sees, visibility
from tests.models.wap_samples import random_batch, small_model, small_settings

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


def test_the_sampled_future_is_that_of_the_joint_pass() -> None:
    model = small_model()
    batch = random_batch(model.settings)
    chunk = model.sample_joint(*caches(model, batch), steps=1, generator=seeded())
    again = seeded()
    noise = [torch.randn(shape, generator=again) for shape in (batch.actions.shape, (2, 8, 1))]
    future = torch.randn(batch.z_clip[:, :, 1:].shape, generator=again)
    with torch.no_grad():
        out = joint(
            model,
            batch,
            noisy_actions=noise[0],
            noisy_progress=noise[1],
            noisy_future=future,
            t_chunk=torch.ones(2),
            t_video=torch.ones(2),
        )
    torch.testing.assert_close(chunk.future, future - out.video, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rope", "positions"), [("sequential", [0, 1, 2, 3, 4, 5]), ("shared", [0, 1, 2, 0, 1, 2])]
)
def test_frames_and_steps_have_their_positions(rope: Any, positions: list[int]) -> None:
    model = small_model(rope=rope)
    seen: dict[str, Any] = {}
    model.mot.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.update(kwargs["streams"]), with_kwargs=True
    )
    joint(model, random_batch(model.settings))
    tables = RopeTables(12)
    expected = {
        "video": rope_rows(tables, torch.tensor(positions), 2, 2),
        "action": rope_1d(tables, torch.arange(8)),
        "progress": rope_1d(tables, torch.arange(8)),
    }
    for name, (cos, sin) in expected.items():
        assert torch.equal(seen[name].rope[0], cos), name
        assert torch.equal(seen[name].rope[1], sin), name


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


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_half_precision_weights_take_full_precision_inputs() -> None:
    """The caches halve; the Euler steps stay in float32, close to those of full precision."""
    model, half = small_model(), small_model().to(torch.bfloat16)
    batch = random_batch(model.settings)
    expected = model.sample(*caches(model, batch), steps=4, generator=seeded())
    inputs = caches(half, batch)
    assert inputs[0].num_bytes == caches(model, batch)[0].num_bytes // 2
    chunk = half.sample(*inputs, steps=4, generator=seeded())
    assert chunk.actions.dtype == torch.float32
    error = (chunk.actions - expected.actions).norm() / expected.actions.norm()
    assert 0 < error < 5e-2


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
    ],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_in_bfloat16_a_chunk_under_caches_is_near_the_joint_pass(device: str) -> None:
    model = small_model().to(device, torch.bfloat16)
    batch = random_batch(model.settings).to(device)
    chunk = model.sample(*caches(model, batch), steps=1, generator=seeded())
    again = seeded()
    noisy_actions = torch.randn(batch.actions.shape, generator=again).to(device)
    noisy_progress = torch.randn(*batch.progress_target.shape, 1, generator=again).to(device)
    with torch.no_grad():
        out = joint(
            model,
            batch,
            noisy_actions=noisy_actions,
            noisy_progress=noisy_progress,
            t_chunk=torch.ones(2, device=device),
            t_video=torch.full((2,), 0.3, device=device),
        )
    velocity = noisy_actions - chunk.actions
    assert (velocity - out.action.float()).norm() / velocity.norm() <= 2e-2


@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.parametrize("kind", ["data", "velocity"])
def test_a_perfect_network_samples_the_truth(kind: Any, steps: int) -> None:
    """Actions, progress and imagined future at once, in as few or as many steps as one likes."""
    model = small_model(video_prediction=kind, action_prediction=kind, progress_prediction=kind)
    batch = random_batch(model.settings)
    inputs = caches(model, batch)
    future, progress = batch.z_clip[:, :, 1:], 2 * batch.progress_target.unsqueeze(2) - 1
    noise = seeded()
    answers = []
    for data in (batch.actions, progress, future):  # in the order in which the sampler draws
        drawn = torch.randn(data.shape, generator=noise)
        answers.append(data if kind == "data" else drawn - data)
    model.action.proj_out.forward = lambda _: answers[0]
    model.progress.proj_out.forward = lambda _: answers[1]
    model.video.head = lambda *_, **__: answers[2]
    chunk = model.sample_joint(*inputs, steps=steps, generator=seeded())
    torch.testing.assert_close(chunk.actions, batch.actions, atol=1e-5, rtol=0)
    torch.testing.assert_close(chunk.progress, batch.progress_target, atol=1e-5, rtol=0)
    torch.testing.assert_close(chunk.future, future, atol=1e-5, rtol=0)


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


def test_padded_targets_are_not_in_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the network's outputs held fixed, padded steps may hold anything."""
    model = small_model()
    batch = random_batch(model.settings)
    valid = torch.arange(8).expand(2, 8) < torch.tensor([[5], [2]])
    latents = torch.tensor([[True, False], [True, False]])
    batch = replace(batch, action_valid=valid, latent_valid=latents)
    with torch.no_grad():
        fixed = joint(model, batch)
    monkeypatch.setattr(model, "forward", lambda **_: fixed)
    clip = batch.z_clip.clone()
    clip[:, :, 2] = 9.0
    padded = replace(
        batch,
        z_clip=clip,
        actions=batch.actions.masked_fill(~valid.unsqueeze(2), 9.0),
        progress_target=batch.progress_target.masked_fill(~valid, 9.0),
    )
    expected, _ = model.loss(batch, generator=seeded())
    assert torch.equal(model.loss(padded, generator=seeded())[0], expected)
    supervised = replace(padded, action_valid=torch.ones_like(valid))
    assert not torch.equal(model.loss(supervised, generator=seeded())[0], expected)


def test_a_batch_of_padding_alone_has_loss_zero_and_gradients_zero() -> None:
    model = small_model()
    batch = random_batch(model.settings)
    batch = replace(
        batch,
        action_valid=torch.zeros_like(batch.action_valid),
        latent_valid=torch.zeros_like(batch.latent_valid),
    )
    loss, figures = model.loss(batch, generator=seeded())
    loss.backward()
    assert loss == 0
    assert set(figures) == {"loss_video", "loss_action", "loss_progress"}
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


def test_actions_and_progress_share_their_time_the_future_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Times read back from the noisy inputs of data that is constant."""
    model = small_model()
    batch = random_batch(model.settings, size=4)
    seen: dict[str, Any] = {}
    forward = model.forward

    def keep(**inputs: Any) -> WapOutput:
        seen.update(inputs)
        return forward(**inputs)

    monkeypatch.setattr(model, "forward", keep)
    far = 1e6  # so that noise does not matter: noisy = (1 - t) far
    big = replace(
        batch,
        z_clip=torch.full_like(batch.z_clip, far),
        actions=torch.full_like(batch.actions, far),
        progress_target=torch.full_like(batch.progress_target, (far + 1) / 2),
    )
    model.loss(big, generator=seeded())
    t_action = 1 - seen["noisy_actions"] / far
    t_progress = 1 - seen["noisy_progress"] / far
    t_video = 1 - seen["noisy_future"] / far
    for read, name in ((t_action, "t_chunk"), (t_progress, "t_chunk"), (t_video, "t_video")):
        expected = seen[name].view(-1, *[1] * (read.dim() - 1)).expand_as(read)
        torch.testing.assert_close(read, expected, atol=1e-4, rtol=0)
    assert len({*seen["t_chunk"].tolist(), *seen["t_video"].tolist()}) == 8


def test_the_loss_repeats_with_its_generator() -> None:
    model = small_model()
    batch = random_batch(model.settings)
    first, _ = model.loss(batch, generator=seeded(3))
    again, _ = model.loss(batch, generator=seeded(3))
    other, _ = model.loss(batch, generator=seeded(4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_action_that_the_robot_lacks_is_not_in_the_loss() -> None:
    model = small_model()
    batch = random_batch(model.settings)
    has = torch.tensor([[True, True, False], [True, True, True]])
    _, some = model.loss(replace(batch, dim_valid=has), generator=seeded())
    _, full = model.loss(batch, generator=seeded())
    _, everything = model.loss(replace(batch, dim_valid=torch.ones_like(has)), generator=seeded())
    assert torch.equal(everything["loss_action"], full["loss_action"])
    assert not torch.equal(some["loss_action"], full["loss_action"])
    with pytest.raises(MemerError, match="dim_valid"):
        model.loss(replace(batch, dim_valid=has[:, :2]))


@pytest.mark.parametrize(("option", "changed"), [("plan_noise", "z_plan"), ("condition_jitter", "progress")])
def test_noise_on_the_conditions(option: str, changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches what it is named for, and nothing else: the other draws stay those of the plain run."""
    settings = small_settings(**{option: 0.1})
    seen: list[dict[str, Any]] = []
    for chosen in (small_settings(), settings):
        model = small_model(chosen).train()
        forward = model.forward

        def keep(forward: Any = forward, **inputs: Any) -> WapOutput:
            seen.append(inputs)
            return forward(**inputs)

        monkeypatch.setattr(model, "forward", keep)
        model.loss(random_batch(settings, size=64), generator=seeded())
    plain, noisy = seen
    assert {name for name in plain if not torch.equal(plain[name], noisy[name])} == {changed}
    deviation = (noisy[changed] - plain[changed]).square().mean().sqrt()
    assert 0.05 < deviation < 0.15
    assert changed != "progress" or ((noisy[changed] >= 0) & (noisy[changed] <= 1)).all()


def test_loss_weights_count() -> None:
    settings = small_settings(lambda_video=0.5, lambda_action=2.0, lambda_progress=3.0)
    model = small_model(settings)
    loss, parts = model.loss(random_batch(settings), generator=seeded())
    expected = 0.5 * parts["loss_video"] + 2 * parts["loss_action"] + 3 * parts["loss_progress"]
    torch.testing.assert_close(loss.detach(), expected)


@pytest.mark.parametrize("kind", ["velocity", "data"])
def test_a_perfect_network_has_no_loss(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is replaced by one that knows data and noise."""
    settings = small_settings(video_prediction=kind, action_prediction=kind, progress_prediction=kind)
    model = small_model(settings)
    batch = random_batch(settings)
    future, progress = batch.z_clip[:, :, 1:], (2 * batch.progress_target - 1).unsqueeze(2)

    def perfect(**inputs: Any) -> WapOutput:
        pairs = (
            (inputs["noisy_future"], future, inputs["t_video"]),
            (inputs["noisy_actions"], batch.actions, inputs["t_chunk"]),
            (inputs["noisy_progress"], progress, inputs["t_chunk"]),
        )
        outputs = []
        for noisy, data, t in pairs:
            t = t.view(-1, *[1] * (data.dim() - 1))
            outputs.append(data if kind == "data" else (noisy - data) / t)
        return WapOutput(*outputs)

    monkeypatch.setattr(model, "forward", perfect)
    loss, _ = model.loss(batch, generator=seeded())
    assert loss < 1e-6


# -- switches -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_a_step_and_makes_a_chunk(name: str) -> None:
    model = small_model(**VARIANTS[name])
    s = model.settings
    batch = random_batch(s)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    before, _ = model.loss(batch, generator=seeded())
    before.backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None]
    assert not [n for n in unused if not n.endswith("attn1.norm_q.weight")], unused
    optimizer.step()
    after, _ = model.loss(batch, generator=seeded())
    assert after < before

    inputs = caches(model, batch)
    chunk = model.sample(*inputs, steps=2, generator=seeded())
    assert chunk.actions.shape == (2, s.action_horizon, s.action_dim)
    if s.progress_mode == "classification":
        assert chunk.progress is None
        probability = model.finished(*inputs[:4])
        assert probability.shape == (2,)
        assert ((probability > 0) & (probability < 1)).all()
    else:
        assert chunk.progress is not None
        assert chunk.progress.shape == (2, s.action_horizon)
    assert all(torch.isfinite(part).all() for part in chunk if part is not None)


def test_the_classifier_reads_what_it_was_trained_on() -> None:
    """One pass under the caches gives the joint pass' logit, whatever the noisy actions."""
    model = small_model(**VARIANTS["classification"])
    batch = random_batch(model.settings)
    probability = model.finished(*caches(model, batch)[:4])
    for shift in (0.0, 1.0):
        with torch.no_grad():
            logits = joint(model, batch, noisy_actions=batch.actions + shift).progress[:, 0, 0]
        torch.testing.assert_close(logits.sigmoid(), probability, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="classification"):
        small_model().finished(*caches(small_model(), random_batch(small_settings()))[:4])


def test_without_condition_the_progress_changes_nothing() -> None:
    model = small_model(**VARIANTS["without progress condition"])
    batch = random_batch(model.settings)
    first = model.sample(*caches(model, batch), steps=2, generator=seeded())
    other = model.sample(*caches(model, batch, progress=None), steps=2, generator=seeded())
    assert torch.equal(first.actions, other.actions)
    with pytest.raises(ValueError, match="progress is missing"):
        caches(small_model(), random_batch(small_settings()), progress=None)


def test_history_may_grow_frame_by_frame() -> None:
    """In its own memory: the chunk is the same as after one prefill, and that of the joint pass."""
    model = small_model(**VARIANTS["full history"])
    batch = random_batch(model.settings, history=40)
    assert batch.z_plan is not None
    once = model.prefill_plan(batch.z_plan, batch.text_plan)
    grown = model.prefill_plan(batch.z_plan[:, :, :1], batch.text_plan)
    first = [part.clone() for kv in grown.keys for part in kv]
    start = grown
    for begin, end in ((1, 2), (2, 5), (5, 23), (23, 40)):
        grown = model.extend_history(grown, batch.z_plan[:, :, begin:end], batch.text_plan)
    assert grown.latents == once.latents == 40
    assert all(
        torch.equal(a, part) for a, part in zip(first, [p for kv in start.keys for p in kv], strict=True)
    )
    for ours, theirs in zip(grown.keys, once.keys, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=1e-5)
    inputs = (batch.text_plan, batch.state, batch.progress)
    chunks = []
    for history in (grown, once, PlanCache(once.keys, once.latents)):  # the last without spare memory
        obs = model.prefill_obs(history, batch.z_clip[:, :, :1], *inputs)
        chunks.append(model.sample(history, obs, *inputs, steps=2, generator=seeded()).actions)
        model.sample_joint(history, obs, *inputs, steps=1)
        chunks.append(model.sample(history, obs, *inputs, steps=2, generator=seeded()).actions)
    for chunk in chunks[1:]:
        torch.testing.assert_close(chunk, chunks[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"progress_mode": "classification"}, "progress_condition"),
        ({"executor_context": "full_history", "visual_plan": "none"}, "full_history"),
        ({"executor_context": "full_history", "visual_plan": "current_only"}, "full_history"),
        ({"visual_plan": "some"}, "visual_plan"),
        ({"latent_height": 5}, "latent_height"),
        ({"lambda_video": -1.0}, "lambda_video"),
        ({"future_latents": 0}, "future_latents"),
        ({"video": ExpertSize(hidden=30, ffn=48, num_layers=2, num_heads=2, head_dim=12)}, "hidden 30"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small_settings(**changes)


def test_a_velocity_that_cannot_pass_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="video_prediction=data"):
        small_settings(channels=7, video_prediction="velocity")


def test_settings_survive_json() -> None:
    settings = small_settings(visual_plan="none", shift=3.0)
    assert WapSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    with pytest.raises(MemerError, match="unknown field 'hidden'"):
        WapSettings.from_dict({**settings.to_dict(), "hidden": 3})


@pytest.mark.parametrize(
    ("field", "cut", "message"),
    [
        ("z_plan", (slice(None), slice(None), slice(1, None)), r"z_plan.*\(2, 6, 3, 4, 4\)"),
        ("z_clip", (slice(None), slice(3)), "z_clip"),
        ("state", (slice(None), slice(1)), r"state: shape \(2, 1\).*\(2, 2\)"),
        ("actions", (slice(None), slice(None), slice(2)), "actions"),
        ("action_valid", (slice(None), slice(3)), "action_valid"),
        ("text_plan", (slice(None), slice(4)), "text"),
    ],
)
def test_a_batch_of_another_contract_is_refused_by_field(field: str, cut: Any, message: str) -> None:
    model = small_model()
    batch = random_batch(model.settings)
    with pytest.raises(MemerError, match=message):
        model.loss(replace(batch, **{field: getattr(batch, field)[cut]}))


def test_the_contract_fixes_shapes_and_switches() -> None:
    region = CanvasRegion(camera="base", y=0, x=0, height=32, width=32)
    plan = PlanSettings(canvas=CanvasLayout(height=32, width=32, regions=(region,)), visual_plan="none")
    tiny = tiny_settings()
    settings = WapSettings.from_plan(
        plan,
        action_dim=4,
        state_dim=4,
        video=tiny.video,
        action=tiny.action,
        progress=tiny.progress,
        freq_dim=64,
        video_prediction="data",
    )
    assert settings == replace(tiny, visual_plan="none")


def test_the_mask_is_the_published_picture() -> None:
    sizes = {"P": 3, "O": 1, "F": 2, "A": 2, "R": 2}
    rows = ["".join(".x"[int(cell)] for cell in row) for row in visibility(sizes, sees(small_settings()))]
    assert rows == [
        "xxx.......",
        "xxx.......",
        "xxx.......",
        "xxxx......",
        "xxxxxx....",
        "xxxxxx....",
        "xxxx..xxxx",
        "xxxx..xxxx",
        "xxxx..xxxx",
        "xxxx..xxxx",
    ]
    classifier = small_settings(**VARIANTS["classification"])
    rows = [
        "".join(".x"[int(cell)] for cell in row) for row in visibility({**sizes, "R": 1}, sees(classifier))
    ]
    assert rows[-3:] == ["xxxx..xx.", "xxxx..xx.", "xxxx....x"]


def test_frames_of_a_history_see_earlier_ones() -> None:
    rows = ["".join(".x"[int(cell)] for cell in row) for row in history_mask(2, 2, cached=1)]
    assert rows == ["xxxx..", "xxxx..", "xxxxxx", "xxxxxx"]


def test_a_trained_executor_does_what_plan_and_progress_say() -> None:
    """The plan's sign decides the actions, p_t where the progress goes on: learned in 120 short steps."""
    settings = small_settings(action_horizon=4, future_latents=1)
    torch.manual_seed(0)
    model = WapModel(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95))

    def draw(seed: int) -> tuple[WapBatch, Tensor]:
        batch = random_batch(settings, size=16, seed=seed)
        sign = torch.where(batch.progress_target[:, 0] > 0.5, 1.0, -1.0)
        assert batch.z_plan is not None
        ahead = torch.arange(1, 5) / 10
        return replace(
            batch,
            z_plan=sign.view(-1, 1, 1, 1, 1).expand_as(batch.z_plan),
            actions=sign.view(-1, 1, 1).expand_as(batch.actions),
            progress_target=0.5 * batch.progress.unsqueeze(1) + ahead,
        ), sign

    for step in range(120):
        loss, _ = model.loss(draw(step)[0], generator=seeded(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batch, sign = draw(1000)
    chunk = model.eval().sample(*caches(model, batch), generator=seeded())
    assert (chunk.actions - sign.view(-1, 1, 1)).abs().mean() < 0.25
    assert chunk.progress is not None
    assert (chunk.progress - batch.progress_target).abs().mean() < 0.08
