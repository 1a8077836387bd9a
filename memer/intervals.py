"""Intervals beside every published number: Wilson for shares, percentile bootstrap over episodes."""

import math
from collections.abc import Sequence

import numpy as np

#: (low, high)
Interval = tuple[float, float]

_Z95 = 1.959963984540054


def wilson_interval(successes: int, n: int, *, z: float = _Z95) -> Interval | None:
    """Score interval of a share.

    Args:
        successes: 0..n.
        n: trials; 0 gives None.
        z: normal quantile, 1.96 for 95 %.

    Raises:
        ValueError: `successes` lies outside 0..n.

    Source: Wilson 1927, Journal of the American Statistical Association 22.

    >>> [round(bound, 3) for bound in wilson_interval(25, 50)]
    [0.366, 0.634]
    >>> wilson_interval(0, 6)[0], wilson_interval(6, 6)[1]
    (0.0, 1.0)
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes {successes} must lie in 0..{n}")
    if n == 0:
        return None
    share, z2 = successes / n, z * z
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At the ends the bounds are exact; rounding would leave 1e-17 there.
    low = 0.0 if successes == 0 else max(0.0, center - half)
    high = 1.0 if successes == n else min(1.0, center + half)
    return low, high


def bootstrap_interval(
    numerators: Sequence[float],
    denominators: Sequence[float] | None = None,
    *,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval | None:
    """Percentile interval of sum(numerators) / sum(denominators), resampling episodes with replacement.

    Args:
        numerators: one value per episode.
        denominators: one value per episode; None: all 1, which gives the interval of the mean.
        resamples: number of resamples.
        seed: of the resampling.
        level: coverage.

    Returns:
        None for fewer than two episodes, or when the denominators sum to 0 in every resample. Resamples whose
        denominators sum to 0 are left out.
    """
    top = np.asarray(numerators, dtype=np.float64)
    bottom = np.ones_like(top) if denominators is None else np.asarray(denominators, dtype=np.float64)
    if len(top) != len(bottom):
        raise ValueError(f"{len(top)} numerators for {len(bottom)} denominators")
    if len(top) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(top), size=(resamples, len(top)))
    weight = bottom[drawn].sum(axis=1)
    used = weight > 0
    if not used.any():
        return None
    values = top[drawn].sum(axis=1)[used] / weight[used]
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p95, p99, mean and max; None without values.

    >>> percentiles([1.0, 2.0, 3.0])["p50"]
    2.0
    """
    if not len(values):
        return None
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = (float(q) for q in np.quantile(array, [0.5, 0.9, 0.95, 0.99]))
    return {
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "mean": float(array.mean()),
        "max": float(array.max()),
    }
