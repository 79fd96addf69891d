"""Dataclasses from tables and back: type-checked, unknown names refused, written as TOML.

Knows nothing of distillation; `config` holds the settings themselves.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from veca.errors import DistillError, MissingExtraError, VecaError, suggest

T = TypeVar("T")


def from_table(cls: type[T], table: object, where: str = "") -> T:
    """An instance of the dataclass `cls` from a table of plain values.

    `where` is the table's own name ("optimizer"), for messages.
    """
    if not isinstance(table, Mapping):
        raise DistillError(f"{where or 'the settings'} must be a table of settings, got {table!r}.")
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values = {}
    for name, value in table.items():
        label = f"{where}.{name}" if where else str(name)
        if name not in known:
            place = f" in [{where}]" if where else ""
            raise DistillError(f"unknown setting{place} {suggest(str(name), known)}")
        values[name] = _convert(hints[name], value, label)
    missing = [
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise DistillError(f"[{where}] lacks the setting {missing[0]!r}.")
    try:
        return cls(**values)
    except VecaError as error:
        if isinstance(error, DistillError):
            raise
        raise DistillError(str(error)) from error


def to_table(settings: Any) -> dict[str, Any]:
    """Plain values of JSON and TOML, in the order of the fields; None is left out."""
    table = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not None:
            table[field.name] = _plain(value)
    return table


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_table(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


# ---------------------------------------------------------------------------------- conversion


def _convert(hint: Any, value: Any, label: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        options = [option for option in args if option is not type(None)]
        return None if value is None else _convert(options[0], value, label)
    if dataclasses.is_dataclass(hint):
        return from_table(hint, value, label)  # type: ignore[arg-type]
    if origin is tuple:
        return _sequence(args, value, label)
    if origin in (dict, Mapping):
        return _mapping(args, value, label)
    return _scalar(hint, value, label)


def _sequence(args: tuple[Any, ...], value: Any, label: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DistillError(f"{label} must be a list, got {value!r}.")
    if len(args) == 2 and args[1] is Ellipsis:
        hints: Sequence[Any] = [args[0]] * len(value)
    else:
        hints = args
    if len(hints) != len(value):
        raise DistillError(f"{label} must be a list of {len(hints)}, got {value!r}.")
    return tuple(
        _convert(hint, item, f"{label}.{i}")
        for i, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _mapping(args: tuple[Any, ...], value: Any, label: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise DistillError(f"{label} must be a table, got {value!r}.")
    result = {}
    for key, item in value.items():
        if args[0] is int:
            if not re.fullmatch(r"\d+", str(key)):
                raise DistillError(f"{label} must have whole numbers as names, got {key!r}.")
            key = int(key)
        result[key] = _convert(args[1], item, f"{label}.{key}")
    return result


def _scalar(hint: Any, value: Any, label: str) -> Any:
    if hint is bool:
        if not isinstance(value, bool):
            raise DistillError(f"{label} must be true or false, got {value!r}.")
        return value
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise DistillError(f"{label} must be a whole number, got {value!r}.")
        return value
    if hint is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise DistillError(f"{label} must be a finite number, got {value!r}.")
        return float(value)
    if not isinstance(value, str):
        raise DistillError(f"{label} must be text in quotes, got {value!r}.")
    return value


# ---------------------------------------------------------------------------------------- TOML


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text; `where` names it in messages."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef,import-not-found]
        except ImportError:
            raise MissingExtraError(
                "reading TOML settings on Python 3.10 needs tomli; install it with: "
                "pip install tomli"
            ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DistillError(f"{where} is not valid TOML ({error}).") from error


def override(table: dict[str, Any], assignment: str) -> None:
    """Change one value of nested tables by "optimizer.lr=1e-3" or "teachers.0.weight=2".

    The value is read as TOML; what is not TOML is taken as text, so quotes can be left out.
    """
    name, equals, text = assignment.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise DistillError(
            f"an override is written section.name=value, such as optimizer.lr=1e-3; got "
            f"{assignment!r}."
        )
    try:
        value: Any = parse_toml(f"value = {text}", "the value")["value"]
    except DistillError:
        value = text.strip()
    inner: Any = table
    for i, part in enumerate(path[:-1]):
        inner = _enter(inner, part, ".".join(path[: i + 1]))
    if isinstance(inner, list):
        inner[_place(inner, path[-1], name)] = value
    else:
        inner[path[-1]] = value


def _enter(inner: Any, part: str, label: str) -> Any:
    if isinstance(inner, list):
        return inner[_place(inner, part, label)]
    found = inner.setdefault(part, {})
    if not isinstance(found, (dict, list)):
        raise DistillError(f"{label} is one value, not a table; it has nothing inside to set.")
    return found


def _place(items: list[Any], part: str, label: str) -> int:
    if not re.fullmatch(r"\d+", part) or int(part) >= len(items):
        raise DistillError(f"{label}: expected a number from 0 to {len(items) - 1}, got {part!r}.")
    return int(part)


def to_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """TOML text of nested tables of plain values."""
    lines: list[str] = []
    tables: list[tuple[str, Any]] = []
    for name, value in table.items():
        many = isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value)
        if many or isinstance(value, Mapping):
            tables.append((name, value))
        else:
            lines.append(f"{_key(name)} = {_value(value)}")
    text = "".join(f"{line}\n" for line in lines)
    for name, value in tables:
        label = f"{prefix}{_key(name)}"
        for one in value if isinstance(value, list) else [value]:
            header = f"[[{label}]]" if isinstance(value, list) else f"[{label}]"
            text += f"\n{header}\n{to_toml(one, f'{label}.')}"
    return text


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
