"""Flow matching: times, integration, both predictions, masked losses (MaP-WAM specification, section 2)."""

import math
from itertools import pairwise

import pytest
import torch

from memer.errors import UsageError
from memer.flow import (
    euler_times,
    integrate,
    interpolate,
    loss_weight,
    masked_mse,
    sample_time,
    shift_time,
    to_velocity,
    velocity,
)


def draws(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def test_the_times_of_ten_steps():
    expected = [1, 0.9783, 0.9524, 0.9211, 0.8824, 0.8333, 0.7692, 0.6818, 0.5556, 0.3571, 0]
    assert euler_times(10, shift=5.0) == pytest.approx(expected, abs=5e-5)
    assert euler_times(4, shift=1.0) == [1.0, 0.75, 0.5, 0.25, 0.0]
    with pytest.raises(ValueError, match="n: 0"):
        euler_times(0)


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_the_true_velocity_leads_from_noise_to_data(steps):
    data, noise = draws(2, 3, 4)
    found = integrate(lambda y, t: velocity(data, noise), noise, euler_times(steps))
    torch.testing.assert_close(found, data, rtol=0, atol=2e-6)


def test_a_field_that_is_linear_in_time_is_summed_step_by_step():
    # v(t) = t: each Euler step takes the value at its start, so the sum is known in closed form.
    times = euler_times(4)
    found = integrate(lambda y, t: torch.full_like(y, t), torch.zeros(1), times)
    assert found.item() == pytest.approx(sum((b - a) * a for a, b in pairwise(times)))


def test_several_tensors_share_their_times():
    data, noise = draws(2, 16, 4)
    other_data, other_noise = draws(2, 16, 1, seed=1)
    seen: list[float] = []

    def field(y: tuple[torch.Tensor, ...], t: float) -> tuple[torch.Tensor, ...]:
        seen.append(t)
        return velocity(data, noise), velocity(other_data, other_noise)

    first, second = integrate(field, (noise, other_noise), euler_times(4))
    torch.testing.assert_close(first, data, rtol=0, atol=2e-6)
    torch.testing.assert_close(second, other_data, rtol=0, atol=2e-6)
    assert seen == euler_times(4)[:-1]


@pytest.mark.parametrize("t", [0.05, 0.3, 0.8333, 1.0])
def test_both_predictions_agree_for_a_perfect_model(t):
    data, noise = draws(2, 5)
    shown = interpolate(data, noise, t)
    as_data = to_velocity(data, shown, t, kind="data")
    as_velocity = to_velocity(velocity(data, noise), shown, t, kind="velocity")
    torch.testing.assert_close(as_data, as_velocity, rtol=0, atol=2e-5)


def test_a_predicted_sample_is_bounded_near_the_data():
    shown, wrong = torch.tensor([1.0]), torch.tensor([0.0])
    assert to_velocity(wrong, shown, 1e-6, kind="data").item() == pytest.approx(1 / 0.05)
    with pytest.raises(UsageError, match="prediction='noise'"):
        to_velocity(wrong, shown, 0.5, kind="noise")  # type: ignore[arg-type]


def test_times_per_sample_and_per_frame_spread_over_the_rest():
    data, noise = torch.zeros(2, 3, 4, 4), torch.ones(2, 3, 4, 4)
    per_sample = interpolate(data, noise, torch.tensor([0.25, 0.5]))
    assert per_sample[0].unique().tolist() == [0.25]
    assert per_sample[1].unique().tolist() == [0.5]
    per_frame = interpolate(data, noise, torch.tensor([[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]]))
    assert per_frame[1, 2, 3, 3].item() == 0.5


def test_a_number_as_time_keeps_the_number_type():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        data = torch.ones(3, dtype=dtype)
        assert interpolate(data, -data, 0.3).dtype == dtype


def test_sampled_times_are_shifted_inside_the_bounds_and_repeatable():
    times = [sample_time((4000,), generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*times)
    assert 0 < times[0].min() < times[0].max() < 1
    assert times[0].median().item() == pytest.approx(5 / 6, abs=0.01)  # s/2 / (1 + (s-1)/2)
    plain = sample_time(4000, generator=torch.Generator().manual_seed(3), shift=1.0)
    torch.testing.assert_close(shift_time(plain, shift=5.0), times[0])


def test_the_weights_of_bsmntw():
    t = torch.tensor([0.5, 0.25, 0.75, 0.9, 0.99, 1.0])
    weights = loss_weight(t, kind="bsmntw").tolist()
    assert weights == pytest.approx([2.08, 1.46, 1.46, 0.63, 0.06, 0.0], abs=5e-3)
    grid = torch.tensor(euler_times(1000)[:-1], dtype=torch.float64)
    assert loss_weight(grid, kind="bsmntw").mean().item() == pytest.approx(1.0, abs=1e-9)
    assert loss_weight(t).tolist() == [1.0] * 6
    with pytest.raises(UsageError, match="weighting='snr'"):
        loss_weight(t, kind="snr")  # type: ignore[arg-type]


def test_weighted_by_data_the_error_is_that_of_the_clean_sample():
    """Up to one constant, whatever the time and whatever the network predicts."""
    data, noise = draws(6, 4)
    wrong = data + 0.1 * draws(6, 4, seed=1)[0]
    t = torch.tensor([0.01, 0.05, 0.3, 0.6, 0.9, 1.0])
    x_t = interpolate(data, noise, t)
    found = to_velocity(wrong, x_t, t, kind="data")
    true = to_velocity(data, x_t, t, kind="data")
    ratio = loss_weight(t, kind="data") * (found - true).square().mean(1) / (wrong - data).square().mean(1)
    assert ratio.tolist() == pytest.approx([ratio[0].item()] * 6, rel=1e-4)
    grid = torch.tensor(euler_times(1000)[:-1], dtype=torch.float64)
    assert loss_weight(grid, kind="data").mean().item() == pytest.approx(1.0, abs=1e-9)


def test_the_masked_error_counts_only_what_is_valid():
    pred, target = torch.zeros(1, 3, 2), torch.tensor([[[1.0, 1.0], [2.0, 2.0], [9.0, 9.0]]])
    valid = torch.tensor([[True, True, False]])
    assert masked_mse(pred, target, valid).item() == pytest.approx((1 + 1 + 4 + 4) / 4)
    weighted = masked_mse(pred, target, valid, weight=torch.tensor([2.0]))
    assert weighted.item() == pytest.approx(2 * (1 + 1 + 4 + 4) / 4)


def test_padding_changes_nothing_and_gets_exactly_no_gradient():
    data, target = draws(2, 4, 3)
    valid = torch.tensor([[True, True, False, False], [True, True, True, False]])
    losses, gradients = [], []
    for filler in (0.0, 1e6, math.nan, math.inf):
        pred = data.clone().requires_grad_()
        losses.append(masked_mse(pred, target.masked_fill(~valid[..., None], filler), valid))
        losses[-1].backward()
        gradients.append(pred.grad)
    for loss, gradient in zip(losses, gradients, strict=True):
        assert torch.equal(loss, losses[0])
        assert gradient is not None
        assert torch.equal(gradient, gradients[0])
        assert torch.equal(gradient[~valid], torch.zeros(3, 3))
        assert bool((gradient[valid] != 0).all())


def test_a_batch_of_padding_costs_zero():
    pred = torch.randn(2, 4, 3).requires_grad_()
    loss = masked_mse(pred, torch.full((2, 4, 3), math.nan), torch.zeros(2, 4, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0
    assert pred.grad is not None
    assert torch.equal(pred.grad, torch.zeros(2, 4, 3))


def test_the_error_is_computed_in_single_precision():
    pred, target = torch.full((4096,), 1.0, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    loss = masked_mse(pred, target, torch.ones(4096, dtype=torch.bool))
    assert loss.dtype == torch.float32
    assert loss.item() == 1.0
