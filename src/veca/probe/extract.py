"""Features once, probes many: every image is decoded once for all backbones, budgets and sizes.

`extract` looks up what the cache has, reads the images that anything is missing of, shows each at
every size that is asked for, and runs every backbone and budget on the batch.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from veca.errors import ProbeError
from veca.probe.backbone import Backbone, Features, guarded_features
from veca.probe.cache import Array, Arrays, Entry, digest
from veca.probe.datasets import Dataset
from veca.probe.kept import Kept, room
from veca.probe.protocol import Extract
from veca.probe.views import Shown, Tile, View, to_unit

GLOBAL, DENSE = "global", "dense"
KINDS = (GLOBAL, DENSE)
PART_SIZE = {GLOBAL: 256, DENSE: 32}
"""Images in a file of the cache: what a stopped run loses, at most."""

_STORED = {"float16": torch.float16, "float32": torch.float32}
_HELD_BYTES = 512 * 2**20  # of decoded pixels that wait, and of features that a CPU trains on
_WRITERS = 2

Progress = Callable[[int, int], None]
"""Called with (images done, images to do)."""


@dataclass(frozen=True)
class Want:
    """Features to have: of one backbone (at its budget), seen through one view."""

    backbone: Backbone
    view: View
    kind: str
    """"global": the CLS and the mean of the patches; "dense": every patch."""


@dataclass
class Summary:
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

    def held(self, device: torch.device) -> Kept[int, DenseSample]:
        """`dense`, on a device, where samples stay as far as memory allows: for training."""
        return Kept(lambda i: self.dense(i).to(device), room(device, _HELD_BYTES))

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
    summary: Summary | None = None,
) -> list[Stored]:
    """The features of images of a dataset, in the order of `indices`; one `Stored` per want.

    Args:
        cache: the folder that keeps them; None: a temporary one.
        stack: what removes temporary folders, when it is closed.
        workers: threads that read images ahead; by default one a processor, at most 8.
    """
    if not indices:
        raise ProbeError(f"no images to take features of in the {dataset.split} split.")
    summary = Summary() if summary is None else summary
    for want in wants:
        want.backbone.refresh()  # weights may have been trained on since the last time
    jobs = []
    for want in wants:
        root = _root(want, cache, stack, summary)
        part_size = PART_SIZE[want.kind]
        key = _key(dataset, indices, want, settings)
        jobs.append(_Job(want, Entry(root, key, len(indices), part_size), settings))
    for job in jobs:
        job.todo = set(job.entry.missing())
        summary.damaged += job.entry.damaged
        summary.reused += len(job.entry.parts) - len(job.todo)
        summary.computed += len(job.todo)
    places = sorted(
        {place for job in jobs for part in job.todo for place in job.entry.members(part)}
    )
    views = list(dict.fromkeys(job.want.view for job in jobs if job.todo))
    total = len(indices)
    if progress:
        progress(total - len(places), total)
    done = total - len(places)
    shown_ahead = _read_ahead(dataset, indices, places, views, workers, settings.batch)
    pending: list[tuple[int, dict[View, Shown]]] = []
    with _Writer() as writer:
        for place, shown in shown_ahead:
            pending.append((place, shown))
            summary.decoded += 1
            if len(pending) == settings.batch:
                _run(jobs, pending, writer)
                done += len(pending)
                pending = []
                if progress:
                    progress(done, total)
        if pending:
            _run(jobs, pending, writer)
    if progress and places:
        progress(total, total)
    return [Stored(job.entry, job.want.kind) for job in jobs]


class _Writer:
    """Writes parts while the next ones are computed; when it is closed, all are on the disk."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_WRITERS, "veca-probe-write")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> _Writer:
        return self

    def submit(self, entry: Entry, part: int, samples: Sequence[Arrays]) -> None:
        """Returns at once, unless too many parts wait: they are held in memory."""
        self._waiting.append(self._pool.submit(lambda: entry.write(part, _join(samples))))
        while len(self._waiting) > 2 * _WRITERS:
            self._waiting.popleft().result()

    def __exit__(self, failed: object, *_: object) -> None:
        self._pool.shutdown()
        if failed is None:
            for future in self._waiting:
                future.result()


class _Job:
    """One want on its way: what is missing of it, and what has been computed of the next part."""

    def __init__(self, want: Want, entry: Entry, settings: Extract) -> None:
        self.want = want
        self.entry = entry
        self.settings = settings
        self.todo: set[int] = set()
        self._done: dict[int, Arrays] = {}

    def wants_place(self, place: int) -> bool:
        return place // self.entry.part_size in self.todo

    def add(self, place: int, arrays: Arrays, writer: _Writer) -> None:
        """Take the features of an image; when those of its part are all there, have it written."""
        self._done[place] = arrays
        part = place // self.entry.part_size
        members = self.entry.members(part)
        if all(member in self._done for member in members):
            writer.submit(self.entry, part, [self._done.pop(member) for member in members])
            self.todo.remove(part)


