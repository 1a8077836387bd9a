"""The causal world model: a perfect transformer, options, errors."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from memer.errors import UsageError
from memer.flow import euler_times
from models.cwm import CausalWorldModel, EvidenceCache
from models.wan import CausalWan, tiny_config
from tests.models.small_cwm import C, H, W, batch, by_block, frame_tokens, make_model, seeded, states, watched

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


@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.parametrize("prediction", ["data", "velocity"])
def test_a_perfect_model_samples_the_truth(prediction: Any, steps: int) -> None:
    model, b = make_model(prediction=prediction), batch()
    truth = b["latents"][:, :, -2:]
    drawn = torch.randn(truth.shape, generator=seeded())  # the noise that `sample` will draw
    model.transformer.__class__ = Oracle
    model.transformer.answer = truth if prediction == "data" else drawn - truth
    cache = by_block(model, b)
    found = model.sample(cache, b["text_plan"][:, 2], steps=steps, generator=seeded())
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)
    assert euler_times(steps)[-2] > 0.05  # else the divisor's bound would show


# -- options -----------------------------------------------------------------------------------------------


def test_current_only_is_an_image_to_video_model_under_the_plan_text() -> None:
    model, b = watched(visual_plan="current_only"), batch(num=1)
    before = states(model, b)
    assert torch.equal(before, states(model, {**b, "text_global": b["text_global"] + 1}))
    cache = model.append(EvidenceCache(), b["latents"][:, :, :1], b["text_plan"][:, 0])
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
        model.append(EvidenceCache(), b["latents"][:, :, :2], b["text_global"])
    with pytest.raises(ValueError, match="1 latents, must have 2"):
        model.append(by_block(model, b), b["latents"][:, :, :1], b["text_global"])
    with pytest.raises(ValueError, match="empty"):
        model.sample(EvidenceCache(), b["text_global"], generator=seeded())
