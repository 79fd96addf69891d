"""The device a user asks for, checked to be there."""

from __future__ import annotations

import torch

from veca.errors import InputError


def usable_device(device: str | torch.device) -> torch.device:
    """`device` as torch has it; one that does not exist here is an error that says so."""
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"device {str(device)!r} cannot be used here ({reason}); use cpu, cuda or mps."
        ) from error
    return place
