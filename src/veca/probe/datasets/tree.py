"""The files of a dataset: found in bulk, read with faults that name them."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veca._util.files import check_regular, from_json
from veca.errors import DatasetError
from veca.images import check_name, extensions

if TYPE_CHECKING:
    from veca.probe.datasets.base import DatasetInfo


class Tree:
    """The files under a root: looked up in bulk, with faults that name what is missing.

    Every file read here is remembered by its hash, for the dataset's fingerprint.
    """

    def __init__(self, root: Path, info: DatasetInfo) -> None:
        self.root = root
        self.info = info
        self.contents: dict[str, str] = {}
        self.passed_over: Counter[str] = Counter()
        """Files beside the images of folders that were listed by `images`, by suffix."""
        self._names: dict[str, frozenset[str]] = {}
        check_name(root, DatasetError)
        if not root.is_dir():
            fault = "is a file" if root.exists() else "no such folder"
            raise DatasetError(
                f"{root}: {fault}; expected the root folder of the dataset {info.name!r} "
                f"(where to get it: {info.where})",
                missing=["."],
            )

    def descend(self, markers: Sequence[str], nested: Sequence[str]) -> None:
        """Move the root into the subfolder of `nested` that holds more of `markers`, if any does.

        Archives unpack into a folder of their own, and users point at it or at its parent.
        """
        bases = [self.root, *(self.root / name for name in nested)]
        # max() returns the first of equals: the root itself.
        self.root = max(bases, key=lambda base: sum((base / name).exists() for name in markers))

    def exists(self, name: str) -> bool:
        """Whether a file or folder is there; each folder is listed once, however many are asked."""
        # Plain strings: this is asked up to a million times, and paths are slow to build.
        parent, _, leaf = name.rpartition("/")
        if parent not in self._names:
            try:
                self._names[parent] = frozenset(os.listdir(self.root / parent))  # noqa: PTH208
            except (FileNotFoundError, NotADirectoryError):
                self._names[parent] = frozenset()
            except OSError as error:
                raise cannot_list(error) from error
        return leaf in self._names[parent]

    def first(self, *names: str) -> str:
        """The first of several possible files or folders that exists."""
        for name in names:
            if self.exists(name):
                return name
        raise self.missing([" or ".join(names)])

    def require(self, names: Iterable[str]) -> None:
        """Raise unless every one of these files and folders exists."""
        absent = [name for name in dict.fromkeys(names) if not self.exists(name)]
        if absent:
            raise self.missing(absent)

    def missing(self, names: Sequence[str]) -> DatasetError:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
        return DatasetError(
            f"{self.root}: not a complete {self.info.name!r} dataset, missing {shown} "
            f"(where to get it: {self.info.where}); `veca datasets {self.info.name}` shows the "
            "layout",
            missing=names,
        )

    def error(self, name: str, fault: str) -> DatasetError:
        """A fault in one file."""
        return DatasetError(f"{self.root / name}: {fault}")

    def data(self, name: str) -> bytes:
        """The content of a file."""
        self.require([name])
        try:
            check_regular(self.root / name)
            data = (self.root / name).read_bytes()
        except OSError as error:
            raise self.error(name, f"cannot be read ({error.strerror}); replace it") from error
        self.contents[name] = hashlib.sha256(data).hexdigest()
        return data

    def _text(self, name: str) -> str:
        try:
            return self.data(name).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.error(name, f"is not text in UTF-8 ({error}); replace it") from error

    def json(self, name: str) -> Any:
        """The content of a JSON file."""
        try:
            return from_json(self._text(name))
        except ValueError as error:
            if isinstance(error, DatasetError):
                raise
            raise self.error(name, f"is not JSON ({error}); correct it") from error

    def lines(self, name: str) -> list[tuple[int, str]]:
        """The lines of a text file that hold anything, stripped, each with its number from 1."""
        text = self._text(name)
        rows = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        if not rows:
            raise self.error(name, "is empty; replace it")
        return rows

    def table(self, name: str, columns: int, comment: str = "#") -> list[tuple[int, list[str]]]:
        """The rows of a text file, split at blanks into at least `columns` words."""
        rows = []
        for number, line in self.lines(name):
            if comment and line.startswith(comment):
                continue
            words = line.split()
            if len(words) < columns:
                raise self.error(
                    name, f"line {number} is {line[:80]!r}, expected at least {columns} columns"
                )
            rows.append((number, words))
        if not rows:
            raise self.error(name, "holds no entries; replace it")
        return rows

    def number(self, name: str, line: int, word: str, low: int, high: int, what: str) -> int:
        """Parse a whole number that a text file gives, and check its range."""
        value = int(word) if word.lstrip("-").isdecimal() else None
        if value is None or not low <= value <= high:
            raise self.error(
                name, f"line {line} gives {what} {word!r}, expected a number from {low} to {high}"
            )
        return value

    def folders(self, name: str) -> list[str]:
        """Names of the visible subfolders, sorted."""
        try:
            with os.scandir(self.root / name) as entries:
                found = [e.name for e in entries if not e.name.startswith(".") and e.is_dir()]
        except OSError as error:
            raise cannot_list(error) from error
        return sorted(found)

    def images(self, name: str, *, recursive: bool = False) -> list[str]:
        """Visible images, relative to the root, sorted; other files are counted."""
        every = self.files(name, ("",), recursive=recursive)
        suffixes = [os.path.splitext(file)[1].lower() for file in every]  # noqa: PTH122
        known = extensions()
        self.passed_over.update(suffix for suffix in suffixes if suffix not in known)
        return [file for file, suffix in zip(every, suffixes, strict=True) if suffix in known]

    def files(self, name: str, suffixes: Iterable[str], *, recursive: bool = False) -> list[str]:
        """Visible files with one of these (lower-case) suffixes, relative to the root, sorted."""

        def refuse(error: OSError) -> None:  # os.walk would pass over it in silence
            raise cannot_list(error) from error

        wanted = tuple(suffixes)
        found: list[str] = []
        seen: set[str] = set()
        # Links to folders are followed: large sets are often assembled from them.
        for parent, folders, names in os.walk(self.root / name, onerror=refuse, followlinks=True):
            real = os.path.realpath(parent)
            folders[:] = [f for f in folders if recursive and not f.startswith(".")]
            if real in seen:  # a link back to where we came from
                folders.clear()
                continue
            seen.add(real)
            inner = Path(parent).relative_to(self.root).as_posix()
            found += [
                f"{inner}/{file}"
                for file in names
                if not file.startswith(".") and file.lower().endswith(wanted)
            ]
        return sorted(found)


def cannot_list(error: OSError) -> DatasetError:
    return DatasetError(
        f"{error.filename}: the folder cannot be listed ({error.strerror}); check permissions"
    )


def file_size(path: Path) -> int:
    return file_state(path).st_size


def file_state(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        reason = error.strerror or error
        raise DatasetError(f"{path}: cannot be looked at ({reason}); restore the file") from error
