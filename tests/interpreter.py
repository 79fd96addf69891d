"""Triton kernels on machines without a GPU: in Triton's interpreter, slow but the same code."""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch


def prepare() -> None:
    """Import Triton itself so, before any test does: older versions decide then, for good."""
    if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        import_interpreted("triton.language")


def import_interpreted(name: str) -> None:
    """Import a module of kernels so that they are interpreted.

    Triton decides while it is imported. Outside the variable is off again, or other tests would get
    interpreted kernels wherever the dispatcher chooses.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.experimental.gluon")  # or the first launch imports it
    importlib.import_module(name)
    del os.environ["TRITON_INTERPRET"]
