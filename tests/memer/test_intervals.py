import numpy as np
import pytest

from memer.intervals import bootstrap_interval, percentiles, wilson_interval


def test_wilson_interval_of_half_of_fifty():
    low, high = wilson_interval(25, 50)
    assert (round(low, 2), round(high, 2)) == (0.37, 0.63)  # stated in spec/runtime.md section 10


def test_wilson_interval_solves_its_equation():
    # The bounds are the shares p with |s/n - p| = z * sqrt(p (1 - p) / n).
    for successes, n in ((0, 10), (3, 10), (97, 100), (20, 20)):
        for bound in wilson_interval(successes, n):
            gap = abs(successes / n - bound)
            assert gap == pytest.approx(1.959964 * np.sqrt(bound * (1 - bound) / n), abs=1e-6)


def test_wilson_interval_without_trials_and_out_of_range():
    assert wilson_interval(0, 0) is None
    with pytest.raises(ValueError, match="11"):
        wilson_interval(11, 10)


def test_bootstrap_needs_two_episodes():
    assert bootstrap_interval([1.0]) is None
    assert bootstrap_interval([0.5, 0.5]) == (0.5, 0.5)


def test_bootstrap_of_two_episodes_takes_their_extremes():
    # Resamples are (a, a), (a, b), (b, a), (b, b): a quarter of them at either end.
    assert bootstrap_interval([0.0, 1.0], resamples=2000) == (0.0, 1.0)


def test_bootstrap_weights_by_denominator():
    # Sum over sum, not mean of ratios: 1/1 and 0/99 give 0.01 together.
    low, high = bootstrap_interval([1, 0], [1, 99])
    assert low == 0.0
    assert high == 1.0
    assert bootstrap_interval([0, 0], [0, 0]) is None


def test_bootstrap_is_seeded():
    values = list(np.random.default_rng(1).random(30))
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_bootstrap_covers_like_the_normal_interval():
    values = np.random.default_rng(0).normal(size=400)
    low, high = bootstrap_interval(list(values))
    assert low == pytest.approx(values.mean() - 1.96 * values.std() / 20, abs=0.03)
    assert high == pytest.approx(values.mean() + 1.96 * values.std() / 20, abs=0.03)


def test_percentiles():
    values = percentiles([float(v) for v in range(101)])
    assert values == {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "mean": 50.0, "max": 100.0}
    assert percentiles([]) is None
