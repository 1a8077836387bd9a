"""The causal world model: what may depend on what, cached against recomputed, padding, options."""

import pytest
import torch
from torch import Tensor

from models.cwm import CausalWorldModel
from models.cwm_layout import all_targets_layout
from models.masks import block_mask
from tests.models.small_cwm import (
    C,
    H,
    N,
    W,
    batch,
    by_block,
    frame_tokens,
    make_model,
    seeded,
    states,
    watched,
)

# -- one pass, cached, block by block --------------------------------------------------------------------


def one_pass_velocity(model: CausalWorldModel, b: dict[str, Tensor], x: Tensor, t: float) -> Tensor:
    """Output for the last segment, evidence and target in one block-causal pass over explicit blocks."""
    net, frames = model.transformer, b["latents"].shape[2]
    latents = torch.cat((b["latents"][:, :, :-2], x), dim=2)
    times = torch.zeros(len(x), frames)
    times[:, -2:] = 1000 * t
    blocks = (torch.arange(frames) + 1) // 2
    groups = [
        (slice(0, (frames - 2) * N), net.embed_text(b["text_global"])),
        (slice((frames - 2) * N, None), net.embed_text(b["text_plan"][:, -1])),
    ]
    mask = block_mask(blocks, tokens_per_frame=N)
    found, _ = net.predict(latents, times, text_groups=groups, positions=torch.arange(frames), mask=mask)
    return found[:, :, -2:]


