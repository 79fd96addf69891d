"""The temporary folder of a running page, and what killed ones left behind.

A folder is locked for as long as its process lives, so one that can be locked belongs to nobody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there, and nothing swept
    fcntl = None  # type: ignore[assignment]

# Not 0.1's "veca-demo-": those folders are not locked, and one may belong to a running page.
PREFIX = "veca-demo-run-"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of this page's own, removed at the end; those of killed pages are removed first."""
    sweep()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        handle = _lock(folder, wait=True)
        if handle is not None or fcntl is None:
            break  # else somebody swept it between its making and its locking
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def sweep() -> list[Path]:
    """Remove the folders of pages whose process is gone; returns them.

    Only real folders of this user with our name are looked at; links are not followed.
    """
    if fcntl is None or not shutil.rmtree.avoids_symlink_attacks:
        return []
    swept = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        handle = _lock(folder)
        if handle is None:
            continue
        try:
            if os.fstat(handle).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
        finally:
            os.close(handle)
    return swept


def _lock(folder: Path, wait: bool = False) -> int | None:
    """A handle of a folder that nobody else has locked, or None; closing it unlocks."""
    if fcntl is None:
        return None
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # Not lockf: its locks do not hold between two pages of one process.
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        ours = os.fstat(handle)
        if stat.S_ISDIR(ours.st_mode) and os.path.samestat(ours, folder.lstat()):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None
