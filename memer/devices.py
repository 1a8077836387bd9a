"""Devices by name, as users give them."""

import torch

from memer.errors import SourceUnavailableError, UsageError


def checked_device(name: str) -> str:
    """A device that this machine has.

    Args:
        name: `cpu`, `cuda`, `cuda:1`.

    Raises:
        UsageError: no such kind of device.
        SourceUnavailableError: this machine, or this build of torch, does not have it.

    >>> checked_device("cpu")
    'cpu'
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UsageError(f"device: {name!r}, must be cpu or cuda") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise SourceUnavailableError(f"device: {name!r} is not there ({reason}); use device=cpu") from None
    return name
