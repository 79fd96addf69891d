"""Where features go. `Writer` is all that the engine knows of a writer; each has a file here."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from veca._util.files import atomic_write_text, from_json, printable
from veca.errors import OutputError

FAILURES = "failures.jsonl"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Result(Generic[Item]):
    """What was computed of one image."""

    item: Item
    arrays: dict[str, Any]


class Writer(Protocol[Item]):
    """Takes results in any order, from one thread; what it wrote is whole, or is not there."""

    def has(self, item: Item) -> bool:
        """Whether there is nothing left to do for an image. Called from several threads.

        Asked right before the image is read. An image that cannot have a place: ImageError.
        """

    def add(self, results: Sequence[Result[Item]]) -> None:
        """Take results; perhaps they are written later, by another thread."""

    def finish(self) -> None:
        """Called at the end of a run without errors: wait until everything is on the disk."""

    def close(self) -> None:
        """Called at the end of any run."""


class CollectionWriter(Writer[Item], Protocol):
    """One for collections, in which there are images that cannot be read."""

    def fail(self, item: Item, reason: str) -> None:
        """Take note of an image without a result."""


class BackgroundWrites:
    """Writes in threads of its own while the next batch is computed.

    After the first failure nothing more is begun: it may build on what could not be written.
    """

    def __init__(self, threads: int, *, most: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "veca-write")
        self._waiting: deque[Future[None]] = deque()
        self._most = most
        self._failure: BaseException | None = None

    def submit(self, write: Callable[..., None], *arguments: Any) -> None:
        """Returns at once, unless more than `most` wait: they are held in memory."""
        self._waiting.append(self._pool.submit(self._write, write, *arguments))
        while len(self._waiting) > self._most:
            self._waiting.popleft().result()

    def finish(self) -> None:
        """Wait for all; the first error is raised."""
        while self._waiting:
            self._waiting.popleft().result()
        self._raise_failure()

    def close(self) -> None:
        """Wait for what was submitted, whatever became of it."""
        self._pool.shutdown()

    def _write(self, write: Callable[..., None], *arguments: Any) -> None:
        self._raise_failure()
        try:
            write(*arguments)
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


_FILES = frozenset(
    {"arrow", "bin", "csv", "feather", "gz", "h5", "hdf5", "json", "jsonl", "mat", "npy", "npz"}
    | {"parquet", "pickle", "pkl", "pt", "pth", "safetensors", "tar", "txt", "zip"}
)


def check_folder_name(out: Path, instead: str) -> None:
    """Refuse a name for a new folder that can only be meant as one of a file, such as u.h5."""
    suffix = out.suffix.lower().removeprefix(".")
    if suffix in _FILES and not out.is_dir():
        raise OutputError(
            f"{out} would be a folder with the name of a .{suffix} file; {instead}: choose another "
            "name."
        )


def write_failures(path: Path, failed: Iterable[tuple[str, str]]) -> Path | None:
    """A line of JSON, path and reason, for each image that could not be read; none, no file."""
    lines = [{"path": printable(name), "reason": printable(reason)} for name, reason in failed]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    if not text:
        path.unlink(missing_ok=True)
        return None
    if not path.exists() or path.read_bytes() != text.encode():  # damaged, it may be no text
        atomic_write_text(path, text)
    return path


def _lines(path: Path) -> list[str]:
    # Not splitlines: that ends lines at characters which file names may hold.
    return [line for line in path.read_text("utf-8").split("\n") if line]


def read_failures(path: Path) -> dict[str, str]:
    """What `write_failures` wrote: path and reason, as they are printed. None, or no list: {}."""
    try:
        lines = [from_json(line) for line in _lines(path)]
        return {str(line["path"]): str(line["reason"]) for line in lines}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
