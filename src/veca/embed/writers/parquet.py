"""The Parquet shards of a folder of embeddings: columns, writing, checking and reading.

    path           string                   the image: a file, or shard.tar/member
    cls            fixed-size list [D]      the global embedding
    patches        list [h * w * D]         the patch grid, row by row          (if asked for)
    grid_height    int32                    h: patches down                     (with patches)
    grid_width     int32                    w: patches across                   (with patches)
    budget         int32                    how many cores were used
    weights        string                   hash of the weights

A shard's footer also says which stretch of the plan it is, which settings it was made with and
which of its images could not be read. So a shard is a whole record of its images, in one file that
appears in one step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from veca._util.extras import require
from veca._util.files import commit, from_json, output_errors, printable, temporary_beside
from veca.embed.settings import LAYOUT, Settings
from veca.embed.writers import BackgroundWrites, Result
from veca.errors import InputError, OutputError

SHARDS = "shards"
MANIFEST = "embed.json"
_RECORD = b"veca_embed"
_NAME = re.compile(r"part-(\d{6,})\.parquet")
_GROUP_BYTES = 64 * 2**20  # features held before they are written as one row group


class Rows(NamedTuple):
    """Some images and their features, in order."""

    paths: list[str]
    cls: NDArray[Any]
    """[n, D]."""
    patches: list[NDArray[Any]] | None = None
    """[h, w, D] for each image."""


@dataclass(frozen=True)
class ShardRecord:
    """What a finished shard says about itself."""

    path: Path
    number: int
    rows: int
    failures: list[tuple[str, str]]
    """(path, reason) of its images that could not be read."""


class Shard(NamedTuple):
    """A stretch of one part of the plan."""

    number: int
    part: int
    start: int
    stop: int


class PlannedRow(NamedTuple):
    """An image's place in a shard."""

    shard: Shard
    number: int
    name: str

    @property
    def is_last(self) -> bool:
        return self.number + 1 == self.shard.stop - self.shard.start


def shard_path(folder: Path, number: int) -> Path:
    return folder / SHARDS / f"part-{number:06d}.parquet"


# --------------------------------------------------------------------------------------- writing


class ShardWriter:
    """Writes one shard; nothing appears before `commit`, and nothing is left without it.

    Its bytes depend on the rows alone, not on how they were handed over.
    """

    def __init__(self, folder: Path, number: int, settings: Settings) -> None:
        self._pa = require("pyarrow", "writing embeddings")
        self._settings, self._number = settings, number
        self._path = shard_path(folder, number)
        self._schema = self._columns()
        self._stack = contextlib.ExitStack()
        self._waiting: list[Rows] = []
        self._bytes = self._rows = 0
        self._temporary = self._stack.enter_context(temporary_beside(self._path))
        with output_errors(self._path):
            self._file = self._open_file()

    def _open_file(self) -> Any:
        parquet = require("pyarrow.parquet", "writing embeddings")
        return parquet.ParquetWriter(
            self._temporary,
            self._schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=["budget", "weights"],
            write_statistics=False,
            write_page_checksum=True,
        )

    def add(self, rows: Rows) -> None:
        """Take rows that follow those before."""
        patches = rows.patches or []
        # One row at a time: where a row group ends must not depend on how rows were grouped.
        for i, path in enumerate(rows.paths):
            one = Rows([path], rows.cls[i : i + 1], patches[i : i + 1] if patches else None)
            self._waiting.append(one)
            self._bytes += one.cls.nbytes + sum(p.nbytes for p in one.patches or [])
            if self._bytes >= _GROUP_BYTES:
                self._flush()

    def commit(self, failures: Sequence[tuple[str, str]]) -> ShardRecord:
        """Put the shard in its place."""
        listed = [(printable(name), printable(reason)) for name, reason in failures]
        record = {
            "layout": LAYOUT,
            "fingerprint": self._settings.fingerprint,
            "shard": self._number,
            "rows": self._rows + len(self._waiting),
            "failures": listed,
        }
        with self._stack:
            if not (self._path.parents[1] / MANIFEST).is_file():
                raise OutputError(
                    f"{self._path.parents[1] / MANIFEST} is gone: something else has changed the "
                    "folder meanwhile; run veca embed again."
                )
            self._flush()
            with output_errors(self._path):
                self._file.add_key_value_metadata({_RECORD.decode(): json.dumps(record)})
                self._file.close()
            commit(self._temporary, self._path)
        return ShardRecord(self._path, self._number, self._rows, listed)

    def drop(self) -> None:
        """Leave nothing of the shard."""
        with self._stack, contextlib.suppress(Exception):
            self._file.close()

    def _flush(self) -> None:
        if not self._waiting:
            return
        pa, settings = self._pa, self._settings
        count = len(self._waiting)
        cls = np.concatenate([one.cls for one in self._waiting])
        columns: dict[str, Any] = {
            "path": pa.array([printable(one.paths[0]) for one in self._waiting], pa.string()),
            "cls": pa.FixedSizeListArray.from_arrays(pa.array(cls.reshape(-1)), cls.shape[1]),
        }
        if settings.patches:
            grids = [(one.patches or [])[0] for one in self._waiting]
            ends = np.cumsum([0, *(grid.size for grid in grids)], dtype=np.int64)
            values = np.concatenate([grid.reshape(-1) for grid in grids])
            columns["patches"] = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(values))
            for axis, name in enumerate(("grid_height", "grid_width")):
                columns[name] = pa.array([grid.shape[axis] for grid in grids], pa.int32())
        columns["budget"] = pa.array([settings.cores] * count, pa.int32())
        columns["weights"] = pa.array([settings.weights] * count, pa.string())
        with output_errors(self._path):
            self._file.write_table(pa.table(columns, schema=self._schema), row_group_size=count)
        self._rows += count
        self._waiting, self._bytes = [], 0

    def _columns(self) -> Any:
        pa, settings = self._pa, self._settings
        number = pa.float16() if settings.dtype == "float16" else pa.float32()
        fields = [
            pa.field("path", pa.string()),
            pa.field("cls", pa.list_(number, settings.dimensions)),
        ]
        if settings.patches:
            fields += [
                pa.field("patches", pa.large_list(number)),
                pa.field("grid_height", pa.int32()),
                pa.field("grid_width", pa.int32()),
            ]
        fields += [pa.field("budget", pa.int32()), pa.field("weights", pa.string())]
        return pa.schema(fields)


