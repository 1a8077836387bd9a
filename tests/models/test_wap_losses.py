"""The executor's losses: padding, times, weights, perfect networks, a short training."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from memer.errors import MemerError
from models.wap import WapBatch, WapModel, WapOutput
from tests.models.wap_samples import (
    caches,
    joint,
    random_batch,
    seeded,
    small_model,
    small_settings,
)


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
