"""The executor's switches: every variant, histories, what does not fit together."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from memer.errors import MemerError, UsageError
from memer.plan_settings import CanvasLayout, CanvasRegion, PlanSettings
from models.mot import ExpertSize
from models.wap import PlanCache, WapSettings, tiny_settings
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
