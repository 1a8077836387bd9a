"""The executor: caches against the joint pass, who sees whom, sampling."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.rope import RopeTables, rope_1d, rope_rows
from models.wap import Chunk, PlanCache
from models.wap_tokens import history_mask, sees, visibility
from tests.models.wap_samples import (
    VARIANTS,
    caches,
    joint,
    random_batch,
    seeded,
    small_model,
    small_settings,
)


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


def test_the_temperature_scales_the_noise_that_a_chunk_starts_from() -> None:
    model = small_model()
    batch = random_batch(model.settings)
    inputs = caches(model, batch)

    def sampled(temperature: float, seed: int) -> Chunk:
        return model.sample(*inputs, steps=3, temperature=temperature, generator=seeded(seed))

    plain = model.sample(*inputs, steps=3, generator=seeded(1))
    assert torch.equal(sampled(1.0, 1).actions, plain.actions)
    cold = sampled(0.0, 1)
    assert torch.equal(cold.actions, sampled(0.0, 2).actions)
    assert torch.equal(cold.progress, sampled(0.0, 2).progress)
    # Two seeds differ the less the colder it is.
    apart = [(sampled(t, 1).actions - sampled(t, 2).actions).abs().mean() for t in (0.1, 0.5, 1.0)]
    assert 0 < apart[0] < apart[1] < apart[2]


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
