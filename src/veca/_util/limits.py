"""Limits of settings, stated beside the field: `steps: Annotated[int, at_least(1)]`."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

from veca.errors import VecaError, suggest

Limit = Callable[[str, Any], "str | None"]
"""(name, value) -> what is wrong with the value, as a sentence; None if nothing is."""


def at_least(low: float) -> Limit:
    return lambda name, value: (
        f"{name} must be at least {low}, got {value}." if value < low else None
    )


def above_zero(name: str, value: float) -> str | None:
    return f"{name} must be above 0, got {value}." if value <= 0 else None


def between(low: float, high: float) -> Limit:
    return lambda name, value: (
        None if low <= value <= high else f"{name} must be from {low} to {high}, got {value}."
    )


def ordered(*, above: float = -math.inf, most: float = math.inf) -> Limit:
    """A pair (low, high), within `above` < low <= high <= `most`."""
    return lambda name, pair: (
        None
        if above < pair[0] <= pair[1] <= most
        else f"{name} must be [low, high], got {list(pair)}."
    )


def one_of(known: Iterable[str]) -> Limit:
    return lambda name, value: (
        None if value in known else f"unknown {name} {suggest(str(value), known)}"
    )


Whole = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
NotNegative = Annotated[float, at_least(0)]


def check_limits(settings: Any, error: type[VecaError], name: str = "") -> None:
    """Raise `error` if a value of a dataclass, or of one inside it, is outside its limits.

    Args:
        name: what the settings are called in messages: "optimizer" for "optimizer.lr".
    """
    for fault in _faults(type(settings), settings, name):
        raise error(fault)


def _faults(hint: Any, value: Any, name: str) -> Iterator[str]:
    if typing.get_origin(hint) is Annotated:
        hint, *limits = typing.get_args(hint)
        yield from filter(None, (limit(name, value) for limit in limits))
    inside = typing.get_args(hint)
    if dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(type(value), include_extras=True)
        for field in dataclasses.fields(value):
            full = f"{name}.{field.name}" if name else field.name
            yield from _faults(hints[field.name], getattr(value, field.name), full)
    elif isinstance(value, Mapping) and inside:
        for key, item in value.items():
            yield from _faults(inside[1], item, f"{name}.{key}")
    elif isinstance(value, tuple) and inside:
        for i, item in enumerate(value):
            one = inside[0] if inside[-1] is Ellipsis else inside[i]
            yield from _faults(one, item, f"{name}.{i}" if dataclasses.is_dataclass(item) else name)
