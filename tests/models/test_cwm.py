"""The causal world model: what may depend on what, cached against recomputed, padding, options."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from memer.errors import UsageError
from memer.flow import euler_times
from models.cwm import CausalWorldModel, EvidenceCache
from models.cwm_layout import all_targets_layout
from models.masks import block_mask
from models.wan import CausalWan, tiny_config

C, H, W, M, T = 8, 4, 4, 3, 32
N = 4  # tokens per latent frame


def make_model(*, plan_frames: int = 8, **kwargs: Any) -> CausalWorldModel:
    torch.manual_seed(0)
    config = {**tiny_config(channels=C), "num_layers": 2, "ffn_dim": 96, "num_attention_heads": 3}
    return CausalWorldModel(CausalWan(**config), plan_frames=plan_frames, **kwargs)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(num: int = 3, *, size: int = 2, r: int = 2) -> dict[str, Tensor]:
    return {
        "latents": noise(size, C, 1 + r * num, H, W),
        "num_segments": torch.full((size,), num),
        "text_global": noise(size, M, T, seed=2),
        "text_plan": noise(size, num, M, T, seed=3),
    }


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Watched(CausalWan):
    """Keeps what goes in and out of each pass."""

    def run(self, tokens: Tensor, time: Tensor, **kwargs: Any) -> Any:
        self.passes = [*getattr(self, "passes", []), (tokens, super().run(tokens, time, **kwargs))]
        return self.passes[-1][1]


def watched(**kwargs: Any) -> CausalWorldModel:
    model = make_model(**kwargs)
    model.transformer.__class__ = Watched
    return model


def frame_tokens(x: Tensor, first: int, last: int) -> Tensor:
    return x[:, first * N : last * N]


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


def by_block(model: CausalWorldModel, b: dict[str, Tensor]) -> EvidenceCache:
    cache = model.append(model.empty_cache(), b["latents"][:, :, :1], b["text_global"])
    for k in range(b["text_plan"].shape[1] - 1):
        cache = model.append(cache, b["latents"][:, :, 1 + 2 * k : 3 + 2 * k], b["text_global"])
    return cache


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


def states(model: CausalWorldModel, b: dict[str, Tensor]) -> Tensor:
    """Tokens after the last block of the training pass [clean 0..2 | noisy 1..3]."""
    with torch.no_grad():
        model.loss(**b, generator=seeded())
    return model.transformer.passes[-1][1][0]


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


# -- a perfect transformer -------------------------------------------------------------------------------


class Oracle(CausalWan):
    """Answers with what the test gives it."""

    def head(self, tokens: Tensor, temb: Tensor, *, grid: tuple[int, int]) -> Tensor:
        super().head(tokens, temb, grid=grid)
        return self.answer


@pytest.mark.parametrize("targets", ["all_targets", "one_target"])
@pytest.mark.parametrize("prediction", ["data", "velocity"])
def test_a_perfect_model_has_no_loss(prediction: Any, targets: Any) -> None:
    model, b = make_model(prediction=prediction, targets=targets), batch(num=1)
    model.transformer.__class__ = Oracle
    data = b["latents"][:, :, 1:]
    drawn, _ = model.draw(b["latents"], generator=seeded())
    model.transformer.answer = data if prediction == "data" else drawn - data
    loss, figures = model.loss(**b, generator=seeded())
    assert (
        loss < 1e-3 if prediction == "data" else loss == 0
    )  # data: only near time 0, by the divisor's bound
    assert figures["clean_mse"] < 1e-4


def test_a_perfect_model_samples_the_truth() -> None:
    model, b = make_model(prediction="data"), batch()
    model.transformer.__class__ = Oracle
    model.transformer.answer = b["latents"][:, :, -2:]
    cache = by_block(model, b)
    found = model.sample(cache, b["text_plan"][:, 2], steps=10, generator=seeded())
    torch.testing.assert_close(found, b["latents"][:, :, -2:], rtol=0, atol=1e-5)
    assert euler_times(10)[-2] > 0.05  # else the divisor's bound would show


# -- options -----------------------------------------------------------------------------------------------


def test_current_only_is_an_image_to_video_model_under_the_plan_text() -> None:
    model, b = watched(visual_plan="current_only"), batch(num=1)
    before = states(model, b)
    assert torch.equal(before, states(model, {**b, "text_global": b["text_global"] + 1}))
    cache = model.append(model.empty_cache(), b["latents"][:, :, :1], b["text_plan"][:, 0])
    assert model.sample(cache, b["text_plan"][:, 0], generator=seeded(), steps=1).shape == (2, C, 2, H, W)
    with pytest.raises(ValueError, match="keeps no evidence"):
        model.append(cache, b["latents"][:, :, 1:], b["text_plan"][:, 0])
    with pytest.raises(ValueError, match="clips of one"):
        model.loss(**batch(num=2), generator=seeded())


def test_noise_on_evidence_and_dropped_texts() -> None:
    model, b = watched(history_noise_prob=1.0, text_drop=1.0), batch()
    states(model, b)
    noisy = model.transformer.passes[-1][0]
    model.history_noise_prob = 0.0
    states(model, b)
    clean = model.transformer.passes[-1][0]
    assert not torch.isclose(frame_tokens(noisy, 0, 5), frame_tokens(clean, 0, 5)).all(dim=-1).any()
    dropped = states(model, b)
    assert torch.equal(dropped, states(model, {**b, "text_plan": b["text_plan"] + 1}))


def test_guidance_leaves_the_textless_velocity_behind() -> None:
    model, b = make_model(text_drop=0.1), batch()
    cache, text = by_block(model, b), b["text_plan"][:, 2]
    with_text, without, guided = (
        model.sample(cache, t, steps=1, generator=seeded(), guidance=g)
        for t, g in ((text, 1.0), (torch.zeros_like(text), 1.0), (text, 3.0))
    )
    torch.testing.assert_close(guided, without + 3 * (with_text - without), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="text_drop"):
        make_model().sample(cache, text, generator=seeded(), guidance=2.0)


def test_velocity_in_too_few_channels_is_warned_about() -> None:
    wide = {**tiny_config(channels=192), "num_layers": 1}
    with pytest.warns(UserWarning, match=r"768 numbers in 192 channels.*prediction=data"):
        CausalWorldModel(CausalWan(**wide))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CausalWorldModel(CausalWan(**wide), prediction="data")
        make_model()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"prediction": "noise"}, "prediction='noise'"),
        ({"plan_frames": 6}, "plan_frames=6"),
        ({"text_drop": 1.5}, "text_drop=1.5"),
        ({"visual_plan": "none"}, "visual_plan='none'"),
    ],
)
def test_bad_options_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_model(**kwargs)


def test_sizes_that_do_not_belong_together_are_named() -> None:
    model, b = make_model(), batch()
    for name, value in (
        ("latents", b["latents"][:, :, :-1]),
        ("text_plan", b["text_plan"][:, :2]),
        ("num_segments", b["num_segments"][:1]),
    ):
        with pytest.raises(ValueError, match=name):
            model.loss(**{**b, name: value}, generator=seeded())
    with pytest.raises(ValueError, match="2 latents, must have 1"):
        model.append(model.empty_cache(), b["latents"][:, :, :2], b["text_global"])
    with pytest.raises(ValueError, match="1 latents, must have 2"):
        model.append(by_block(model, b), b["latents"][:, :, :1], b["text_global"])
    with pytest.raises(ValueError, match="empty"):
        model.sample(model.empty_cache(), b["text_global"], generator=seeded())
