"""Which image lies in which shard: decided once, written down, and never changed.

A plan is a list of names in parts. The first part is the source as the first run found it; images
that a later run finds are added as a part of their own, at the end. A shard is a stretch of one
part, so what it holds, and how its images are batched, does not depend on what was interrupted or
on who does the work: whoever writes shard 17 writes the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veca._util.files import atomic_write, atomic_write_json, exclusive, output_errors
from veca.data.index import load_arrays
from veca.data.names import Names
from veca.data.sources import ImageSource
from veca.embed import pca
from veca.embed.settings import LAYOUT, Settings
from veca.embed.sources import Sources, open_images
from veca.embed.writers import FAILURES
from veca.embed.writers.parquet import MANIFEST, SHARDS, Shard, read_manifest
from veca.errors import InputError, OutputError
from veca.version import __version__

PLAN = "plan"
_LOCK = ".embed.lock"
GONE = -1
"""The place of an image that is no longer in the source."""


@dataclass(frozen=True)
class Plan:
    """All images, and where the source has them now."""

    parts: list[Names]
    places: list[NDArray[np.int64]]
    """Of each image of each part, its place in the source, or `GONE`."""
    shard_rows: int

    @property
    def images(self) -> int:
        return sum(map(len, self.parts))

    def shards(self) -> Iterator[Shard]:
        """Every shard, in order."""
        number = 0
        for part, names in enumerate(self.parts):
            for start in range(0, len(names), self.shard_rows):
                yield Shard(number, part, start, min(start + self.shard_rows, len(names)))
                number += 1

    def names_of(self, shard: Shard) -> list[str]:
        names: list[str] = self.parts[shard.part][shard.start : shard.stop]
        return names

    def places_of(self, shard: Shard) -> NDArray[np.int64]:
        return self.places[shard.part][shard.start : shard.stop]


def begun(folder: Path, *, overwrite: bool = False) -> tuple[Settings, dict[str, Any]] | None:
    """The settings, and all of the manifest, of a folder that a run goes on with; else None."""
    if overwrite or not (folder / MANIFEST).exists() or _is_emptied(folder):
        return None
    return read_manifest(folder)


def images_for(folder: Path, sources: Sources, *, overwrite: bool = False) -> ImageSource:
    """The images of a source, found as the run found them that began the folder.

    A folder of 0.1 does not say how: then links to folders were followed, and images that a run
    adds came in the order of their paths.
    """
    there = begun(folder, overwrite=overwrite)
    return open_images(sources, natural=there is None or "order" in there[1])


def _remove_embeddings(folder: Path) -> None:
    """Remove what earlier runs wrote to a folder of embeddings, and nothing else.

    In an order that can be stopped anywhere: what is left is a folder that earlier runs have begun
    (shards go before the plan, the plan's last part first), or an emptied one. The manifest stays
    until the new one replaces it.
    """
    ours = (
        *("index-*.usearch", "index-*.json", FAILURES),
        *(f"{SHARDS}/part-*.parquet", f"{PLAN}/[0-9]*.npz", pca.FILE),
    )
    with output_errors(folder):
        for path in [p for pattern in ours for p in sorted(folder.glob(pattern), reverse=True)]:
            path.unlink()


def _is_emptied(folder: Path) -> bool:
    """Whether there is neither a plan nor a shard: a run was stopped in its first moment."""
    ours = itertools.chain((folder / PLAN).glob("[0-9]*.npz"), _visible(folder / SHARDS))
    return next(ours, None) is None


def _visible(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield from (path for path in folder.iterdir() if not path.name.startswith("."))


def open_plan(
    folder: Path,
    source: ImageSource,
    settings: Settings,
    *,
    weights_from: str | None,
    overwrite: bool = False,
) -> tuple[Plan, int]:
    """The plan of a folder, made if there is none; and how many images it lacked.

    With `overwrite` what earlier runs wrote goes first.
    """
    if overwrite and (folder / MANIFEST).exists():
        _remove_embeddings(folder)
        fresh = True
    else:
        fresh = _check_folder(folder, settings)
    parts = _load_parts(folder / PLAN)
    if not fresh and not parts:
        raise InputError(
            f"{folder} has lost {PLAN}, its list of images; embed into another folder."
        )
    names = Names.of(source.name(i) for i in range(len(source)))
    keys = _keys(names)
    known = _keys(itertools.chain.from_iterable(parts))
    new = _first_of_each(keys, known)
    if parts and len(new) == len(np.unique(keys)):
        raise InputError(
            f"{folder} holds embeddings of another source: none of its {len(known)} images, such "
            f"as {parts[0][0]}, is among the {len(names)} given; choose another folder."
        )
    if fresh:
        # Before the plan: if a run is killed in between, the folder counts as emptied.
        content = {
            "layout": LAYOUT,
            "settings": settings.to_dict(),
            "weights_from": weights_from,
            "order": "natural",
            "veca": __version__,
        }
        atomic_write_json(folder / MANIFEST, content)
    if len(new):
        added = names if len(new) == len(names) else names.pick(new.tolist())
        _save_part(folder / PLAN / f"{len(parts):06d}.npz", added)
        parts.append(added)
    return Plan(parts, _places(parts, keys), settings.shard_rows), len(new)


def _check_folder(folder: Path, settings: Settings) -> bool:
    """Whether the folder is new; refuse one that is something else, or has other settings."""
    if (folder / MANIFEST).exists():
        there, _ = read_manifest(folder)
        if _is_emptied(folder):
            return True
        differences = settings.differences(there)
        if differences:
            raise InputError(
                f"{folder} holds embeddings made with other settings ({'; '.join(differences)}); "
                "use those, choose another folder, or start over with overwrite (--overwrite)."
            )
        return False
    with output_errors(folder / MANIFEST):
        found = sorted(path.name for path in _visible(folder))
        # A plan alone, or with no shards beside it: stopped in its first moment.
        ours = {PLAN} if any(_visible(folder / SHARDS)) else {PLAN, SHARDS}
    foreign = [name for name in found if name not in ours]
    if foreign:
        raise OutputError(
            f"{folder} holds other things ({', '.join(foreign[:3])}) and no embeddings; choose a "
            "new or empty folder."
        )
    with contextlib.suppress(FileNotFoundError):
        for path in (folder / PLAN).iterdir():
            path.unlink()
    return True


def _keys(names: Iterable[str]) -> NDArray[Any]:
    """Sixteen bytes for each name: a fraction of its text, and no two names share them."""
    digests = b"".join(
        hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        for name in names
    )
    return np.frombuffer(digests, "S16")


def _first_of_each(keys: NDArray[Any], known: NDArray[Any]) -> NDArray[np.int64]:
    """Places of the keys that are not known, in order; of equal ones the first."""
    _, first = np.unique(keys, return_index=True)
    first = np.sort(first)
    return first[~np.isin(keys[first], known)] if len(known) else first


def _places(parts: list[Names], keys: NDArray[Any]) -> list[NDArray[np.int64]]:
    unique, first = np.unique(keys, return_index=True)
    places = []
    for part in parts:
        wanted = _keys(part)
        found = np.minimum(np.searchsorted(unique, wanted), len(unique) - 1)
        places.append(np.where(unique[found] == wanted, first[found], GONE).astype(np.int64))
    return places


def _load_parts(folder: Path) -> list[Names]:
    parts = []
    for path in sorted(folder.glob("[0-9]*.npz")):
        arrays = load_arrays(path)
        try:
            if arrays is None:
                raise ValueError
            parts.append(Names(arrays["text"], arrays["ends"]))
        except (ValueError, KeyError) as error:
            raise InputError(
                f"{path}, the list of images, is damaged; embed into another folder."
            ) from error
    return parts


def _save_part(path: Path, names: Names) -> None:
    with atomic_write(path) as file:
        np.savez(file, text=names.text, ends=names.ends)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process from embedding into the same folder, and tidy up after a killed one."""
    busy = f"{folder} is being filled by another process; wait for it or choose another."
    with exclusive(folder / _LOCK, busy):
        _tidy(folder)
        try:
            yield
        finally:
            _tidy(folder)  # a worker elsewhere may have been killed


def _tidy(folder: Path) -> None:
    """Remove what killed processes were writing."""
    for place in (folder, folder / SHARDS, folder / PLAN):
        for left in place.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                left.unlink()
