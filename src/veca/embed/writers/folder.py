"""A folder with one file of features an image. It can be filled in several runs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from veca._util.files import (
    atomic_write_json,
    folder_to_fill,
    from_json,
    output_errors,
    printable,
    remove_leftovers,
)
from veca.embed.pca import FILE as PCA_FILE
from veca.embed.settings import with_later, without_later
from veca.embed.sources import state_of
from veca.embed.writers import (
    FAILURES,
    BackgroundWrites,
    Result,
    parquet,
    read_failures,
    write_failures,
)
from veca.embed.writers.files import (
    FORMATS,
    NamedImage,
    common_root,
    name_images,
    origin_of,
    write_features,
)
from veca.errors import ImageError, InputError, OutputError
from veca.version import __version__

MANIFEST = "features.json"
_OLD_FAILURES = "failures.txt"  # of 0.1


class FolderWriter:
    """One file an image, written by threads while the next batch is computed.

    `features.json` holds the settings of all files in the folder. Each file holds their
    fingerprint as well, so that a stray or damaged file is never taken for a result, and the size
    and time of its image, so that a replaced image is known. A run that writes no features leaves
    nothing. `failures.jsonl` is about all runs: images that a run does not come to stay listed, as
    long as they are there.
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
        if (out / parquet.MANIFEST).exists():
            raise OutputError(f"{out} holds embeddings of veca embed; choose another folder.")
        manifest = _read_manifest(out)
        if manifest:
            remove_leftovers(out.rglob(".*.tmp"))
        if manifest and overwrite:
            _remove_features(out, manifest)
            manifest = None
        self._is_of_0_1 = manifest is not None and _is_of_0_1(manifest)
        root = root or (Path(manifest["root"]) if manifest else common_root(paths))
        here = {**with_later(settings), "format": format, "root": str(root)}
        if manifest:
            _refuse_other_settings(out, manifest, here)
        self.items = name_images(paths, root)
        self.failed: list[tuple[str, str]] = []
        listed = {} if overwrite else read_failures(out / FAILURES)
        self._listed = {path: why for path, why in listed.items() if _is_there(Path(path))}
        self._is_new = not manifest
        self._made: list[NamedImage] = []  # in this run or before, as far as it was looked at
        self._out, self._format, self._fingerprint = out, format, fingerprint
        self._folders: set[Path] = set()
        self._writes = BackgroundWrites(4, most=16)
        self._stats: dict[int, tuple[int, int]] = {}  # of images, by place, before they were read
        with contextlib.ExitStack() as stack:
            if self._is_new:
                content = {
                    "fingerprint": fingerprint,
                    **without_later(here),
                    "veca": __version__,
                }
                with output_errors(out):
                    stack.enter_context(folder_to_fill(out))
                atomic_write_json(out / MANIFEST, content)
            self._stack = stack.pop_all()

    def has(self, item: NamedImage) -> bool:
        try:
            stat = state_of(item.path)
        except FileNotFoundError:  # the source has names of its own, or reading it will say so
            stat = None
        except OSError:  # reading it will say what is wrong
            return False
        if self._is_made(item, stat):
            self._note_file(item)
            return True
        if stat is not None:
            self._stats[item.place] = stat
        return False

    def _is_made(self, item: NamedImage, stat: tuple[int, int] | None) -> bool:
        path = self._path_of(item)
        try:
            written = path.stat().st_mtime_ns
        except OSError:
            self._refuse_long_name(item)
            return False
        origin = origin_of(path)
        if origin is None or origin.settings != self._fingerprint:
            return False
        if stat is None or origin.image_stat is not None:
            return origin.image_stat == stat
        # A file of an earlier version does not say which image it is of: it must not be older.
        return written >= stat[1]

    def _refuse_long_name(self, item: NamedImage) -> None:
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

    def add(self, results: Sequence[Result[NamedImage]]) -> None:
        for result in results:
            folder = self._path_of(result.item).parent
            if folder not in self._folders:  # here: threads would undo each other's when they fail
                with output_errors(folder):
                    self._stack.enter_context(folder_to_fill(folder))
                self._folders.add(folder)
            self._writes.submit(self._write, result)

    def fail(self, item: NamedImage, reason: str) -> None:
        self.failed.append((str(item.path), reason))
        self._listed.pop(printable(str(item.path)), None)

    def write_failures(self) -> Path | None:
        return write_failures(self._out / FAILURES, [*self._listed.items(), *self.failed])

    def finish(self) -> None:
        self._writes.finish()
        self.write_failures()  # before the check: it would make a folder that has been removed
        self._check()
        if self._is_of_0_1:
            (self._out / _OLD_FAILURES).unlink(missing_ok=True)

    def _check(self) -> None:
        """Raise unless all that is counted is there: somebody may have removed it meanwhile."""
        paths = [self._out / MANIFEST, *(self._path_of(item) for item in self._made)]
        gone = [path for path in paths if not path.is_file()]
        if gone:
            raise self._changed(f"{gone[0]} is gone ({len(gone)} of {len(paths)} files)")

    def _changed(self, what: str) -> OutputError:
        return OutputError(
            f"{what}: something else has changed {self._out} meanwhile; run it again, and what is "
            "missing is made."
        )

    def close(self) -> None:
        self._writes.close()
        if self._is_new and not self._made and not _features_in(self._out):
            for name in (MANIFEST, PCA_FILE):
                (self._out / name).unlink(missing_ok=True)
        elif (self._out / MANIFEST).exists():  # also of a run that was stopped
            with contextlib.suppress(OutputError, OSError):  # not in place of what stopped it
                self.write_failures()
        self._stack.close()

    def _path_of(self, item: NamedImage) -> Path:
        # The image's suffix stays, or x.jpg and x.png would share a file.
        return self._out / f"{item.name}.{self._format}"

    def _write(self, result: Result[NamedImage]) -> None:
        text: dict[str, Any] = {"image": result.item.name, "settings": self._fingerprint}
        arrays = dict(result.arrays)
        stat = self._stats.pop(result.item.place, None)
        if stat is not None:
            arrays["image_stat"] = np.array(stat, dtype=np.int64)
        if not (self._out / MANIFEST).is_file():  # before its folder is made again
            raise self._changed(f"{self._out / MANIFEST} is gone")
        write_features(self._path_of(result.item), arrays, text)
        self._note_file(result.item)

    def _note_file(self, item: NamedImage) -> None:
        self._made.append(item)
        self._listed.pop(printable(str(item.path)), None)


