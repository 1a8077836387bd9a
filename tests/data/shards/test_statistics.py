import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.shards.statistics import Moments
from memer.errors import MemerError


@pytest.mark.parametrize("cuts", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_large_offset_keeps_its_spread_however_cut(cuts: list[int]) -> None:
    rows = np.float32([[20000], [20001], [20002]])
    ends = np.cumsum(cuts)
    parts = [Moments.of(rows[end - cut : end]) for cut, end in zip(cuts, ends, strict=True)]
    combined = Moments.combine(parts)
    assert combined.std[0] == pytest.approx(0.816497, abs=1e-6)
    assert combined.mean[0] == 20001
    assert (combined.least[0], combined.greatest[0], combined.count) == (20000, 20002, 3)


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=40),
    st.lists(st.integers(1, 39), max_size=5),
)
def test_combining_equals_the_whole(values: list[float], cuts: list[int]) -> None:
    rows = np.float32(values)[:, None]
    parts = [part for part in np.split(rows, sorted({c for c in cuts if c < len(rows)})) if len(part)]
    combined = Moments.combine(Moments.of(part) for part in parts)
    whole = rows.astype(np.float64)
    scale = float(np.abs(whole).max()) + 1
    assert combined.mean[0] == pytest.approx(whole.mean(), abs=1e-12 * scale)
    assert combined.std[0] == pytest.approx(whole.std(), abs=1e-7 * scale)


def test_written_moments_are_read_back_bit_for_bit() -> None:
    moments = Moments.of(np.random.default_rng(0).normal(size=(7, 3)))
    again = Moments.from_dict(moments.to_dict())
    assert all(np.array_equal(getattr(again, n), getattr(moments, n)) for n in ("mean", "centred", "least"))


def test_different_dimensions_are_refused() -> None:
    with pytest.raises(MemerError, match="2 and 3 dimensions"):
        Moments.combine([Moments.of(np.zeros((4, 2))), Moments.of(np.zeros((4, 3)))])
