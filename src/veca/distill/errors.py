"""The errors of a distillation run, where 0.1 had them; they are defined in `veca.errors`."""

from veca.errors import DistillError, DivergedError

__all__ = ["DistillError", "DivergedError"]
