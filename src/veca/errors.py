"""The exceptions users see. Each message says what was wrong, what was expected and what to do.

Every class also derives from the built-in exception a Python user would guess, so code that
catches `ValueError` keeps working; `VecaError` catches everything this package raises on purpose.
"""

from __future__ import annotations

import difflib
import operator
import reprlib
from collections.abc import Collection, Iterable, Sequence

_LONGEST = 200
"""Characters of a name that a message repeats."""
_LISTED = 40
"""So many known names fit into a message."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 120, 120, 60


class VecaError(Exception):
    """Base of every error this package raises on purpose."""


class VecaWarning(UserWarning):
    """Something that works and may not be what was meant; one line on the command line."""


class ConfigError(VecaError, ValueError):
    """A configuration that does not describe a model."""


class InputError(VecaError, ValueError):
    """A tensor, budget or option that a model or an operation cannot take."""


class OutputKeyError(InputError, KeyError):
    """A part that the output of a model does not have."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class ImageError(VecaError, ValueError):
    """An image that cannot be read or fitted to the patch grid."""


class WeightsError(VecaError, ValueError):
    """A weights file or folder that cannot be found, read, trusted or written."""


class CoreMemoryError(VecaError, ValueError):
    """A core memory that cannot be read or written, or that belongs to other weights."""


class LargeError(VecaError, ValueError):
    """A large picture that cannot be read, or a pass over one that cannot start or go on."""


class OutputError(VecaError, OSError):
    """A result that cannot be written where it was asked for."""


class AlreadyThereError(OutputError):
    """A result that is there already, made in the same way; nothing is left to do."""


class MissingExtraError(VecaError, ImportError):
    """An optional dependency that this feature needs is not installed."""


class DataError(VecaError, ValueError):
    """An image set that cannot be found, read, trusted or split as asked."""


class BadImageError(DataError):
    """One image of a set that cannot be read; a loader skips and counts it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple[type[BadImageError], tuple[str, str]]:
        return type(self), (self.name, self.reason)


class SourceError(DataError, ImageError):
    """Images to embed that are not there: a missing file, a folder without images."""


class TooManyBadError(DataError):
    """More bad images than a run may skip; `bad` lists all of them as (name, reason)."""

    def __init__(self, message: str, bad: Sequence[tuple[str, str]]) -> None:
        super().__init__(message)
        self.bad = list(bad)


class TeacherError(VecaError, ValueError):
    """A teacher that cannot be found, fetched, loaded or run as asked."""


class DistillError(VecaError, ValueError):
    """A distillation that cannot start or go on as asked."""


class CheckpointError(DistillError):
    """A checkpoint of a distillation that is damaged or not complete; the message says where."""


class DivergedError(DistillError, RuntimeError):
    """The loss became NaN or infinite; the run stopped and kept its last good checkpoint."""


class ProbeError(VecaError, ValueError):
    """A probe that cannot be run as asked: a protocol, a cache, data or settings do not fit."""


class DatasetError(VecaError, ValueError):
    """A dataset that is not there, not complete, or not what it says; the message names the file.

    `missing` holds every absent file or folder, relative to the root, where that was the fault.
    """

    def __init__(self, message: str, *, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class GateError(WeightsError):
    """Weights in int8 that agree too little with those they were made from."""


class ExportError(VecaError, RuntimeError):
    """A model that cannot be exported, or a file that does not do what the model does."""


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
        raise InputError(f"{name} must be a whole number of at least {least}, got {shown(value)}.")
    return number


def shown(value: object) -> str:
    """`value` for a message: short, and whatever a file made of it.

    A number of 10,000 digits has no `repr`, and that of lists inside lists can be without end.
    """
    try:
        return _SHORT.repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def suggest(name: str, known: Iterable[str]) -> str:
    """`name` in quotes, the nearest known name and all of them, for "unknown ..." messages.

    Of very many dotted names those of the same section are listed, or else the sections.
    """
    known = sorted(known)
    name = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{name!r}{hint} Known: {', '.join(_nearby(name, known))}."


def _nearby(name: str, known: list[str]) -> list[str]:
    if len(known) <= _LISTED:
        return known
    section = name.partition(".")[0] + "."
    parts = (one.partition(".") for one in known)
    sections = sorted({head + (".*" if dot else "") for head, dot, _ in parts})
    return [one for one in known if one.startswith(section)] or sections


def check_choice(
    what: str, value: object, known: Collection[str], error: type[VecaError] = InputError
) -> None:
    """Raise unless `value` is one of the `known` names of a `what`."""
    try:
        there = value in known
    except TypeError:  # no name has no hash
        there = False
    if not there:
        name = value if isinstance(value, str) else shown(value)
        raise error(f"unknown {what} {suggest(name, known)}")
