"""All images in one file of features, collected in memory and written at the end."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from veca._util.files import remove_leftovers, temporary_beside
from veca.embed.writers import FAILURES, Result, write_failures
from veca.embed.writers.files import NamedImage, common_root, name_images, write_features
from veca.errors import InputError, OutputError


class SingleFileWriter:
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
        remove_leftovers(out.parent.glob(f".{glob.escape(out.name[:50])}.*.tmp"))
        with temporary_beside(out):  # a place that takes no files is told now, not at the end
            pass
        self.items = name_images(paths, root or common_root(paths))
        self._out, self._fingerprint = out, fingerprint
        self.failed: list[tuple[str, str]] = []
        self._done: list[Result[NamedImage]] = []

    def has(self, item: NamedImage) -> bool:
        return False

    def fail(self, item: NamedImage, reason: str) -> None:
        self.failed.append((str(item.path), reason))

    def write_failures(self) -> Path | None:
        return write_failures(self._out.with_name(f"{self._out.name}.{FAILURES}"), self.failed)

    def add(self, results: Sequence[Result[NamedImage]]) -> None:
        self._done += results
        first, last = self._done[0], results[-1]
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
        for name in ("cores", "keep"):  # the same of all
            if name in arrays:
                arrays[name] = arrays[name][0]
        names = [one.item.name for one in done]
        write_features(self._out, arrays, {"images": names, "settings": self._fingerprint})
        if not self._out.is_file():
            raise OutputError(f"{self._out} was written and is gone; write to another place.")

    def close(self) -> None:
        self._done = []