def _root(want: Want, cache: str | Path | None, stack: ExitStack, summary: Summary) -> Path:
    if cache is not None and want.backbone.identity() is not None:
        return Path(cache).expanduser()
    if cache is not None and want.backbone.label not in summary.uncached:
        summary.uncached.append(want.backbone.label)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="veca-probe-")))


def _key(dataset: Dataset, indices: Sequence[int], want: Want, settings: Extract) -> dict[str, Any]:
    dense = {"stored_as": settings.dense_dtype} if want.kind == DENSE else {}
    return {
        "backbone": want.backbone.identity(),
        "computed_in": settings.dtype,
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


def _read_ahead(
    dataset: Dataset,
    indices: Sequence[int],
    places: Sequence[int],
    views: Sequence[View],
    workers: int | None,
    batch: int,
) -> Iterator[tuple[int, dict[View, Shown]]]:
    """(place, the image through every view), in order, read in advance by threads."""
    if not places:
        return
    count = min(8, os.cpu_count() or 1) if workers is None else workers

    def read(place: int) -> dict[View, Shown]:
        image = dataset.image(indices[place])
        return {view: view.show(image) for view in views}

    waiting: deque[tuple[int, Future[dict[View, Shown]]]] = deque()
    left = iter(places)
    ahead, each = batch + count, 0
    with ThreadPoolExecutor(count, "veca-probe-read") as pool:
        try:
            while True:
                while len(waiting) < ahead and each * len(waiting) < _HELD_BYTES:
                    place = next(left, None)
                    if place is None:
                        break
                    waiting.append((place, pool.submit(read, place)))
                if not waiting:
                    return
                place, future = waiting.popleft()
                shown = future.result()
                each = sum(p.numel() for one in shown.values() for p in one.pixels)
                yield place, shown
        finally:
            pool.shutdown(cancel_futures=True)


def _run(
    jobs: Sequence[_Job], batch: Sequence[tuple[int, dict[View, Shown]]], writer: _Writer
) -> None:
    """Run every job on a batch of images; tiles of one size go together."""
    ready: dict[Any, Tensor] = {}  # pixels on a device, for all budgets
    for job in jobs:
        wanted = [(place, shown[job.want.view]) for place, shown in batch if job.wants_place(place)]
        if not wanted:
            continue
        groups: dict[tuple[int, ...], list[tuple[int, int, Tensor]]] = {}
        for at, (_, shown) in enumerate(wanted):
            for number, pixels in enumerate(shown.pixels):
                groups.setdefault(tuple(pixels.shape), []).append((at, number, pixels))
        results: list[list[Any]] = [[None] * len(shown.pixels) for _, shown in wanted]
        for group in groups.values():
            for start in range(0, len(group), job.settings.batch):
                chunk = group[start : start + job.settings.batch]
                device = job.want.backbone.device
                key = device, job.want.view, *((wanted[at][0], number) for at, number, _ in chunk)
                if key not in ready:
                    ready[key] = to_unit(torch.stack([pixels for _, _, pixels in chunk]), device)
                for (at, number, _), arrays in zip(chunk, _features(job, ready[key]), strict=True):
                    results[at][number] = arrays
        for (place, shown), tiles in zip(wanted, results, strict=True):
            job.add(place, _sample(job.want.kind, shown, tiles), writer)


def _features(job: _Job, pixels: Tensor) -> list[Arrays]:
    """What is kept of each tile."""
    backbone = job.want.backbone
    grid = backbone.grid_for((pixels.shape[2], pixels.shape[3]), job.settings.cell)
    out = guarded_features(backbone, pixels, grid)
    if job.want.kind == GLOBAL:
        cls, mean = out.cls.cpu().numpy(), out.patches.mean(dim=1).cpu().numpy()
        return [{"cls": cls[i], "mean": mean[i]} for i in range(len(pixels))]
    patches = _as_stored(out, job.settings.dense_dtype, backbone.label)
    shape = np.array(out.grid, dtype=np.int32)
    return [{"patches": patches[i], "grid": shape} for i in range(len(pixels))]


def _as_stored(out: Features, dtype: str, label: str) -> Array:
    stored = out.patches.to(_STORED[dtype])
    if not torch.isfinite(stored).all():
        raise ProbeError(
            f"dense features of {label} are too large for {dtype}; use "
            "--set extract.dense_dtype=float32."
        )
    array: Array = stored.cpu().numpy()
    return array


def _sample(kind: str, shown: Shown, tiles: Sequence[Arrays]) -> Arrays:
    """The arrays of one image, each with a leading axis to join along."""
    size = np.array([shown.size], dtype=np.int32)
    if kind == GLOBAL:
        return {"sizes": size, "cls": tiles[0]["cls"][None], "mean": tiles[0]["mean"][None]}
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
