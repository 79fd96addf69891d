"""The files that visitors sent: how many bytes may wait here, whose they are, and for how long.

A file is taken once, by the handler that shrinks it, and is gone from the disk then.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from veca.errors import ImageError, InputError

TOTAL_BYTES = 256 * 2**20
"""Of all uploads that wait; one client may have half of it."""
_PATIENCE = 300.0  # seconds until an upload that nobody took is removed
_NAME = 100  # characters of a file's name that are kept


@dataclass(frozen=True)
class Upload:
    """A file that waits to be taken."""

    name: str
    client: str
    size: int
    since: float = field(default_factory=time.monotonic)


class Uploads:
    """Uploads by path. Their names on disk are random; what visitors call them is kept here."""

    def __init__(self, folder: Path, total: int = TOTAL_BYTES) -> None:
        self.folder = folder
        self.total = total
        folder.mkdir(exist_ok=True)
        self._waiting: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def __contains__(self, path: object) -> bool:
        return path in self._waiting

    @contextlib.contextmanager
    def place(self, client: str, size: int) -> Iterator[str]:
        """Keep room for a file of a client; gives the path to write it to.

        Raises:
            InputError: there is no room.
        """
        path = str(self.folder / secrets.token_hex(16))
        with self._lock:
            self._forget_old()
            held = list(self._waiting.values())
            own = sum(upload.size for upload in held if upload.client == client)
            if own + size > self.total // 2 or sum(u.size for u in held) + size > self.total:
                raise InputError("too many uploads are waiting here; try again in a few minutes.")
            self._waiting[path] = Upload("", client, size)
        try:
            yield path
        finally:
            if not self._waiting[path].name:  # nothing, or not all of it, was written
                self._remove(path)

    def write(self, path: str, name: str, content: BinaryIO) -> None:
        """Fill the place at `path`; its bytes count as they are now."""
        with open(path, "xb") as file:  # noqa: PTH123
            shutil.copyfileobj(content, file)
            size = file.tell()
        clean = "".join(c for c in Path(name).name if c.isprintable())[-_NAME:] or "photo"
        with self._lock:
            self._waiting[path] = Upload(clean, self._waiting[path].client, size)

    @contextlib.contextmanager
    def take(self, path: str) -> Iterator[tuple[Path, str]]:
        """An upload and its name, once; it is removed at the end."""
        with self._lock:
            upload = self._waiting.get(path)
            if upload is None or not upload.name:
                raise ImageError("this upload is no longer here; drop the photo again.")
            self._waiting[path] = Upload("", upload.client, upload.size)  # taken
        try:
            yield Path(path), upload.name
        finally:
            self._remove(path)

    def _remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)
        with self._lock:
            self._waiting.pop(path, None)

    def _forget_old(self) -> None:
        old = time.monotonic() - _PATIENCE
        for path in [path for path, u in self._waiting.items() if u.name and u.since < old]:
            Path(path).unlink(missing_ok=True)
            del self._waiting[path]
