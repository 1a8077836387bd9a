"""Actions and states in the models' units: normalised with the training data's statistics, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from memer.errors import MemerError

#: Least deviation (or half range), in the feature's units: a channel that never moves must not be blown up.
FLOOR = 1e-4

_Values = TypeVar("_Values", NDArray[np.float32], torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizer:
    """Shift and scale per dimension, bounded.

    Attributes:
        feature: name, for messages.
        offset: D numbers, the feature's units: mean, or middle of the range.
        scale: D numbers > 0, the feature's units: deviation, or half the range.
        clamp: normalised values stay within -clamp..clamp, both ways.
    """

    feature: str
    offset: tuple[float, ...]
    scale: tuple[float, ...]
    clamp: float

    @classmethod
    def from_statistics(
        cls,
        statistics: Mapping[str, Sequence[float]],
        *,
        mode: Literal["zscore", "minmax"] = "zscore",
        clamp: float = 5.0,
        feature: str,
    ) -> "Normalizer":
        """Read the statistics of one feature, as `Contract.statistics[feature]` holds them.

        Args:
            statistics: `mean` and `std` (zscore) or `min` and `max` (minmax), D numbers each.
            mode: `zscore` subtracts the mean and divides by the deviation; `minmax` maps the range to -1..1.
            clamp: bound of normalised values.
            feature: name, for messages.

        Raises:
            MemerError: statistics are missing, of different lengths, or not finite.
        """
        low, high = ("mean", "std") if mode == "zscore" else ("min", "max")
        for key in (low, high):
            if not len(statistics.get(key, ())):
                raise MemerError(
                    f"statistics of {feature}: no {key}, which normalisation {mode} needs; "
                    "build the shards again, their contract carries the statistics"
                )
        first, second = tuple(map(float, statistics[low])), tuple(map(float, statistics[high]))
        if len(first) != len(second):
            raise MemerError(
                f"statistics of {feature}: {low} has {len(first)} dimensions, {high} {len(second)}"
            )
        for key, numbers in ((low, first), (high, second)):
            _check_finite(np.array(numbers), f"statistics of {feature}: {key}")
        if mode == "zscore":
            offset, scale = first, second
        else:
            offset = tuple((a + b) / 2 for a, b in zip(first, second, strict=True))
            scale = tuple((b - a) / 2 for a, b in zip(first, second, strict=True))
        return cls(
            feature=feature, offset=offset, scale=tuple(max(s, FLOOR) for s in scale), clamp=float(clamp)
        )

    @property
    def dim(self) -> int:
        """D."""
        return len(self.offset)

    def normalize(self, values: _Values) -> _Values:
        """[..., D] in the feature's units as float32[..., D] within -clamp..clamp.

        Raises:
            MemerError: another last dimension, or a value is not finite.
        """
        offset, scale, values = self._prepared(values)
        return ((values - offset) / scale).clip(-self.clamp, self.clamp)

    def denormalize(self, values: _Values) -> _Values:
        """Normalised [..., D], bounded to -clamp..clamp, as float32[..., D] in the feature's units.

        Raises:
            MemerError: another last dimension, or a value is not finite: such an action must reach no robot.
        """
        offset, scale, values = self._prepared(values)
        return values.clip(-self.clamp, self.clamp) * scale + offset

    def _prepared(self, values: _Values) -> tuple[_Values, _Values, _Values]:
        """(offset, scale, values), all of one kind, float32, on the values' device."""
        if values.ndim == 0 or values.shape[-1] != self.dim:
            raise MemerError(
                f"{self.feature}: shape {tuple(values.shape)}, the statistics have {self.dim} dimensions"
            )
        if isinstance(values, torch.Tensor):
            if not bool(torch.isfinite(values).all()):
                _check_finite(values.detach().float().cpu().numpy(), self.feature)
            numbers = values.to(torch.float32)
            return numbers.new_tensor(self.offset), numbers.new_tensor(self.scale), numbers
        _check_finite(values, self.feature)
        offset, scale = (np.array(part, dtype=np.float32) for part in (self.offset, self.scale))
        return offset, scale, values.astype(np.float32)


def _check_finite(values: NDArray[np.floating], where: str) -> None:
    if not np.isfinite(values).all():
        place = np.argwhere(~np.isfinite(values))[0]
        raise MemerError(f"{where}: {values[tuple(place)]} in dimension {place[-1]}, must be finite")
