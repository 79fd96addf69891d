"""What goes wrong with a distillation run."""

from __future__ import annotations

from veca.errors import VecaError


class DistillError(VecaError, ValueError):
    """A distillation that cannot start or go on as asked."""


class DivergedError(DistillError, RuntimeError):
    """The loss became NaN or infinite; the run stopped and kept its last good checkpoint."""
