"""The errors of an export, where 0.1 had them; they are defined in `veca.errors`."""

from veca.errors import ExportError

__all__ = ["ExportError"]
