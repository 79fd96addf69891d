"""What can go wrong with a probe."""

from __future__ import annotations

from veca.errors import VecaError


class ProbeError(VecaError, ValueError):
    """A probe that cannot be run as asked: a protocol, a cache, data or settings do not fit."""
