"""The one folder in which this package keeps what it may need again, and how large it may grow.

Each part of it holds entries, files or folders, each of which can be made again. When they take
more than the limit, those that were not used for the longest time go.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from veca._util.numbers import parse_bytes
from veca.errors import InputError

PARTS = {
    "probe": "features for probes",
    "images": "decoded images for training",
    "index": "lists of images found",
    "web": "the runtime of exported pages",
    "onnx": "files for engine='onnxruntime'",
    "native": "int8 steps compiled for this machine",
}
"""What can be made again, and so be removed. Anything else, such as weights, is the user's."""
LIMIT_VARIABLE = "VECA_CACHE_LIMIT"
DEFAULT_LIMIT = "50GB"
_IN_USE_SECONDS = 3600
"""An entry used so recently stays, whatever the limit: a run beside this one may need it."""


class CacheEntry(NamedTuple):
    """What goes as a whole."""

    part: str
    path: Path
    bytes: int
    used: float
    """Seconds since the epoch."""


def cache_folder(part: str = "") -> Path:
    """$VECA_CACHE, or ~/.cache/veca; `part` names a folder in it."""
    chosen = os.environ.get("VECA_CACHE")
    folder = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "veca"
    return folder / part if part else folder


def cache_limit() -> int:
    """Bytes that the cache may take: $VECA_CACHE_LIMIT, such as 10GB, or else 50 GB."""
    given = os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT
    try:
        return parse_bytes(given)
    except InputError as error:
        raise InputError(f"{LIMIT_VARIABLE}: {error}") from error


def cache_entries(part: str | None = None) -> list[CacheEntry]:
    """What is in the cache, that used least recently first."""
    found = []
    for name in PARTS if part is None else [part]:
        with contextlib.suppress(OSError):
            found += [_entry(name, path) for path in cache_folder(name).iterdir()]
    return sorted(found, key=lambda entry: entry.used)


def mark_used(path: Path) -> None:
    """Note that an entry is used now."""
    with contextlib.suppress(OSError):
        os.utime(path)


def shrink_cache(limit: int | None = None, *, keep: Iterable[Path] = ()) -> list[CacheEntry]:
    """Remove what was used least recently until no more than `limit` bytes are left.

    Args:
        limit: by default that of the user.
        keep: entries that stay. So do those that were used within the last hour, but with a limit
            that is given.
    """
    kept = {Path(path) for path in keep}
    newest = time.time() - _IN_USE_SECONDS if limit is None else float("inf")
    limit = cache_limit() if limit is None else limit
    entries = cache_entries()
    total = sum(entry.bytes for entry in entries)
    removed = []
    for entry in entries:
        if total <= limit:
            break
        if entry.path not in kept and entry.used < newest:
            remove_entry(entry)
            removed.append(entry)
            total -= entry.bytes
    return removed


def remove_entry(entry: CacheEntry) -> None:
    """Remove an entry; one that somebody else removes meanwhile is gone all the same."""
    if entry.path.is_dir() and not entry.path.is_symlink():
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.path.unlink()


def _entry(part: str, path: Path) -> CacheEntry:
    size, used = 0, 0.0
    for file in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
        with contextlib.suppress(OSError):
            state = file.lstat()
            used = max(used, state.st_mtime)
            size += state.st_size if not file.is_dir() else 0
    return CacheEntry(part, path, size, used)
