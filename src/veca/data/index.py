"""The list of images in a folder, made once and kept until the folder changes.

A folder counts as changed when the modification time of any folder in it differs (a file was
added, removed or renamed), or when one of a few hundred files looked at differs in size or time
(files were rewritten in place). The list is kept in the cache folder, never in the data.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from veca._util.cache import cache_folder
from veca._util.files import atomic_write, from_json
from veca.data.names import Names
from veca.errors import DataError, VecaError
from veca.images import EXTENSIONS, extensions
from veca.images.find import natural_key, walk

VERSION = 1
SHARD = ".tar"
_LOOKED_AT = 256
# A folder changed this shortly before it was listed may change again within one clock tick.
_SETTLED_NS = 2_000_000_000

log = logging.getLogger("veca.data")


class FolderIndex(NamedTuple):
    """The files of a folder in order; paths relative to it, with forward slashes."""

    names: Names
    sizes: NDArray[np.int64]
    """Bytes of each file."""
    times: NDArray[np.int64]
    """Modification time of each, in nanoseconds."""
    passed_over: dict[str, int]
    """How many other files there are beside the images, by suffix in lower case; beside shards
    none are counted."""


def digest(*parts: object) -> str:
    """A short name for anything printable; 32 hexadecimal digits."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogateescape")
    return hashlib.sha256(text).hexdigest()[:32]


def folder_index(folder: Path, *, cache: Path | None = None, natural: bool = False) -> FolderIndex:
    """The images below `folder`, or, where there are none, its `.tar` shards.

    Names that begin with a dot are passed over. In the order of the paths, with links to folders
    followed, each real folder once; or `natural`: as `veca.images.find_images` lists them, with
    numbers in names taken as numbers and links to folders passed over.
    """
    folder = folder.absolute()
    name = digest(folder, "natural") if natural else digest(folder)
    kept = (cache or cache_folder()) / "index" / f"{name}.npz"
    index = _load(kept, folder)
    if index is None:
        index, folders = _scan(folder, natural)
        if len(index.names):
            save_arrays(
                kept,
                head={
                    "version": VERSION,
                    "folder": str(folder),
                    "folders": folders,
                    "passed_over": index.passed_over,
                    "extensions": sorted(extensions()),
                },
                text=index.names.text,
                ends=index.names.ends,
                sizes=index.sizes,
                times=index.times,
            )
    return index


def _scan(folder: Path, natural: bool) -> tuple[FolderIndex, dict[str, int]]:
    """List everything; also the modification time of each folder, -1 if it may change unseen."""
    found: list[tuple[str, int, int]] = []
    shards: list[tuple[str, int, int]] = []
    folders: dict[str, int] = {}
    others: Counter[str] = Counter()
    known = extensions()
    for relative, entry in _entries(folder, folders, links=not natural):
        suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122
        if suffix not in known and suffix != SHARD:
            others[suffix] += 1
            continue
        try:
            if entry.is_dir():
                continue
            state = entry.stat()
            size, changed = state.st_size, state.st_mtime_ns
        except OSError:  # a dangling link: reading it will report it by name
            size, changed = -1, -1
        (shards if suffix == SHARD else found).append((relative, size, changed))
    chosen = sorted(found or shards, key=(lambda one: natural_key(one[0])) if natural else None)
    if found and shards:
        others[SHARD] = len(shards)
    return FolderIndex(
        Names.of(name for name, _, _ in chosen),
        np.array([size for _, size, _ in chosen], np.int64),
        np.array([changed for _, _, changed in chosen], np.int64),
        {} if shards and not found else dict(others),  # beside shards lie lists and the like
    ), folders


def _entries(
    folder: Path, folders: dict[str, int], *, links: bool
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every file below `folder` that is not hidden; fills `folders` on the way."""
    try:
        listed_at = time.time_ns()  # before each is listed: that may take long
        for relative, state, entries in walk(folder, links=links):
            settled = state.st_mtime_ns < listed_at - _SETTLED_NS
            folders[relative] = state.st_mtime_ns if settled else -1
            for entry in entries:
                yield f"{relative}/{entry.name}" if relative else entry.name, entry
            listed_at = time.time_ns()
    except OSError as error:
        raise DataError(
            f"{error.filename}: the folder cannot be listed ({error.strerror}); check permissions."
        ) from error


def _load(path: Path, folder: Path) -> FolderIndex | None:
    """The kept list, if it is there, whole and still true."""
    arrays = load_arrays(path)
    if arrays is None:
        return None
    try:
        head = from_json(arrays["head"].tobytes())
        names = Names(arrays["text"], arrays["ends"])
        index = FolderIndex(names, arrays["sizes"], arrays["times"], head["passed_over"])
        if head["version"] != VERSION or head["folder"] != str(folder):
            return None
        # What counts as an image depends on the plugins there are. 0.1 did not ask.
        if head.get("extensions", sorted(EXTENSIONS)) != sorted(extensions()):
            return None
        if not len(names) == len(index.sizes) == len(index.times):
            return None
        for relative, changed in head["folders"].items():
            if (folder / relative).stat().st_mtime_ns != changed:
                return None
        for i in np.unique(np.linspace(0, len(names) - 1, _LOOKED_AT).astype(int)):
            if index.sizes[i] < 0:
                continue
            state = (folder / names[i]).stat()
            if (state.st_size, state.st_mtime_ns) != (index.sizes[i], index.times[i]):
                return None
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return index


def save_arrays(path: Path, *, head: object, **arrays: NDArray) -> None:
    """Keep arrays for the next time; a cache that cannot be written is no reason to stop."""
    encoded = np.frombuffer(json.dumps(head).encode(), np.uint8)
    try:
        with atomic_write(path) as file:
            np.savez(file, head=encoded, **arrays)  # type: ignore[arg-type]
    except VecaError as error:
        log.info("not cached: %s", error)


def load_arrays(path: Path) -> dict[str, NDArray] | None:
    """What `save_arrays` kept; None if there is nothing, or nothing whole."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file.items())
    except Exception:  # a damaged zip raises half a dozen types; the index is made again
        return None
