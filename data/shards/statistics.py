"""Mean and spread of state and action that do not depend on how the data are cut."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memer.errors import MemerError


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and centred sum of squares per dimension, in float64.

    Attributes:
        count: rows seen.
        mean: float64[D].
        centred: float64[D], sum of (x - mean)^2 over the rows.
        least: float64[D], smallest value.
        greatest: float64[D], largest value.

    Source: parallel form of Chan, Golub and LeVeque (1979); no difference of large squares anywhere.

    >>> parts = [Moments.of([[20000.0]]), Moments.of([[20001.0], [20002.0]])]
    >>> round(float(Moments.combine(parts).std[0]), 6)
    0.816497
    """

    count: int
    mean: NDArray[np.float64]
    centred: NDArray[np.float64]
    least: NDArray[np.float64]
    greatest: NDArray[np.float64]

    @classmethod
    def of(cls, rows: ArrayLike) -> "Moments":
        """Moments of rows [T, D], T >= 1."""
        values = np.asarray(rows, dtype=np.float64)
        mean = values.mean(axis=0)
        return cls(
            len(values), mean, ((values - mean) ** 2).sum(axis=0), values.min(axis=0), values.max(axis=0)
        )

    @classmethod
    def combine(cls, parts: Iterable["Moments"], *, what: str = "statistics") -> "Moments":
        """Moments of all rows together, combined in the order given.

        Raises:
            MemerError: the parts have different numbers of dimensions, or there is no part.
        """
        total: Moments | None = None
        for part in parts:
            if total is None:
                total = part
                continue
            if total.mean.shape != part.mean.shape:
                raise MemerError(
                    f"{what}: {total.mean.shape[0]} and {part.mean.shape[0]} dimensions cannot be combined; "
                    "choose one source's statistics by name"
                )
            count = total.count + part.count
            delta = part.mean - total.mean
            total = cls(
                count,
                total.mean + delta * (part.count / count),
                total.centred + part.centred + delta**2 * (total.count * part.count / count),
                np.minimum(total.least, part.least),
                np.maximum(total.greatest, part.greatest),
            )
        if total is None:
            raise MemerError(f"{what}: no rows")
        return total

    @property
    def std(self) -> NDArray[np.float64]:
        """float64[D], population standard deviation."""
        return np.sqrt(self.centred / self.count)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values that `from_dict` reads back bit for bit."""
        return {
            "count": self.count,
            "mean": self.mean.tolist(),
            "centred": self.centred.tolist(),
            "min": self.least.tolist(),
            "max": self.greatest.tolist(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Moments":
        """Read what `to_dict` wrote."""
        arrays = (np.asarray(values[name], dtype=np.float64) for name in ("mean", "centred", "min", "max"))
        return cls(int(values["count"]), *arrays)

    def contract_entry(self) -> dict[str, tuple[float, ...]]:
        """The form of `Contract.statistics`: mean, std, min, max."""
        return {
            "mean": tuple(self.mean.tolist()),
            "std": tuple(self.std.tolist()),
            "min": tuple(self.least.tolist()),
            "max": tuple(self.greatest.tolist()),
        }