class ParquetWriter:
    """Some shards, one after the other, written by a thread one step behind the model.

    A shard is on the disk when the last of its images has come, or is known to have failed.
    """

    def __init__(self, folder: Path, settings: Settings, shards: Sequence[Shard]) -> None:
        self._folder, self._settings = folder, settings
        self._writes = BackgroundWrites(1, most=1)
        self._left, self._next = deque(shards), 0  # the shard and the row to be written next
        self._waiting: dict[tuple[int, int], Result[PlannedRow] | tuple[str, str]] = {}
        self._writer: ShardWriter | None = None
        self._failures: list[tuple[str, str]] = []
        self._finished: deque[ShardRecord] = deque()

    def has(self, item: PlannedRow) -> bool:
        return False  # a shard is done as a whole, or not at all

    def add(self, results: Sequence[Result[PlannedRow]]) -> None:
        for result in results:
            self._waiting[result.item.shard.number, result.item.number] = result
        self._write_on()

    def fail(self, item: PlannedRow, reason: str) -> None:
        self._waiting[item.shard.number, item.number] = (item.name, reason)
        self._write_on()

    def finish(self) -> None:
        self._writes.finish()

    def finished(self) -> Iterator[ShardRecord]:
        """The shards that were put on the disk since the last time."""
        while self._finished:
            yield self._finished.popleft()

    def close(self) -> None:
        """Wait for what is under way and drop what is not finished."""
        self._writes.close()
        if self._writer is not None:
            self._writer.drop()

    def _write_on(self) -> None:
        """Have rows written as far as there is no gap before them."""
        while self._left:
            shard, stretch = self._left[0], []
            while (shard.number, self._next) in self._waiting:
                stretch.append(self._waiting.pop((shard.number, self._next)))
                self._next += 1
            is_last = self._next == shard.stop - shard.start
            if stretch:
                self._writes.submit(self._write, shard, stretch, is_last)
            if not is_last:
                return
            self._left.popleft()
            self._next = 0

    def _write(
        self, shard: Shard, stretch: list[Result[PlannedRow] | tuple[str, str]], is_last: bool
    ) -> None:
        if self._writer is None:
            self._writer = ShardWriter(self._folder, shard.number, self._settings)
        self._failures += [one for one in stretch if not isinstance(one, Result)]
        good = [one for one in stretch if isinstance(one, Result)]
        if good:
            patches = [one.arrays["patches"] for one in good] if self._settings.patches else None
            cls = np.stack([one.arrays["cls"] for one in good])
            self._writer.add(Rows([one.item.name for one in good], cls, patches))
        if is_last:
            self._finished.append(self._writer.commit(self._failures))
            self._writer, self._failures = None, []


# --------------------------------------------------------------------------------------- reading


