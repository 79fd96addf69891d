"""Settings: TOML files and tables into dataclasses, type-checked, and back into TOML.

A file may build on another: `extends = "base.toml"`, relative to the file that says so, or the name
of settings that come with the package. Tables merge key by key; lists and single values are
replaced. What a run keeps are the merged settings.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from veca._util.extras import require
from veca._util.files import check_regular
from veca.errors import VecaError, shown, suggest

T = TypeVar("T")
Key = tuple[str, ...]
"""Where a value stands: ("optimizer", "lr")."""

EXTENDS = "extends"
_LARGEST = 2**64 - 1
"""Of whole numbers: the largest seed that torch takes."""


@dataclass
class SettingsTables:
    """Nested tables of plain values, and the files they stand in."""

    table: Any = field(default_factory=dict)
    where: str = ""
    """What they are called in messages: the file that was asked for."""
    files: dict[Key, str] = field(default_factory=dict)
    """The file that had the last word on a key; others are those of `where`."""

    def where_is(self, key: Key) -> str:
        """The file that a key stands in."""
        known = (self.files[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.files)
        return next(known, self.where)

    def put(self, key: Key, value: Any, file: str) -> None:
        """Take over a value of `file`: a table key by key, anything else as it is."""
        inner = self.table
        for part in key[:-1]:
            inner = inner[part]
        table = isinstance(value, dict)
        if not (table and isinstance(inner.get(key[-1]), dict)):
            self.forget(key)
            inner[key[-1]] = {} if table else value
        self.files[key] = file
        for name, item in value.items() if table else ():
            self.put((*key, name), item, file)

    def forget(self, key: Key) -> None:
        """Drop what is known about the files of a key and of what is inside."""
        self.files = {k: v for k, v in self.files.items() if k[: len(key)] != key}


@dataclass(frozen=True)
class Words:
    """How a reader calls things in its messages."""

    whole: str = "the settings"
    unknown: str = "unknown setting"
    table: str = "a table of settings"
    missing: str = "[{table}] lacks the setting {name!r}."
    length: str = "be a list of {count}"
    kinds: Mapping[type, str] = field(
        default_factory=lambda: {
            bool: "true or false",
            int: "a whole number",
            float: "a finite number",
            str: "text in quotes",
        }
    )
    not_toml: str = "is not valid TOML"
    no_file: str = "there is no settings file {path}."
    unreadable: str = "cannot read the settings file {path} ({error})."
    form: str = "a setting reads KEY=VALUE; got {line!r}."


class _Wrong(Exception):
    """What is wrong with the value at a key."""

    def __init__(self, key: Key, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True)
class SettingsReader:
    """Reads one kind of settings; what is wrong with them is raised as its `error`."""

    error: type[VecaError]
    words: Words = field(default_factory=Words)
    named: Callable[[str], Path | None] = lambda text: None
    """The file of settings that come with the package and go by a name; None for any path."""

    # ---------------------------------------------------------------------------------- files

    def read(self, path: str | os.PathLike[str], where: str = "") -> SettingsTables:
        """A TOML file, and those it extends.

        Args:
            where: what it is called in messages; by default its path.
        """
        settings = SettingsTables(where=where or os.fspath(path))
        file = self.named(os.fspath(path)) or Path(path).expanduser()
        self._read(file, settings.where, settings, ())
        return settings

    def _read(
        self, path: Path, where: str, settings: SettingsTables, above: tuple[Path, ...]
    ) -> None:
        table = self.parse(self._text(path), where)
        base, here = table.pop(EXTENDS, None), path.resolve()
        if here in above:
            chain = " -> ".join(file.name for file in (*above, here))
            raise self.error(f"{where}: {EXTENDS} leads back to a file it began with ({chain}).")
        if base is not None:
            if not isinstance(base, str):
                raise self.error(f"{where}: {EXTENDS} must be text in quotes, got {shown(base)}.")
            file = path.parent / Path(base).expanduser()
            if not file.is_file():
                file = self.named(base) or file
            if not file.is_file():
                raise self.error(f"{where}: {EXTENDS} {base!r}, but there is no file {file}.")
            self._read(file, str(file), settings, (*above, here))
        for name, value in table.items():
            settings.put((name,), value, where)

    def _text(self, path: Path) -> str:
        try:
            check_regular(path)
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise self.error(self.words.no_file.format(path=path)) from None
        except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the path
            reason = getattr(error, "strerror", None) or str(error)
            text = self.words.unreadable.format(path=path, error=error, reason=reason)
            raise self.error(text) from error

    def parse(self, text: str, where: str) -> dict[str, Any]:
        """The tables of a TOML text; `where` names it in messages."""
        try:
            return dict(_toml().loads(text))
        # Beside mistakes in TOML: numbers of 10,000 digits, tables in tables without end.
        except (ValueError, RecursionError) as error:
            raise self.error(f"{where} {self.words.not_toml} ({error}).") from error

    # ------------------------------------------------------------------------------ dataclasses

    def build(self, cls: type[T], settings: SettingsTables) -> T:
        """An instance of the dataclass `cls`; what is wrong is told with the file it stands in."""
        try:
            return self._dataclass(cls, settings.table, ())
        except _Wrong as wrong:
            where = settings.where_is(wrong.key)
            raise self.error(f"{where}: {wrong}" if where else str(wrong)) from wrong.__cause__

    def _dataclass(self, cls: type[T], table: object, key: Key) -> T:
        label = _label(key)
        if not isinstance(table, Mapping):
            what = label or self.words.whole
            raise _Wrong(key, f"{what} must be {self.words.table}, got {shown(table)}.")
        hints = typing.get_type_hints(cls)
        fields = {one.name: one for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in table:
            if name not in fields:
                place = f" in [{label}]" if key else ""
                near = suggest(str(name), fields)
                raise _Wrong((*key, str(name)), f"{self.words.unknown}{place} {near}")
        values = {}
        for name, one in fields.items():
            if name in table:
                values[name] = self._value(hints[name], table[name], (*key, name))
            elif one.default is one.default_factory is dataclasses.MISSING:
                full = _label((*key, name))
                raise _Wrong(key, self.words.missing.format(table=label, name=name, full=full))
        try:
            return cls(**values)
        except VecaError as error:
            raise _Wrong(key, str(error)) from error

    def _value(self, hint: Any, value: Any, key: Key) -> Any:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return value
        if origin in (typing.Union, types.UnionType):
            options = [option for option in args if option is not type(None)]
            return None if value is None else self._value(options[0], value, key)
        if dataclasses.is_dataclass(hint):
            return self._dataclass(typing.cast(type, hint), value, key)
        if origin is tuple:
            return self._sequence(args, value, key)
        if origin in (dict, Mapping):
            return self._mapping(args, value, key)
        return self._scalar(hint, value, key)

    def _sequence(self, args: tuple[Any, ...], value: Any, key: Key) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _Wrong(key, f"{_label(key)} must be a list, got {shown(value)}.")
        hints = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(hints) != len(value):
            length = self.words.length.format(count=len(hints))
            raise _Wrong(key, f"{_label(key)} must {length}, got {shown(list(value))}.")
        return tuple(
            self._value(hint, item, (*key, str(i)))
            for i, (hint, item) in enumerate(zip(hints, value, strict=True))
        )

    def _mapping(self, args: tuple[Any, ...], value: Any, key: Key) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _Wrong(key, f"{_label(key)} must be a table, got {shown(value)}.")
        result: dict[Any, Any] = {}
        for name, item in value.items():
            inside = (*key, str(name))
            if args[0] is int and not re.fullmatch(r"\d+", str(name)):
                text = f"{_label(key)} must have whole numbers as names, got {name!r}."
                raise _Wrong(inside, text)
            result[int(name) if args[0] is int else name] = self._value(args[1], item, inside)
        return result

    def _scalar(self, hint: Any, value: Any, key: Key) -> Any:
        wanted = (int, float) if hint is float else hint
        right = isinstance(value, wanted) and isinstance(value, bool) == (hint is bool)
        # The first looks at numbers alone; a whole one may be too large to be a float.
        right = right and not (isinstance(value, float) and not math.isfinite(value))
        if not right or (isinstance(value, int) and abs(value) > _LARGEST):
            raise _Wrong(
                key, f"{_label(key)} must be {self.words.kinds[hint]}, got {shown(value)}."
            )
        return float(value) if hint is float else value

    # ---------------------------------------------------------------------------------- changes

    def change(self, settings: SettingsTables, line: str) -> None:
        """Change one value: "optimizer.lr=1e-3", "teachers.0.weight=2"; see `value`."""
        name, equals, text = line.partition("=")
        key = tuple(part.strip() for part in name.split("."))
        if not equals or not all(key):
            raise self.error(self.words.form.format(line=line))
        self.set(settings, key, self.value(text))
        settings.files[key] = f"--set {name.strip()}"

    def set(self, settings: SettingsTables, key: Key, value: Any) -> None:
        """Change one value, given as it is; a table that is not there is made."""
        inner: Any = settings.table
        for i, part in enumerate(key[:-1]):
            label = _label(key[: i + 1])
            if isinstance(inner, list):
                inner = inner[self._place(inner, part, label)]
            else:
                inner = inner.setdefault(part, {})
            if not isinstance(inner, (dict, list)):
                raise self.error(
                    f"{label} is one value, not a table; it has nothing inside to set."
                )
        if isinstance(inner, list):
            inner[self._place(inner, key[-1], _label(key))] = value
        else:
            inner[key[-1]] = value
        settings.forget(key)
        settings.files[key] = settings.where  # no base is to blame for it

    def value(self, text: str) -> Any:
        """A value as TOML writes it; what is not TOML is text, so quotes can be left out."""
        try:
            return self.parse(f"value = {text}", "the value")["value"]
        except self.error:
            return text.strip()

    def _place(self, items: list[Any], part: str, label: str) -> int:
        if not re.fullmatch(r"\d+", part) or int(part) >= len(items):
            last = len(items) - 1
            raise self.error(f"{label}: expected a number from 0 to {last}, got {part!r}.")
        return int(part)


def _label(key: Key) -> str:
    return ".".join(key)


def _toml() -> Any:
    try:
        return importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        return require("tomli", "reading TOML settings on Python 3.10")


# --------------------------------------------------------------------------- dataclasses to TOML


def to_table(settings: Any) -> dict[str, Any]:
    """A dataclass as plain values of JSON and TOML, in order; None is left out."""
    named = ((one.name, getattr(settings, one.name)) for one in dataclasses.fields(settings))
    return {name: _plain(value) for name, value in named if value is not None}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_table(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def flat(table: Any, prefix: str = "") -> dict[str, Any]:
    """Single values and lists of nested tables, under dotted names."""
    if isinstance(table, dict):
        items = list(table.items())
    elif isinstance(table, list) and any(isinstance(item, dict) for item in table):
        items = list(enumerate(table))
    else:
        return {prefix.rstrip("."): table}
    return {k: v for name, inner in items for k, v in flat(inner, f"{prefix}{name}.").items()}


def to_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """TOML text of nested tables of plain values."""
    lines: list[str] = []
    tables: list[tuple[str, Any]] = []
    for name, value in table.items():
        many = isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value)
        if many or isinstance(value, Mapping):
            tables.append((name, value))
        else:
            lines.append(f"{_key(name)} = {_text(value)}")
    text = "".join(f"{line}\n" for line in lines)
    for name, value in tables:
        label = f"{prefix}{_key(name)}"
        for one in value if isinstance(value, list) else [value]:
            header = f"[[{label}]]" if isinstance(value, list) else f"[{label}]"
            text += f"\n{header}\n{to_toml(one, f'{label}.')}"
    return text


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
