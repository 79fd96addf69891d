"""Where features go: a folder that can be filled in several runs, or one file for all images."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from veca._util.files import (
    atomic_write_json,
    atomic_write_text,
    folder_to_fill,
    output_errors,
    printable,
    temporary_beside,
)
from veca.embed.pipeline import Item
from veca.embed.writers.files import FORMATS, origin_of, write_features
from veca.errors import ImageError, InputError, OutputError
from veca.version import __version__

MANIFEST = "features.json"
FAILURES = "failures.txt"


class Done(NamedTuple):
    """The features of one image, and its sizes: the arrays of its file."""

    item: Item
    arrays: dict[str, Any]


class Output(Protocol):
    """What `extract` writes to."""

    items: list[Item]
    failures_path: Path

    def has(self, item: Item) -> bool:
        """Whether there is nothing left to do for an image. Called from several threads.

        Asked right before the image is read. An image that cannot have a file: ImageError.
        """

    def add(self, batch: list[Done]) -> None: ...

    def finish(self) -> None:
        """Called at the end of a run without errors."""

    def close(self) -> None:
        """Called at the end of any run."""


class Folder:
    """One file an image, written by threads while the next batch is computed.

    `features.json` holds the settings of all files in the folder. Each file holds their
    fingerprint as well, so that a stray or damaged file is never taken for a result, and the size
    and time of its image, so that a replaced image is known. A run that writes no features leaves
    nothing.
    """

    def __init__(
        self,
        out: Path,
        fingerprint: str,
        settings: dict[str, Any],
        paths: Sequence[Path],
        *,
        format: str,
        root: Path | None,
        overwrite: bool,
    ) -> None:
        if out.exists() and not out.is_dir():
            raise OutputError(
                f"cannot write to {out}: it is a file; choose a folder, or a file that ends in "
                f"{' or '.join('.' + name for name in FORMATS)}."
            )
        manifest = _read_manifest(out)
        if manifest and overwrite:
            _remove_features(out, manifest["fingerprint"])
            manifest = None
        root = root or (Path(manifest["root"]) if manifest else common_root(paths))
        here = {**settings, "format": format, "root": str(root)}
        if manifest:
            _refuse_other_settings(out, manifest, here)
        self.items = name_items(paths, root)
        self.failures_path = out / FAILURES
        self._out, self._format, self._fingerprint = out, format, fingerprint
        self._pool = ThreadPoolExecutor(4, "veca-write")
        self._writes: list[Future[None]] = []
        self._stats: dict[int, tuple[int, int]] = {}  # of images, by place, before they were read
        self._is_new, self._has_files = not manifest, False
        with contextlib.ExitStack() as stack:
            if self._is_new:
                content = {"fingerprint": fingerprint, **here, "veca": __version__}
                with output_errors(out):
                    stack.enter_context(folder_to_fill(out))
                atomic_write_json(out / MANIFEST, content)
            self._stack = stack.pop_all()

    def has(self, item: Item) -> bool:
        try:
            state = item.path.stat()
        except OSError:  # reading it will say what is wrong
            return False
        stat = (state.st_size, state.st_mtime_ns)
        if self._is_made(item, stat):
            self._has_files = True
            return True
        self._stats[item.place] = stat
        return False

    def _is_made(self, item: Item, stat: tuple[int, int]) -> bool:
        path = self._path_of(item)
        try:
            written = path.stat().st_mtime_ns
        except OSError:
            self._refuse_long_name(item)
            return False
        origin = origin_of(path)
        if origin is None or origin.settings != self._fingerprint:
            return False
        # A file of an earlier version does not say which image it is of: it must not be older.
        return written >= stat[1] if origin.image_stat is None else origin.image_stat == stat

    def _refuse_long_name(self, item: Item) -> None:
        path = self._path_of(item)
        for place in (path, self._out / path.name):  # the folder of the first may be missing yet
            try:
                place.lstat()
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    raise ImageError(
                        f"{item.path}: the name of its file of features, with .{self._format} at "
                        "the end, would be too long; rename the image"
                    ) from error

    def add(self, batch: list[Done]) -> None:
        self.finish()  # at most one batch is held for writing
        self._writes = [self._pool.submit(self._write, done) for done in batch]

    def finish(self) -> None:
        for write in self._writes:
            write.result()
        self._writes = []

    def close(self) -> None:
        self._pool.shutdown()
        if self._is_new and not self._has_files and not _features_in(self._out):
            (self._out / MANIFEST).unlink(missing_ok=True)
        self._stack.close()

    def _path_of(self, item: Item) -> Path:
        # The image's suffix stays, or x.jpg and x.png would share a file.
        return self._out / f"{item.name}.{self._format}"

    def _write(self, done: Done) -> None:
        text: dict[str, Any] = {"image": done.item.name, "settings": self._fingerprint}
        arrays = dict(done.arrays)
        stat = self._stats.pop(done.item.place, None)
        if stat is not None:
            arrays["image_stat"] = np.array(stat, dtype=np.int64)
        write_features(self._path_of(done.item), arrays, text)
        self._has_files = True


class SingleFile:
    """All images in one file, collected in memory and written at the end."""

    def __init__(
        self,
        out: Path,
        fingerprint: str,
        paths: Sequence[Path],
        *,
        root: Path | None,
        overwrite: bool,
    ) -> None:
        if out.exists() and not overwrite:
            raise OutputError(f"{out} exists; choose another name, or replace it (--overwrite).")
        with temporary_beside(out):  # a place that takes no files is told now, not at the end
            pass
        self.items = name_items(paths, root or common_root(paths))
        self.failures_path = out.with_name(f"{out.name}.{FAILURES}")
        self._out, self._fingerprint = out, fingerprint
        self._done: list[Done] = []

    def has(self, item: Item) -> bool:
        return False

    def add(self, batch: list[Done]) -> None:
        self._done += batch
        first, last = self._done[0], batch[-1]
        grids = [done.arrays["grid"].tolist() for done in (first, last)]
        if "patches" in first.arrays and grids[0] != grids[1]:
            raise InputError(
                "patches of all images can share a file only if their grids agree, but "
                f"{first.item.name} has {grids[0]} and {last.item.name} has {grids[1]}; give one "
                "size for all as height x width, leave patches out, or write to a folder."
            )

    def finish(self) -> None:
        done = sorted(self._done, key=lambda one: one.item.place)
        arrays = {name: np.stack([one.arrays[name] for one in done]) for name in done[0].arrays}
        arrays["cores"] = arrays["cores"][0]
        names = [one.item.name for one in done]
        write_features(self._out, arrays, {"images": names, "settings": self._fingerprint})

    def close(self) -> None:
        self._done = []


def common_root(paths: Sequence[Path]) -> Path:
    """The deepest folder that holds all of `paths`."""
    try:
        return Path(os.path.commonpath([path.parent for path in paths]))
    except ValueError as error:  # two drives of a Windows machine
        raise InputError(
            "the images lie on different drives and share no folder to name them from; "
            "run once for each drive."
        ) from error


def name_items(paths: Sequence[Path], root: Path) -> list[Item]:
    """The images under their names, which start from `root`."""
    outside = [path for path in paths if not path.is_relative_to(root)]
    if outside:
        raise InputError(
            f"{outside[0]} ({len(outside)} of {len(paths)} images) is not inside {root}, the "
            "folder that names start from; choose another output, or start over with overwrite "
            "and a root that holds all images."
        )
    return [Item(i, path, path.relative_to(root).as_posix()) for i, path in enumerate(paths)]


def write_failures(path: Path, failed: Sequence[tuple[str, str]]) -> Path | None:
    """A line for each image that could not be read; no file if there is none."""
    if not failed:
        path.unlink(missing_ok=True)
        return None
    lines = (f"{name}\t{' '.join(message.split())}\n" for name, message in failed)
    atomic_write_text(path, printable("".join(lines)))
    return path


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text("utf-8"))
        if all(isinstance(manifest[name], str) for name in ("fingerprint", "root")):
            return dict(manifest)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise OutputError(f"{path} does not list the settings of features; choose another folder.")


def _refuse_other_settings(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    other = [
        name if isinstance(here[name], dict) else _difference(name, there.get(name), here[name])
        for name in here
        if here[name] != there.get(name)
    ]
    if other:
        raise InputError(
            f"{folder} holds features made with other settings ({'; '.join(other)}); choose "
            "another folder, or start over with overwrite (--overwrite)."
        )


def _difference(name: str, there: object, here: object) -> str:
    if name == "weights":  # hashes
        there, here = str(there)[:12], str(here)[:12]
    return f"{name}: {json.dumps(there)} there, {json.dumps(here)} now"


def _features_in(folder: Path) -> bool:
    """Whether there are files of features in a folder, perhaps of a run beside this one."""
    paths = (path for format in FORMATS for path in folder.rglob(f"*.{format}"))
    return any(origin_of(path) is not None for path in paths)


def _remove_features(folder: Path, fingerprint: str) -> None:
    """Remove the files made with these settings, known by what they hold, and nothing else."""
    for format in FORMATS:
        for path in folder.rglob(f"*.{format}"):
            origin = origin_of(path)
            if origin is not None and origin.settings == fingerprint:
                path.unlink()
