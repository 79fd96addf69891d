"""Triton kernels on machines without a GPU: in Triton's interpreter, slow but the same code."""

from __future__ import annotations

import importlib
import os


def import_interpreted(name: str) -> None:
    """Import a module of kernels so that they are interpreted.

    Triton decides while it is imported. Outside the variable is off again, or other tests would get
    interpreted kernels wherever the dispatcher chooses.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.experimental.gluon")  # or the first launch imports it
    importlib.import_module(name)
    del os.environ["TRITON_INTERPRET"]
