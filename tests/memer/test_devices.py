"""Devices that users name."""

import pytest
import torch

from memer.devices import checked_device
from memer.errors import SourceUnavailableError, UsageError


@pytest.mark.parametrize("name", ["cdua", "", None])
def test_a_name_that_is_no_device_is_refused(name):
    with pytest.raises(UsageError, match="must be cpu or cuda"):
        checked_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there_is_unavailable():
    with pytest.raises(SourceUnavailableError, match=r"'cuda' is not there .* use device=cpu"):
        checked_device("cuda")
