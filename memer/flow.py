"""Conditional flow matching: t = 0 is data, t = 1 is noise, velocity = noise - data.

Source: MaP-WAM specification, section 2 (times rho there are t here; networks receive 1000 t).
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor

from memer.errors import UsageError

#: Shift of the time distribution towards noise.
SHIFT = 5.0

#: Least time by which a predicted clean sample is turned into a velocity.
LEAST_TIME = 0.05

Prediction = Literal["velocity", "data"]
Weighting = Literal["none", "bsmntw", "data"]

State = TypeVar("State", Tensor, tuple[Tensor, ...])


def interpolate(data: Tensor, noise: Tensor, t: Tensor | float) -> Tensor:
    """(1 - t) data + t noise.

    Args:
        data: [B, ...].
        noise: like `data`.
        t: 0..1; a number, or a tensor of leading dimensions of `data` ([B], [B, F], ...).

    >>> interpolate(torch.tensor([2.0]), torch.tensor([4.0]), 0.25)
    tensor([2.5000])
    """
    times = _leading(t, data)
    return (1.0 - times) * data + times * noise


def velocity(data: Tensor, noise: Tensor) -> Tensor:
    """noise - data, the derivative of `interpolate` by t."""
    return noise - data


def shift_time(u: Tensor, *, shift: float = SHIFT) -> Tensor:
    """s u / (1 + (s - 1) u): 0 and 1 stay, everything between moves towards noise for s > 1."""
    return shift * u / (1.0 + (shift - 1.0) * u)


def sample_time(
    shape: Sequence[int] | int,
    *,
    generator: torch.Generator | None = None,
    shift: float = SHIFT,
    device: torch.device | str | None = None,
) -> Tensor:
    """Training times, float32[shape] in (0, 1): uniform numbers, shifted.

    Args:
        shape: of the result.
        generator: its device is where the numbers are drawn, so that a run on another device repeats them.
        shift: see `shift_time`.
        device: of the result.
    """
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    drawn_on = generator.device if generator is not None else device
    u = torch.rand(size, generator=generator, device=drawn_on, dtype=torch.float32)
    # rand includes 0, where a clean sample would be asked for its own noise; 2^-25 lies below its grid.
    return shift_time(u.clamp(min=2.0**-25), shift=shift).to(device if device is not None else drawn_on)


def euler_times(n: int, *, shift: float = SHIFT) -> list[float]:
    """The n + 1 times of n Euler steps, from 1 (noise) down to 0 (data).

    Raises:
        ValueError: n is below 1.

    >>> [round(t, 4) for t in euler_times(4)]
    [1.0, 0.9375, 0.8333, 0.625, 0.0]
    """
    if n < 1:
        raise ValueError(f"n: {n}, must be at least one step")
    grid = [1.0 - i / n for i in range(n)] + [0.0]
    return [shift * u / (1.0 + (shift - 1.0) * u) for u in grid]


def integrate(velocity_fn: Callable[[State, float], State], noise: State, times: Sequence[float]) -> State:
    """Follow the velocity from noise to data with Euler steps.

    Args:
        velocity_fn: (y, t) -> velocity at y, of the same form.
        noise: the start; a tensor, or a tuple of tensors that share their times (actions and progress).
        times: descending, see `euler_times`.

    Returns:
        y at the last time, of the form of `noise`.
    """
    y = noise
    for now, following in pairwise(times):
        step = velocity_fn(y, now)
        if isinstance(y, tuple):
            y = tuple(part + (following - now) * v for part, v in zip(y, step, strict=True))
        else:
            y = y + (following - now) * step
    return y


def to_velocity(prediction: Tensor, x_t: Tensor, t: Tensor | float, *, kind: Prediction) -> Tensor:
    """A network's output as a velocity.

    Args:
        prediction: like `x_t`: the velocity, or the clean sample.
        x_t: what the network was shown at time t.
        t: see `interpolate`.
        kind: what the network predicts; `data` gives (x_t - prediction) / max(t, 0.05).
    """
    if kind == "velocity":
        return prediction
    if kind != "data":
        raise UsageError(f"prediction={kind!r}, must be velocity or data")
    return (x_t - prediction) / _leading(t, x_t).clamp(min=LEAST_TIME)


def masked_mse(pred: Tensor, target: Tensor, valid: Tensor, *, weight: Tensor | None = None) -> Tensor:
    """Mean squared error over the valid elements, in fp32; 0 if none is valid.

    Args:
        pred: [B, ...].
        target: like `pred`.
        valid: bool, leading dimensions of `pred` or broadcastable to it; True = use. What is not valid may
            hold anything, even NaN, and gets a gradient of exactly 0.
        weight: per element, leading dimensions of `pred`; see `loss_weight`. The divisor stays the count.

    Returns:
        float32 scalar: sum over valid / number valid.
    """
    use = _leading(valid, pred).expand_as(pred)
    error = torch.where(use, pred.float() - target.float(), 0.0).square()
    if weight is not None:
        error = error * _leading(weight.float(), pred)
    return error.sum() / use.sum().clamp(min=1)


def loss_weight(t: Tensor, *, kind: Weighting = "none", shift: float = SHIFT) -> Tensor:
    """Weight of a loss at time t, like `t`; mean 1 over the shifted grid of 1,000 times.

    Args:
        t: 0..1.
        kind: `none` gives 1; `bsmntw` a bell around t = 0.5 that is 0 at both ends; `data` t^2, by which the
            error of the velocity becomes that of the clean sample. A network that predicts clean samples
            and is too narrow to pass the noise needs it: near t = 0 the velocity's error is 1 / t^2 times as
            large, and little else would be learned.
        shift: of the grid.
    """
    if kind == "none":
        return torch.ones_like(t)
    if kind not in ("bsmntw", "data"):
        raise UsageError(f"weighting={kind!r}, must be none, bsmntw or data")
    weigh = _bell if kind == "bsmntw" else _squared
    return weigh(t) / _mean_weight(weigh, shift)


@functools.lru_cache(maxsize=16)
def _mean_weight(weigh: Callable[[Tensor], Tensor], shift: float) -> float:
    """Over the shifted grid of 1,000 times; the same in every step of a training."""
    return weigh(torch.tensor(euler_times(1000, shift=shift)[:-1], dtype=torch.float64)).mean().item()


def _bell(t: Tensor) -> Tensor:
    """exp(-2 (t - 1/2)^2), lowered so that both ends are 0."""
    return torch.exp(-2.0 * (t - 0.5) ** 2) - math.exp(-0.5)


def _squared(t: Tensor) -> Tensor:
    """t^2, with the least time by which `to_velocity` divides."""
    return t.clamp(min=LEAST_TIME) ** 2


def _leading(values: Tensor | float, like: Tensor) -> Tensor:
    """`values` over the leading dimensions of `like`, with ones behind them to broadcast."""
    if not isinstance(values, Tensor):
        return torch.tensor(values, dtype=torch.float64)  # without dimensions: exact, and keeps `like`'s type
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))
