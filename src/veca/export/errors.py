"""What can go wrong with an export."""

from __future__ import annotations

from veca.errors import VecaError


class ExportError(VecaError, RuntimeError):
    """A model that cannot be exported, or a file that does not do what the model does."""
