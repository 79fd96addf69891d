"""torch.compile for what meets many shapes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

_LIMITS: dict[str, Any] = {"recompile_limit": 2**16, "accumulated_recompile_limit": 2**20}


def many_shapes() -> AbstractContextManager[object]:
    """What is called in it may compile for any number of shapes.

    torch.compile else gives up after 8: merging alone makes four of one.
    """
    return torch._dynamo.config.patch(**_LIMITS)
