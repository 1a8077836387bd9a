"""Normalisation: both ways, both modes, both array kinds; constant channels; what is wrong is named."""

import numpy as np
import pytest
import torch

from memer.errors import MemerError
from memer.normalize import FLOOR, Normalizer

STATISTICS = {
    "mean": (1.0, -2.0, 0.5),
    "std": (2.0, 0.5, 0.0),
    "min": (-3.0, -4.0, 0.5),
    "max": (5.0, 0.0, 0.5),
}


def make(mode: str = "zscore", clamp: float = 5.0) -> Normalizer:
    return Normalizer.from_statistics(STATISTICS, mode=mode, clamp=clamp, feature="action")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["zscore", "minmax"])
def test_values_come_back(mode):
    values = np.random.default_rng(0).uniform((-3, -4, 0.5), (5, 0, 0.5), (4, 7, 3)).astype(np.float32)
    normalizer = make(mode)
    there = normalizer.normalize(values)
    np.testing.assert_allclose(normalizer.denormalize(there), values, atol=1e-5)
    tensor = normalizer.normalize(torch.from_numpy(values))
    assert (there.dtype, tensor.dtype) == (np.float32, torch.float32)
    np.testing.assert_allclose(tensor.numpy(), there, atol=1e-6)
    np.testing.assert_allclose(normalizer.denormalize(tensor).numpy(), values, atol=1e-5)


def test_the_modes_scale_as_they_say():
    assert make().normalize(np.array([3.0, -2.5, 0.5])).tolist() == [1.0, -1.0, 0.0]
    assert make("minmax").normalize(np.array([5.0, -4.0, 0.5])).tolist() == [1.0, -1.0, 0.0]


def test_a_constant_channel_is_not_blown_up():
    normalizer = make()
    assert normalizer.scale[2] == FLOOR
    assert abs(normalizer.normalize(np.array([1.0, -2.0, 0.5 + 1e-7]))[2]) < 0.01
    assert normalizer.denormalize(np.array([0.0, 0.0, 1.0]))[2] == pytest.approx(0.5, abs=2 * FLOOR)


def test_values_are_bounded_both_ways():
    normalizer = make(clamp=2.0)
    assert normalizer.normalize(np.array([100.0, -100.0, 0.5])).tolist() == [2.0, -2.0, 0.0]
    assert normalizer.denormalize(np.array([100.0, -100.0, 0.0])).tolist() == [5.0, -3.0, 0.5]


def test_gradients_and_arguments_survive():
    values = torch.ones(2, 3, requires_grad=True)
    make().normalize(values).sum().backward()
    assert values.grad is not None
    source = np.zeros(3, dtype=np.float32)
    make().normalize(source)
    assert source.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"std": None}, "statistics of action: no std, which normalisation zscore needs"),
        ({"std": (1.0, 1.0)}, "statistics of action: mean has 3 dimensions, std 2"),
        ({"mean": (0.0, float("nan"), 0.0)}, "statistics of action: mean: nan in dimension 1"),
    ],
)
def test_bad_statistics_are_named(change, message):
    statistics = {key: value for key, value in {**STATISTICS, **change}.items() if value is not None}
    with pytest.raises(MemerError, match=message):
        Normalizer.from_statistics(statistics, mode="zscore", feature="action")


def test_bad_values_name_feature_and_dimension():
    with pytest.raises(MemerError, match=r"action: shape \(4, 2\), the statistics have 3 dimensions"):
        make().normalize(np.zeros((4, 2)))
    for values in (np.array([0.0, np.inf, 0.0]), torch.tensor([0.0, float("inf"), 0.0])):
        with pytest.raises(MemerError, match="action: inf in dimension 1"):
            make().denormalize(values)
