"""In place of `fused` where a model's code travels with its weights: that brings no kernels."""

from __future__ import annotations

from torch import Tensor

_WHY = "they come with the package veca, not with the code beside the weights"


def unavailable(*_: object) -> str:
    """Why the kernels cannot run."""
    return _WHY


def unsupported(*_: object) -> str:
    """Why the kernels cannot take these tensors."""
    return _WHY


def core_attention(*_: object) -> Tensor:
    """Never chosen: the kernels are not available."""
    raise NotImplementedError(_WHY)
