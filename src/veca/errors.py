"""The exceptions users see. Each message says what was wrong, what was expected and what to do.

Every class also derives from the built-in exception a Python user would guess, so code that
catches `ValueError` keeps working; `VecaError` catches everything this package raises on purpose.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable


class VecaError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(VecaError, ValueError):
    """A configuration that does not describe a model."""


class InputError(VecaError, ValueError):
    """A tensor, budget or option that a model or an operation cannot take."""


class ImageError(VecaError, ValueError):
    """An image that cannot be read or fitted to the patch grid."""


class WeightsError(VecaError, ValueError):
    """A weights file or folder that cannot be found, read, trusted or written."""


class OutputError(VecaError, OSError):
    """A result that cannot be written where it was asked for."""


class MissingExtraError(VecaError, ImportError):
    """An optional dependency that this feature needs is not installed."""


def whole(value: object) -> int | None:
    """The whole number that `value` is, NumPy's among them; None if it is anything else.

    Neither Python's or NumPy's bools nor floats count, whatever their value.
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def at_least(name: str, value: object, least: int = 1) -> int:
    """`value`, called `name`, if it is a whole number of at least `least`."""
    number = whole(value)
    if number is None or number < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    return number


def suggest(name: str, known: Iterable[str]) -> str:
    """`name` in quotes, the nearest known name and all of them, for "unknown ..." messages."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{name!r}{hint} Known: {', '.join(known)}."