def begun(folder: Path) -> dict[str, Any] | None:
    """The settings of a folder of features that a run goes on with; None if there are none."""
    manifest = _read_manifest(folder)
    if manifest is not None and "size" not in manifest:
        raise _no_settings(folder / MANIFEST)
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = from_json(path.read_text("utf-8"))
        if all(isinstance(manifest[name], str) for name in ("fingerprint", "root")):
            return dict(manifest)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise _no_settings(path)


def _no_settings(path: Path) -> OutputError:
    return OutputError(f"{path} does not list the settings of features; choose another folder.")


def _refuse_other_settings(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    there = with_later(there)
    if "precision" not in there:  # of 0.1: that of the weights, if they are these
        same = there.get("weights") == here["weights"]
        there = {**there, "precision": here["precision"] if same else "float32"}
    if there["precision"] != here["precision"]:
        there = {**there, "weights": here["weights"]}  # whose hash has to differ then
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


def _is_there(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):  # a damaged list may name what no system can
        state_of(path)
        return True
    return os.path.lexists(path)  # a link that leads nowhere


def _features_in(folder: Path) -> bool:
    """Whether there are files of features in a folder, perhaps of a run beside this one."""
    paths = (path for format in FORMATS for path in folder.rglob(f"*.{format}"))
    return any(origin_of(path) is not None for path in paths)


def _is_of_0_1(manifest: dict[str, Any]) -> bool:
    return str(manifest.get("veca")).startswith("0.1.")


def _remove_features(folder: Path, manifest: dict[str, Any]) -> None:
    """Remove the files made with these settings, known by what they hold, and nothing else."""
    for format in FORMATS:
        for path in folder.rglob(f"*.{format}"):
            origin = origin_of(path)
            if origin is not None and origin.settings == manifest["fingerprint"]:
                path.unlink()
    for name in (FAILURES, PCA_FILE, *([_OLD_FAILURES] if _is_of_0_1(manifest) else [])):
        (folder / name).unlink(missing_ok=True)
