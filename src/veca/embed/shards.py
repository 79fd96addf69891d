"""From the images of some shards to finished shards: decode, batch, compute, write.

Both engines run this. How images are batched is a function of the shard's images alone, and on a
CPU each batch is computed by one thread (several batches at a time), so that the numbers depend
neither on the number of workers and processors nor on what was done before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca._util.memory import is_out_of_memory
from veca._util.threads import open_lanes
from veca.data.decode import GAP, EncodedImage
from veca.data.sources import ImageSource
from veca.embed.features import DTYPES
from veca.embed.plan import GONE, Plan, Shard
from veca.embed.settings import Settings
from veca.embed.writers.parquet import Rows, ShardRecord, ShardWriter
from veca.errors import BadImageError, DataError, InputError
from veca.images import MAX_PIXELS, normalize, target_size
from veca.model import Veca

IN_A_ROW = 100
"""So many images in a row that cannot be read are no accident: the run stops, and the shard they
lie in is not written."""

_WINDOW = 4  # batches' worth of images that are sorted by size before they are batched
_HOLD_BYTES = 256 * 2**20  # decoded pixels in one window, at most
_JOB_BYTES = 2 * 2**20  # decoded pixels that one job brings back, about
_JOB_IMAGES = 16

Decoded: TypeAlias = "NDArray[np.uint8] | str"
"""Pixels [H, W, 3] on the patch grid, or why there are none."""

Results: TypeAlias = "Generator[Any, None, None]"
OrderedMap: TypeAlias = "Callable[[Callable[[Any], Any], Iterable[Any]], Results]"
"""`map` that works ahead: `veca.data.pool.ordered_map` with its workers chosen, or the like."""

NOT_THERE = "no longer in the source"


class Decoder:
    """Reads images of a source and fits them to the patch grid."""

    def __init__(self, source: ImageSource | None, settings: Settings) -> None:
        self._source, self._size, self._fast = source, settings.pixels, settings.fast_jpeg
        self._patch = settings.model_config.patch_size

    def __call__(self, places: NDArray[np.int64]) -> list[Decoded]:
        return [self._decode(int(place)) for place in places]

    def _decode(self, place: int) -> Decoded:
        if place == GONE or self._source is None:
            return NOT_THERE
        try:
            return self.fit(EncodedImage.of(self._source, place))
        except BadImageError as error:
            return error.reason

    def fit(self, encoded: EncodedImage) -> NDArray[np.uint8]:
        """The pixels that the model sees; BadImageError if there are none."""
        height, width = self._target(encoded.name, *encoded.size)
        scale = 1.0
        if self._fast:
            scale = GAP * max(height / encoded.size[0], width / encoded.size[1])
        return self._resized(encoded.decode(scale), height, width)

    def fit_image(self, image: Image.Image, name: str) -> NDArray[np.uint8]:
        """The same for an image that is decoded already."""
        return self._resized(image, *self._target(name, image.height, image.width))

    def _target(self, name: str, height: int, width: int) -> tuple[int, int]:
        target = target_size(height, width, self._size, "resize", self._patch)
        # A sliver of 1 x 100,000 pixels with its short side scaled to 224 would be 5 Gpixel.
        if target[0] * target[1] > MAX_PIXELS:
            raise BadImageError(name, f"{height} x {width} would become {target[0]} x {target[1]}")
        return target

    @staticmethod
    def _resized(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return np.array(image)


class Compute:
    """The model, which is in evaluation mode, on a batch of decoded images of one size.

    Safe to call from several threads.
    """

    def __init__(self, model: Veca, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def __call__(self, images: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """uint8 [B, H, W, 3] -> cls [B, D], patches [B, h, w, D] or None, as they are stored."""
        config = self._model.config
        try:
            pixels = torch.from_numpy(images).to(self._device).permute(0, 3, 1, 2).contiguous()
            pixels = normalize(pixels.float().div(255), config.image_mean, config.image_std)
            out = self._model(pixels, cores=self._settings.cores)
            cls = self._stored(out.cls)
            if not self._settings.patches:
                return cls, None
            return cls, self._stored(out.patches.unflatten(1, out.grid))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            count, height, width, _ = images.shape
            raise InputError(
                f"out of memory with {count} images of {height} x {width} pixels; use a smaller "
                "batch or a smaller size."
            ) from error

    def _stored(self, features: Tensor) -> NDArray[Any]:
        dtype = self._settings.dtype
        stored = features.to(DTYPES[dtype])
        if not torch.isfinite(stored).all():
            hint = (
                "store them as float32" if torch.isfinite(features).all() else "check the weights"
            )
            raise InputError(f"features are NaN or too large for {dtype}; {hint}.")
        array: NDArray[Any] = stored.cpu().numpy()
        return array


@dataclass
class _Window:
    """Consecutive images of one shard, and their features when they are ready."""

    shard: Shard
    names: list[str]
    batches: list[tuple[list[int], Future[Any]]]
    failures: list[tuple[str, str]]
    images: int
    last: bool


def embed_shards(
    shards: Sequence[Shard],
    plan: Plan,
    source: ImageSource,
    compute: Compute,
    settings: Settings,
    folder: Path,
    *,
    ordered_map: OrderedMap,
    lanes: int,
    on_images: Callable[[int], None] = lambda count: None,
) -> Iterator[ShardRecord]:
    """Work through some shards, in order; yields each when it is on the disk.

    Args:
        lanes: batches computed at the same time, each by one thread.
        on_images: called with the number of images that were just finished.
    """
    with ExitStack() as stack:
        # One thread each: what a batch comes to must not depend on how many processors there are.
        pool = stack.enter_context(open_lanes(lanes))
        scribe = _Scribe(folder, settings)
        stack.callback(scribe.close)
        waiting: deque[_Window] = deque()
        readings = _readings(shards, plan, source, settings, ordered_map)
        stack.callback(readings.close)

        def finish(most: int) -> Iterator[ShardRecord]:
            while waiting and sum(max(1, len(w.batches)) for w in waiting) >= most:
                window = waiting.popleft()
                record = scribe.take(window)
                on_images(window.images)
                if record is not None:
                    yield record

        trouble: DataError | None = None
        try:
            for shard, names, decoded, last in _windows(readings, settings.batch):
                waiting.append(_submit(pool, compute, settings.batch, shard, names, decoded, last))
                yield from finish(lanes + _WINDOW)
        except DataError as error:  # what was read before it is still good
            trouble = error
        yield from finish(0)
        record = scribe.settle()
        if record is not None:
            yield record
        if trouble is not None:
            raise trouble


def _readings(
    shards: Sequence[Shard],
    plan: Plan,
    source: ImageSource,
    settings: Settings,
    ordered_map: OrderedMap,
) -> Results:
    """(shard, name, pixels or reason, whether it is the shard's last) of each image, in order."""
    images = _images_a_job(settings)

    def jobs() -> Iterator[NDArray[np.int64]]:
        for shard in shards:
            places = plan.places_of(shard)
            for start in range(0, len(places), images):
                yield places[start : start + images]

    with closing(ordered_map(Decoder(source, settings), jobs())) as results:
        for shard in shards:
            names, done = plan.names_of(shard), 0
            while done < len(names):
                for decoded in next(results):
                    yield shard, names[done], decoded, done + 1 == len(names)
                    done += 1


def _images_a_job(settings: Settings) -> int:
    """Fewer if they are large: a few jobs for each worker are under way at any time."""
    if settings.pixels is None:
        return 1
    sides = settings.pixels if isinstance(settings.pixels, tuple) else (settings.pixels,) * 2
    return max(1, min(_JOB_IMAGES, _JOB_BYTES // (3 * sides[0] * sides[1])))


def _windows(
    readings: Iterable[tuple[Shard, str, Decoded, bool]], batch: int
) -> Iterator[tuple[Shard, list[str], list[Decoded], bool]]:
    """Stretches of a shard's images; a few batches long, or less where images are large."""
    names: list[str] = []
    decoded: list[Decoded] = []
    held = in_a_row = 0
    for shard, name, one, last in readings:
        names.append(name)
        decoded.append(one)
        if not isinstance(one, str):
            held, in_a_row = held + one.nbytes, 0
        elif one != NOT_THERE:
            in_a_row += 1
        if in_a_row == IN_A_ROW:
            raise DataError(
                f"{IN_A_ROW} images in a row cannot be read, the last {name} ({one}); check that "
                "the disk is there, repair or remove them, then run it again."
            )
        if last or len(names) == _WINDOW * batch or held >= _HOLD_BYTES:
            yield shard, names, decoded, last
            names, decoded, held = [], [], 0


def _submit(
    pool: ThreadPoolExecutor,
    compute: Compute,
    batch: int,
    shard: Shard,
    names: list[str],
    decoded: list[Decoded],
    last: bool,
) -> _Window:
    groups: dict[tuple[int, ...], list[int]] = {}
    failures: list[tuple[str, str]] = []
    for i, one in enumerate(decoded):
        if isinstance(one, str):
            failures.append((names[i], one))
        else:
            groups.setdefault(one.shape, []).append(i)
    batches = []
    for group in groups.values():
        for start in range(0, len(group), batch):
            rows = group[start : start + batch]
            images = np.stack([decoded[i] for i in rows])  # type: ignore[arg-type]
            batches.append((rows, pool.submit(compute, images)))
    return _Window(shard, names, batches, failures, len(names), last)


class _Scribe:
    """Writes shards in a thread of its own, one step behind the model."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder, self._settings = folder, settings
        self._thread = ThreadPoolExecutor(1, "veca-write")
        self._step: Future[ShardRecord | None] | None = None
        self._writer: ShardWriter | None = None
        self._failures: list[tuple[str, str]] = []

    def take(self, window: _Window) -> ShardRecord | None:
        """Wait for a window's features and hand them on; a shard that was finished before."""
        cls: list[Any] = [None] * window.images
        patches: list[Any] = [None] * window.images
        for places, future in window.batches:
            batch_cls, batch_patches = future.result()
            for row, place in enumerate(places):
                cls[place] = batch_cls[row]
                patches[place] = None if batch_patches is None else batch_patches[row]
        good = [i for i, one in enumerate(cls) if one is not None]
        rows = None
        if good:
            grids = [patches[i] for i in good] if self._settings.patches else None
            rows = Rows([window.names[i] for i in good], np.stack([cls[i] for i in good]), grids)
        done = self.settle()
        self._step = self._thread.submit(self._write, window, rows)
        return done

    def settle(self) -> ShardRecord | None:
        """Wait for the step under way; the shard that it finished, if it did."""
        step, self._step = self._step, None
        return None if step is None else step.result()

    def close(self) -> None:
        """Wait for what is under way and drop what is not finished."""
        self._thread.shutdown()
        if self._writer is not None:
            self._writer.drop()

    def _write(self, window: _Window, rows: Rows | None) -> ShardRecord | None:
        if self._writer is None:
            self._writer = ShardWriter(self._folder, window.shard.number, self._settings)
        if rows is not None:
            self._writer.add(rows)
        self._failures += window.failures
        if not window.last:
            return None
        record = self._writer.commit(self._failures)
        self._writer, self._failures = None, []
        return record
