"""The errors of image sets, where 0.1 had them; they are defined in `veca.errors`."""

from veca.errors import BadImageError, DataError, TooManyBadError

__all__ = ["BadImageError", "DataError", "TooManyBadError"]
