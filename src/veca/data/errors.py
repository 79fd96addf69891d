"""What goes wrong with image sets."""

from __future__ import annotations

from veca.errors import VecaError


class DataError(VecaError, ValueError):
    """An image set that cannot be found, read, trusted or split as asked."""


class BadImageError(DataError):
    """One image of a set that cannot be read; a loader skips and counts it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple[type[BadImageError], tuple[str, str]]:
        return type(self), (self.name, self.reason)