@torch.no_grad()
def test_one_pass_equals_prefill_equals_append() -> None:
    """The visibility at run time is that of training."""
    model, b = make_model(), batch()
    start = torch.randn((2, C, 2, H, W), generator=seeded())
    expected = start - one_pass_velocity(model, b, start, 1.0)  # one Euler step from noise to data
    prefilled = model.prefill(b["latents"][:, :, :-2], b["text_global"])
    for cache in (prefilled, by_block(model, b)):
        found = model.sample(cache, b["text_plan"][:, -1], steps=1, generator=seeded())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_training_sees_what_planning_sees() -> None:
    """At time 1 with equal noise, the training pass and the cached one end in the same tokens."""
    model, b = watched(), batch()
    start = [torch.randn((2, C, 2, H, W), generator=seeded(k)) for k in range(3)]
    model.draw = lambda latents, *, generator: (torch.cat(start, dim=2), torch.ones(2, 3))  # type: ignore
    trained = states(model, b)[:, 5 * N :]
    for k in range(3):
        cache = model.prefill(b["latents"][:, :, : 1 + 2 * k], b["text_global"])
        model.sample(cache, b["text_plan"][:, k], steps=1, generator=seeded(k))
        planned = model.transformer.passes[-1][1][0]
        torch.testing.assert_close(planned, frame_tokens(trained, 2 * k, 2 * k + 2), rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_caches_hold_the_same() -> None:
    model, b = make_model(), batch()
    prefilled = model.prefill(b["latents"][:, :, :-2], b["text_global"])
    appended = by_block(model, b)
    assert prefilled.num_latents == appended.num_latents == 1 + 2 * 2
    for one, other in zip(prefilled.layers, appended.layers, strict=True):
        for x, y in zip(one, other, strict=True):
            assert x.shape == (2, 5 * N, 3, 32)
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    assert appended.num_bytes == 2 * 2 * 2 * 5 * N * 96 * 4  # layers, k and v, batch, tokens, channels, fp32


def test_sampling_and_appending_leave_a_cache_as_it_is() -> None:
    model, b = make_model(), batch()
    cache = by_block(model, b)
    copies = [(k.clone(), v.clone()) for k, v in cache.layers]
    first = model.sample(cache, b["text_plan"][:, 2], steps=2, generator=seeded())
    longer = model.append(cache, b["latents"][:, :, -2:], b["text_global"])
    assert (cache.num_latents, longer.num_latents) == (5, 7)
    for (k, v), (old_k, old_v) in zip(cache.layers, copies, strict=True):
        assert torch.equal(k, old_k)
        assert torch.equal(v, old_v)
    again = model.sample(cache, b["text_plan"][:, 2], steps=2, generator=seeded())
    assert torch.equal(first, again)
    assert not any(k.requires_grad or v.requires_grad for k, v in longer.layers)
    assert not torch.equal(first, model.sample(longer, b["text_plan"][:, 2], steps=2, generator=seeded()))


def test_nothing_stays_in_the_modules() -> None:
    model, b = make_model(), batch()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    cache = by_block(model, b)
    model.sample(cache, b["text_plan"][:, 2], steps=1, generator=seeded())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


# -- what may depend on what -----------------------------------------------------------------------------


def test_a_block_changes_no_earlier_one() -> None:
    """Clean frames 0, 1 2, 3 4, then noisy 1, 2, 3: what sees block k changes, all else keeps its bits."""
    model, b = watched(), batch()
    before = states(model, b)
    for k, first, last, seen in ((1, 1, 3, [1, 2, 3, 4, 7, 8, 9, 10]), (2, 3, 5, [3, 4, 9, 10])):
        changed = {**b, "latents": b["latents"].clone()}
        changed["latents"][:, :, first:last] += 1
        after = states(model, changed)
        # The noisy twin of a changed block is changed itself.
        seen = sorted({*seen, 5 + 2 * (k - 1), 6 + 2 * (k - 1)})
        for frame in range(11):
            same = torch.equal(frame_tokens(before, frame, frame + 1), frame_tokens(after, frame, frame + 1))
            assert same == (frame not in seen), f"block {k}, frame {frame}"


@pytest.mark.parametrize("what", ["plan text", "last segment", "noise"])
def test_evidence_does_not_see_plan_or_target(what: str) -> None:
    model, b = watched(), batch()
    before = states(model, b)
    changed = {name: value.clone() for name, value in b.items()}
    if what == "plan text":
        changed["text_plan"] += 1
    elif what == "last segment":
        changed["latents"][:, :, -2:] += 1
    else:
        model.shift = 3.0
    after = states(model, changed)
    assert torch.equal(frame_tokens(before, 0, 5), frame_tokens(after, 0, 5))
    assert not torch.equal(frame_tokens(before, 9, 11), frame_tokens(after, 9, 11))


def test_evidence_sees_the_instruction() -> None:
    model, b = watched(), batch()
    before = states(model, b)
    after = states(model, {**b, "text_global": b["text_global"] + 1})
    assert not torch.equal(frame_tokens(before, 0, 1), frame_tokens(after, 0, 1))


def test_gradients_of_the_target_reach_the_evidence() -> None:
    """The first frame is never a target; what it teaches comes through attention alone."""
    model, b = make_model(), batch()
    b["latents"].requires_grad_()
    loss, _ = model.loss(**b, generator=seeded())
    loss.backward()
    assert b["latents"].grad[:, :, 0].abs().max() > 1e-6
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("target_text", ["plan", "plan+global"])
def test_a_target_sees_its_own_text(target_text: str) -> None:
    model, b = watched(target_text=target_text), batch()
    before = states(model, b)
    changed = {**b, "text_plan": b["text_plan"].clone()}
    changed["text_plan"][:, 1] += 1
    after = states(model, changed)
    for k, first in ((1, 5), (2, 7), (3, 9)):
        same = torch.equal(frame_tokens(before, first, first + 2), frame_tokens(after, first, first + 2))
        assert same == (k != 2)


# -- training in one pass or target by target ------------------------------------------------------------


@pytest.mark.parametrize("plan_frames", [4, 8])
@pytest.mark.parametrize("target_text", ["plan", "plan+global"])
def test_all_targets_equal_one_target_at_a_time(plan_frames: int, target_text: str) -> None:
    r = plan_frames // 4
    model, b = watched(plan_frames=plan_frames, target_text=target_text), batch(r=r)
    together = states(model, b)[:, (1 + 2 * r) * N :]
    model.targets = "one_target"
    seen = set()
    for seed in range(12):
        generator = seeded()
        draw = model.draw
        model.draw = lambda latents, *, generator, draw=draw: draw(latents, generator=seeded())  # type: ignore
        generator.manual_seed(seed)
        with torch.no_grad():
            model.loss(**b, generator=generator)
        model.draw = draw  # type: ignore
        target = model.transformer.passes[-1][1][0][:, -r * N :]
        for row in range(2):
            errors = [
                (target[row] - together[row, k * r * N : (k + 1) * r * N]).abs().max() for k in range(3)
            ]
            k = int(torch.stack(errors).argmin())
            assert errors[k] < 1e-5
            seen.add((row, k))
    assert len(seen) == 6


def test_the_two_losses_agree_when_there_is_one_segment() -> None:
    b, model = batch(num=1), make_model()
    expected, _ = model.loss(**b, generator=seeded())
    model.targets = "one_target"
    found, _ = model.loss(**b, generator=seeded())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("targets", ["all_targets", "one_target"])
def test_padding_changes_nothing(targets: str) -> None:
    """An episode of one segment beside one of three: what lies behind its end has no weight."""
    model, b = make_model(targets=targets), batch()
    b["num_segments"] = torch.tensor([1, 3])
    losses, grads = [], []
    for filling in (0.0, 50.0):
        latents = b["latents"].clone()
        latents[0, :, 3:] = filling
        text = b["text_plan"].clone()
        text[0, 1:] = filling
        model.zero_grad()
        loss, figures = model.loss(latents, b["num_segments"], b["text_global"], text, generator=seeded(1))
        loss.backward()
        losses += [loss.detach(), figures["clean_mse"]]
        grads.append([p.grad.clone() for p in model.parameters()])
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(losses[1], losses[3])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_loss_repeats_and_follows_the_generator() -> None:
    model, b = make_model(), batch()
    first, again, other = (model.loss(**b, generator=seeded(s))[0] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_mask_is_built_once() -> None:
    layout = all_targets_layout(3, 2)
    assert layout.mask(N, torch.device("cpu")) is layout.mask(N, torch.device("cpu"))
