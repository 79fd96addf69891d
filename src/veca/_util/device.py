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
        raise InputError(
            f"device {str(device)!r} cannot be used here ({_reason(str(device), error)}); use "
            f"{' or '.join(_present())}."
        ) from error
    return place


def _reason(name: str, error: Exception) -> str:
    """Why not, in words where torch's own are about its insides."""
    kind = name.partition(":")[0]
    if kind == "cuda" and not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    if kind == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU"
    if kind == "mps" and not torch.backends.mps.is_available():
        return "torch sees no GPU of Apple's"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _present() -> list[str]:
    """What can be asked for on this machine."""
    names = ["cpu"]
    if torch.cuda.is_available():
        last = torch.cuda.device_count() - 1
        names.append(f"cuda:0 to cuda:{last}" if last > 0 else "cuda")
    if torch.backends.mps.is_available():
        names.append("mps")
    return names
