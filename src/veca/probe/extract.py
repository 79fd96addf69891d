"""Features once, probes many: every image is decoded once for all backbones, budgets and sizes.

`extract` looks up what the cache has, reads the images that anything is missing of, shows each at
every size that is asked for, and runs every backbone and budget on the batch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from veca._util.cache import mark_used, shrink_cache
from veca.embed.pipeline import ShapeBatches, as_written, read_ahead
from veca.embed.writers import BackgroundWrites, Result
from veca.errors import InputError, ProbeError
from veca.precision import protocol_name
from veca.probe.backbone import Backbone, guarded_features
from veca.probe.cache import (
    Array,
    Arrays,
    CacheWriter,
    Entry,
    MemoryCache,
    default_folder,
    digest,
    memory_to_use,
)
from veca.probe.datasets import Dataset
from veca.probe.protocol import Extract
from veca.probe.views import Shown, Tile, View, to_unit

CLS, GLOBAL, DENSE = "cls", "global", "dense"
KINDS = (CLS, GLOBAL, DENSE)
PART_SIZE = {CLS: 256, GLOBAL: 256, DENSE: 32}
"""Images in a file of the cache: what a stopped run loses, at most."""

_HELD_BYTES = 512 * 2**20  # of features that a CPU trains on
_WRITERS = 2

Progress = Callable[[int, int], None]
"""Called with (images done, images to do)."""


@dataclass(frozen=True)
class Want:
    """Features to have: of one backbone (at its budget), seen through one view."""

    backbone: Backbone
    view: View
    kind: str
    """"cls": the CLS alone; "global": that and the mean of the patches; "dense": every patch."""


@dataclass
class ExtractionSummary:
    """What an extraction did, over all the data it was used for."""

    decoded: int = 0
    """Images read."""
    computed: int = 0
    """Parts written to the cache."""
    reused: int = 0
    """Parts that the cache had."""
    damaged: list[str] = field(default_factory=list)
    """Parts that were there but not sound, and were computed again."""
    uncached: list[str] = field(default_factory=list)
    """Backbones whose weights cannot be told, so that nothing of theirs is kept."""


class DenseSample(NamedTuple):
    """The dense features of one image."""

    size: tuple[int, int]
    """(height, width) of the image as it was read."""
    frame: tuple[int, int]
    tiles: tuple[Tile, ...]
    maps: tuple[Tensor, ...]
    """[h, w, D] of each tile; from the cache in the dtype that it keeps, on the CPU."""

    @property
    def nbytes(self) -> int:
        return sum(features.nbytes for features in self.maps)

    def to(self, device: torch.device) -> DenseSample:
        return self._replace(maps=tuple(features.to(device) for features in self.maps))


class Stored:
    """The features of a list of images, on the disk."""

    def __init__(self, entry: Entry, kind: str) -> None:
        self.entry = entry
        self.kind = kind
        self._index: tuple[Array, Array, Array, Array] | None = None

    def __len__(self) -> int:
        return self.entry.count

    def matrix(self, choice: str) -> Tensor:
        """float32 [images, D]: "cls", "mean" or "cls+mean" (joined)."""
        names = choice.split("+")
        columns = [
            np.concatenate([self.entry.read(part, name) for part in self.entry.parts])
            for name in names
        ]
        return torch.from_numpy(np.concatenate(columns, axis=1))

    def sizes(self) -> Array:
        """int32 [images, 2]: (height, width) of each image as it was read."""
        return np.concatenate([self.entry.read(part, "sizes") for part in self.entry.parts])

    def dense(self, i: int) -> DenseSample:
        """The dense features of image `i`."""
        sizes, frames, tiles, first = self._dense_index()
        rows = tiles[first[i] : first[i + 1]]
        part = i // self.entry.part_size
        found, maps = [], []
        for top, left, height, width, flipped, h, w, start in rows.tolist():
            flat = self.entry.read_rows(part, "patches", start, start + h * w)
            maps.append(torch.from_numpy(flat).unflatten(0, (h, w)))
            found.append(Tile(top, left, height, width, bool(flipped)))
        size, frame = tuple(sizes[i].tolist()), tuple(frames[i].tolist())
        return DenseSample(size, frame, tuple(found), tuple(maps))

    def held(self, device: torch.device) -> MemoryCache[int, DenseSample]:
        """`dense`, on a device, where samples stay as far as memory allows: for training."""
        return MemoryCache(lambda i: self.dense(i).to(device), memory_to_use(device, _HELD_BYTES))

    def _dense_index(self) -> tuple[Array, Array, Array, Array]:
        if self._index is None:
            parts = self.entry.parts
            sizes, frames, tiles, counts = (
                np.concatenate([self.entry.read(part, name) for part in parts])
                for name in ("sizes", "frames", "tiles", "tile_counts")
            )
            self._index = sizes, frames, tiles, np.concatenate([[0], np.cumsum(counts)])
        return self._index


def extract(
    dataset: Dataset,
    indices: Sequence[int],
    wants: Sequence[Want],
    *,
    settings: Extract,
    cache: str | Path | None,
    stack: ExitStack,
    progress: Progress | None = None,
    workers: int | None = None,
    summary: ExtractionSummary | None = None,
) -> list[Stored]:
    """The features of images of a dataset, in the order of `indices`; one `Stored` per want.

    Args:
        cache: the folder that keeps them; None: a temporary one.
        stack: what removes temporary folders, when it is closed.
        workers: threads that read images ahead; by default one a processor, at most 8.
    """
    if not indices:
        raise ProbeError(f"no images to take features of in the {dataset.split} split.")
    summary = ExtractionSummary() if summary is None else summary
    for want in wants:
        want.backbone.refresh()  # weights may have been trained on since the last time
    writes = BackgroundWrites(_WRITERS, most=2 * _WRITERS)
    jobs = []
    for want in wants:
        root = _root(want, cache, stack, summary)
        key = _key(dataset, indices, want, settings)
        entry = Entry(root, key, len(indices), PART_SIZE[want.kind])
        writer = CacheWriter(entry, _join, writes)
        jobs.append(_Job(want, entry, writer, settings))
        summary.damaged += entry.damaged
        summary.reused += len(entry.parts) - len(writer.missing)
        summary.computed += len(writer.missing)
    total = len(indices)
    places = sorted(
        {i for job in jobs for part in job.writer.missing for i in job.entry.members(part)}
    )
    views = list(dict.fromkeys(job.want.view for job in jobs if job.writer.missing))
    done = total - len(places)
    if progress:
        progress(done, total)

    def read(place: int) -> _Views:
        image = dataset.image(indices[place])
        return place, {view: view.show(image) for view in views}

    count = min(8, os.cpu_count() or 1) if workers is None else workers
    images = read_ahead(read, places, workers=count, ahead=settings.batch + count, nbytes=_nbytes)
    with closing(writes), closing(images):
        while batch := list(islice(images, settings.batch)):
            summary.decoded += len(batch)
            _run(jobs, batch)
            done += len(batch)
            if progress:
                progress(done, total)
        for job in jobs:
            job.writer.finish()
    for job in jobs:
        mark_used(job.entry.folder)
    if cache is not None and Path(cache).expanduser() == default_folder():
        shrink_cache(keep=[job.entry.folder for job in jobs])
    return [Stored(job.entry, job.want.kind) for job in jobs]


_Views = tuple[int, dict[View, Shown]]
"""The place of an image, and the image through every view."""


def _nbytes(image: _Views) -> int:
    return sum(pixels.nbytes for shown in image[1].values() for pixels in shown.pixels)


class _Job(NamedTuple):
    """One want on its way to the cache."""

    want: Want
    entry: Entry
    writer: CacheWriter
    settings: Extract


def _root(
    want: Want, cache: str | Path | None, stack: ExitStack, summary: ExtractionSummary
) -> Path:
    if cache is not None and want.backbone.identity() is not None:
        return Path(cache).expanduser()
    if cache is not None and want.backbone.label not in summary.uncached:
        summary.uncached.append(want.backbone.label)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="veca-probe-")))


def _key(dataset: Dataset, indices: Sequence[int], want: Want, settings: Extract) -> dict[str, Any]:
    dense = {"stored_as": settings.dense_dtype} if want.kind == DENSE else {}
    return {
        "backbone": want.backbone.identity(),
        "computed_in": protocol_name(want.backbone.precision or settings.dtype),
        "cell": settings.cell,
        "dataset": dataset.name,
        "split": dataset.split,
        "data": dataset.fingerprint(),
        "files": dataset.state_on_disk(),
        "images": digest([dataset.ids[i] for i in indices]),
        "view": want.view.describe(),
        "features": want.kind,
        **dense,
    }


class _TilePixels(NamedTuple):
    """A tile of an image of a batch."""

    image: int
    number: int
    pixels: Tensor


def _run(jobs: Sequence[_Job], batch: Sequence[_Views]) -> None:
    """Run every job on a batch of images; tiles of one shape go together."""
    ready: dict[Any, Tensor] = {}  # pixels on a device, for all budgets
    for job in jobs:
        wanted = [
            (place, shown[job.want.view]) for place, shown in batch if not job.writer.has(place)
        ]
        found: list[list[Any]] = [[None] * len(shown.pixels) for _, shown in wanted]
        device = job.want.backbone.device
        for tiles in _tiles([shown for _, shown in wanted], job.settings.batch):
            key = device, job.want.view, *((wanted[t.image][0], t.number) for t in tiles)
            if key not in ready:
                ready[key] = to_unit(torch.stack([tile.pixels for tile in tiles]), device)
            for tile, arrays in zip(tiles, _features(job, ready[key]), strict=True):
                found[tile.image][tile.number] = arrays
        job.writer.add(
            [
                Result(place, _sample(job.want.kind, shown, arrays))
                for (place, shown), arrays in zip(wanted, found, strict=True)
            ]
        )


def _tiles(images: Sequence[Shown], batch_size: int) -> Iterator[list[_TilePixels]]:
    """All tiles of some images, in batches of one shape."""
    batches: ShapeBatches[_TilePixels] = ShapeBatches(batch_size)
    for image, shown in enumerate(images):
        for number, pixels in enumerate(shown.pixels):
            yield from batches.add(_TilePixels(image, number, pixels))
    yield from batches.rest()


def _features(job: _Job, pixels: Tensor) -> list[Arrays]:
    """What is kept of each tile."""
    backbone = job.want.backbone
    grid = backbone.grid_for((pixels.shape[2], pixels.shape[3]), job.settings.cell)
    out = guarded_features(backbone, pixels, grid, cls_only=job.want.kind == CLS)
    if job.want.kind == CLS:
        return [{"cls": cls} for cls in out.cls.cpu().numpy()]
    if job.want.kind == GLOBAL:
        cls, mean = out.cls.cpu().numpy(), out.patches.mean(dim=1).cpu().numpy()
        return [{"cls": cls[i], "mean": mean[i]} for i in range(len(pixels))]
    try:
        patches = as_written(out.patches, job.settings.dense_dtype)
    except InputError as error:
        raise ProbeError(
            f"dense features of {backbone.label} are too large for {job.settings.dense_dtype}; use "
            "--set extract.dense_dtype=float32."
        ) from error
    shape = np.array(out.grid, dtype=np.int32)
    return [{"patches": patches[i], "grid": shape} for i in range(len(pixels))]


def _sample(kind: str, shown: Shown, tiles: Sequence[Arrays]) -> Arrays:
    """The arrays of one image, each with a leading axis to join along."""
    size = np.array([shown.size], dtype=np.int32)
    if kind != DENSE:
        return {"sizes": size, **{name: array[None] for name, array in tiles[0].items()}}
    rows = [
        [tile.top, tile.left, tile.height, tile.width, tile.flipped, *arrays["grid"].tolist(), 0]
        for tile, arrays in zip(shown.tiles, tiles, strict=True)
    ]
    return {
        "sizes": size,
        "frames": np.array([shown.frame], dtype=np.int32),
        "tile_counts": np.array([len(tiles)], dtype=np.int32),
        "tiles": np.array(rows, dtype=np.int64),
        "patches": np.concatenate([arrays["patches"] for arrays in tiles]),
    }


def _join(samples: Sequence[Arrays]) -> Arrays:
    joined = {name: np.concatenate([one[name] for one in samples]) for name in samples[0]}
    if "tiles" in joined:
        # The last column: where the tile's patches start in this part.
        lengths = joined["tiles"][:, 5] * joined["tiles"][:, 6]
        joined["tiles"][:, 7] = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return joined