def finished_shards(folder: Path, settings: Settings) -> list[ShardRecord]:
    """The shards that are there, by number, each checked to be whole and made with `settings`."""
    try:
        entries = sorted((folder / SHARDS).iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{folder / SHARDS} cannot be listed ({error.strerror}).") from error
    entries = [path for path in entries if not path.name.startswith(".")]
    return sorted((_record(path, settings) for path in entries), key=lambda record: record.number)


def _record(path: Path, settings: Settings) -> ShardRecord:
    parquet = require("pyarrow.parquet", "reading embeddings")
    name = _NAME.fullmatch(path.name)
    try:
        if name is None:
            raise ValueError("its name is not that of a shard")
        metadata = parquet.read_metadata(path)
        record = from_json((metadata.metadata or {})[_RECORD])
        failures = [(str(n), str(r)) for n, r in record["failures"]]
        if record["rows"] != metadata.num_rows or record["shard"] != int(name[1]):
            raise ValueError("its rows or its number are not those it was written with")
        fingerprint = record["fingerprint"]
    except Exception as error:  # pyarrow has several types for a damaged file
        reason = str(error) if type(error) is ValueError else "it is cut short, damaged or foreign"
        raise InputError(
            f"{path} is no shard of embeddings ({reason}); remove it, then run veca embed again."
        ) from error
    if fingerprint != settings.fingerprint:
        raise InputError(
            f"{path} was made with other settings than the rest of its folder; remove it, then run "
            "veca embed again."
        )
    return ShardRecord(path, record["shard"], metadata.num_rows, failures)


def read_manifest(folder: Path) -> tuple[Settings, dict[str, Any]]:
    """The settings of a folder of embeddings, and all that its manifest says."""
    path = folder / MANIFEST
    try:
        manifest = from_json(path.read_text("utf-8"))
        if manifest["layout"] != LAYOUT:
            raise ValueError
        settings = Settings.from_dict(manifest["settings"])
    except OSError as error:
        raise InputError(
            f"{folder} is no folder of embeddings: {MANIFEST} cannot be read "
            f"({error.strerror}); veca embed makes one."
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} does not list the settings of embeddings; remove the folder and embed again, "
            "or choose another."
        ) from error
    return settings, manifest


def iter_embeddings(folder: str | os.PathLike[str], *, patches: bool = False) -> Iterator[Rows]:
    """The rows of a folder of embeddings, some thousands at a time, in order.

    With `patches` a few images at a time, each with its grid [h, w, D].
    """
    folder = Path(folder).expanduser()
    settings, _ = read_manifest(folder)
    if patches and not settings.patches:
        raise InputError(f"{folder} holds no patches; embed again with patches (--patches).")
    for record in finished_shards(folder, settings):
        yield from read_shard(record.path, settings, patches=patches)


def read_shard(path: Path, settings: Settings, *, patches: bool = False) -> Iterator[Rows]:
    """The rows of one shard, a row group or less at a time."""
    columns = ["path", "cls"] + (["patches", "grid_height", "grid_width"] if patches else [])
    with _reading(path), _open(path) as file:
        for part in file.iter_batches(batch_size=16 if patches else 8192, columns=columns):
            cls = _values(part["cls"]).reshape(-1, settings.dimensions)
            yield Rows(part["path"].to_pylist(), cls, _grids(part) if patches else None)


def read_paths(path: Path) -> list[str]:
    """The images of one shard."""
    with _reading(path), _open(path) as file:
        names: list[str] = file.read(["path"])["path"].to_pylist()
        return names


def read_embeddings(folder: str | os.PathLike[str]) -> tuple[list[str], NDArray[Any]]:
    """Every image of a folder of embeddings and its cls features [n, D], in the stored dtype.

    Reads what there is, also of a run that was stopped.
    """
    folder = Path(folder).expanduser()
    settings, _ = read_manifest(folder)
    records = finished_shards(folder, settings)
    names: list[str] = []
    cls = np.empty((sum(r.rows for r in records), settings.dimensions), settings.dtype)
    for record in records:
        for rows in read_shard(record.path, settings):
            cls[len(names) : len(names) + len(rows.paths)] = rows.cls
            names += rows.paths
    return names, cls


def _values(column: Any) -> NDArray[Any]:
    values: NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False)
    return values


def _grids(part: Any) -> list[NDArray[Any]]:
    heights, widths = part["grid_height"].to_pylist(), part["grid_width"].to_pylist()
    ends = np.cumsum(part["patches"].value_lengths().to_numpy())[:-1]
    values = np.split(_values(part["patches"]), ends)
    return [v.reshape(h, w, -1) for v, h, w in zip(values, heights, widths, strict=True)]


def _open(path: Path) -> Any:
    """A shard whose pages are checked as they are read; those of 0.1 have no checksums."""
    parquet = require("pyarrow.parquet", "reading embeddings")
    return parquet.ParquetFile(path, page_checksum_verification=True)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """pyarrow's errors, in our words."""
    arrow = require("pyarrow", "reading embeddings")
    try:
        yield
    except (arrow.ArrowException, OSError, KeyError) as error:
        raise InputError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); remove it, then run veca embed "
            "again."
        ) from error
