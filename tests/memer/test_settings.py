"""Checks of values that users give by name."""

import pytest

from memer.errors import UsageError
from memer.settings import check_count, check_positive, check_share


@pytest.mark.parametrize("value", [0, 17, "3", 1.5, None, True])
def test_a_count_is_a_whole_number_within_bounds(value):
    with pytest.raises(UsageError, match=r"replan: .*, must be .*in 1\.\.16, the horizon"):
        check_count("replan", value, least=1, most=16, note=", the horizon")


@pytest.mark.parametrize("value", [0, 1, 2, -0.1, "x", None, True])
def test_a_share_lies_between_0_and_1(value):
    with pytest.raises(UsageError, match=r"tau: .*, must be a number between 0 and 1"):
        check_share("tau", value)


@pytest.mark.parametrize("value", [0, -1, 0.0, float("nan"), "x", None, True])
def test_a_weight_is_above_0(value):
    with pytest.raises(UsageError, match=r"view\.start_weight: .*, must be positive"):
        check_positive("view.start_weight", value)
