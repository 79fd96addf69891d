"""From the images of some shards to finished shards: decode, batch, compute, write.

This machine and each worker of a cluster run this. How images are batched is a function of the
shard's images alone, and on a CPU each batch is computed by one thread (several batches at a time),
so that the numbers depend neither on the number of workers and processors nor on what was done
before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from veca.data.decode import GAP, EncodedImage
from veca.data.names import Names
from veca.data.sources import ImageSource
from veca.embed import pca
from veca.embed.pca import Reduction, Sample
from veca.embed.pipeline import ModelRunner, ShapeBatches, compute_ahead
from veca.embed.plan import GONE, Plan
from veca.embed.settings import Settings
from veca.embed.writers import CollectionWriter, Result
from veca.embed.writers.parquet import ParquetWriter, PlannedRow, Shard, ShardRecord
from veca.errors import BadImageError, DataError, ImageError, VecaError
from veca.images import pixel_limit, target_size
from veca.images.transform import check_memory
from veca.model import Veca, evaluating

IN_A_ROW = 100
"""So many images in a row that cannot be read are no accident: the run stops, and the shard they
lie in is not written."""

_WINDOW = 4  # batches' worth of images that are sorted by shape before they are computed
_HOLD_BYTES = 256 * 2**20  # decoded pixels in one window, at most
_JOB_BYTES = 2 * 2**20  # decoded pixels that one job brings back, about
_JOB_IMAGES = 16

Decoded: TypeAlias = "NDArray[np.uint8] | str"
"""Pixels [H, W, 3] on the patch grid, or why there are none."""

DecodeAhead: TypeAlias = (
    "Callable[[Callable[[Any], Any], Iterable[Any]], Generator[Any, None, None]]"
)
"""`map` that works ahead: `veca.data.pool.ordered_map` or `read_ahead`, its workers chosen."""

NOT_THERE = "no longer in the source"


class Decoder:
    """Reads images of a source and fits them to the patch grid."""

    def __init__(self, source: ImageSource | None, settings: Settings) -> None:
        self._source, self._size, self._fast = source, settings.pixels, settings.fast_jpeg
        self._config = settings.model_config

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
        target = target_size(height, width, self._size, "resize", self._config.patch_size)
        # A sliver of 1 x 100,000 pixels with its short side scaled to 224 would be 5 Gpixel.
        if target[0] * target[1] > pixel_limit():
            raise BadImageError(
                name,
                f"{height} x {width} would become {target[0]} x {target[1]}, more than the limit "
                f"max_pixels={pixel_limit():,}",
            )
        try:
            check_memory(self._config, (height, width), target)
        except ImageError as error:
            raise BadImageError(name, str(error)) from None
        return target

    @staticmethod
    def _resized(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return np.array(image)


class _DecodedImage(NamedTuple):
    """An image that has been decoded."""

    row: PlannedRow
    pixels: NDArray[np.uint8]


def compute_for(model: Veca, settings: Settings, reduction: Reduction | None = None) -> ModelRunner:
    """What computes the columns of a shard."""
    return ModelRunner(
        model,
        cores=settings.cores,
        what=settings.what,
        dtype=settings.dtype,
        width=settings.width,
        reduce=reduction,
        keep=settings.keep,
        agreement=settings.agreement,
    )


def embed_shards(
    shards: Sequence[Shard],
    plan: Plan,
    source: ImageSource,
    compute: ModelRunner,
    settings: Settings,
    folder: Path,
    *,
    decode_ahead: DecodeAhead,
    at_once: int,
    strict: bool = False,
    on_images: Callable[[int], None] = lambda count: None,
    writer: _RowWriter | None = None,
) -> Iterator[ShardRecord]:
    """Work through some shards, in order; yields each when it is on the disk.

    Args:
        at_once: batches computed at the same time, each by one thread.
        strict: stop at the first image that cannot be read.
        on_images: called with the number of images that were just finished.
        writer: what takes the rows; by default it makes the shards.
    """
    writer = writer or ParquetWriter(folder, settings, shards)

    def fail(row: PlannedRow, reason: str) -> None:
        if strict and reason != NOT_THERE:
            raise ImageError(f"{row.name}: {reason}")
        writer.fail(row, reason)
        on_images(1)

    def compute_rows(batch: list[_DecodedImage]) -> list[Result[PlannedRow]]:
        pixels = torch.from_numpy(np.stack([image.pixels for image in batch]))
        with torch.autocast("cpu", enabled=False):  # the settings say what is computed in
            features, _ = compute(pixels)
        return [
            Result(image.row, {name: array[i] for name, array in features.items()})
            for i, image in enumerate(batch)
        ]

    readings = _decoded(shards, plan, source, settings, decode_ahead)
    # One thread each: what a batch comes to must not depend on how many processors there are.
    results = compute_ahead(
        compute_rows,
        _batches(readings, settings.batch, fail),
        at_once=at_once,
        threads=1,
        queued=_WINDOW,
    )
    with closing(writer), closing(readings), closing(results):
        trouble: VecaError | None = None
        try:
            for batch in results:
                writer.add(batch)
                on_images(len(batch))
                yield from writer.finished()
        except (DataError, ImageError) as error:  # what was read before it is still good
            trouble = error
        writer.finish()
        yield from writer.finished()
        if trouble is not None:
            raise trouble


class _RowWriter(CollectionWriter[PlannedRow], Protocol):
    def finished(self) -> Iterator[ShardRecord]:
        """The shards that were put on the disk since the last time."""


class _SampleWriter:
    """Keeps what PCA is fitted to."""

    def __init__(self, what: Sequence[str]) -> None:
        self._found: dict[int, dict[str, Any]] = {}
        self._what = what

    def has(self, item: PlannedRow) -> bool:
        return False

    def add(self, results: Sequence[Result[PlannedRow]]) -> None:
        for result in results:
            self._found[result.item.number] = result.arrays

    def fail(self, item: PlannedRow, reason: str) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass

    def finished(self) -> Iterator[ShardRecord]:
        return iter(())

    def fit(self, dimensions: int) -> Reduction:
        sample = Sample(self._what)
        for place in sorted(self._found):
            sample.add(self._found[place])
        return sample.fit(dimensions)


def fit_reduction(
    dimensions: int,
    source: ImageSource,
    model: Veca,
    settings: Settings,
    *,
    decode_ahead: DecodeAhead,
    at_once: int,
) -> Reduction:
    """The principal components of the first images of a source, computed as its shards will be."""
    count = min(pca.sample_size(dimensions), len(source))
    names = Names.of(source.name(i) for i in range(count))
    plan = Plan([names], [np.arange(count)], count)
    exact = replace(settings, dtype="float32", pca=None)
    writer = _SampleWriter(settings.what)
    with evaluating(model):
        for _ in embed_shards(
            list(plan.shards()),
            plan,
            source,
            compute_for(model, exact),
            exact,
            Path(),
            decode_ahead=decode_ahead,
            at_once=at_once,
            writer=writer,
        ):
            pass
    return writer.fit(dimensions)


def _decoded(
    shards: Sequence[Shard],
    plan: Plan,
    source: ImageSource,
    settings: Settings,
    decode_ahead: DecodeAhead,
) -> Generator[tuple[PlannedRow, Decoded], None, None]:
    """Each image's place in the shards, and its pixels or a reason; in order."""
    images = _images_a_job(settings)

    def jobs() -> Iterator[NDArray[np.int64]]:
        for shard in shards:
            places = plan.places_of(shard)
            for start in range(0, len(places), images):
                yield places[start : start + images]

    with closing(decode_ahead(Decoder(source, settings), jobs())) as results:
        for shard in shards:
            names, done = plan.names_of(shard), 0
            while done < len(names):
                for decoded in next(results):
                    yield PlannedRow(shard, done, names[done]), decoded
                    done += 1


def _images_a_job(settings: Settings) -> int:
    """Fewer if they are large: a few jobs for each worker are under way at any time."""
    if settings.pixels is None:
        return 1
    sides = settings.pixels if isinstance(settings.pixels, tuple) else (settings.pixels,) * 2
    return max(1, min(_JOB_IMAGES, _JOB_BYTES // (3 * sides[0] * sides[1])))


def _batches(
    readings: Iterable[tuple[PlannedRow, Decoded]],
    batch_size: int,
    fail: Callable[[PlannedRow, str], None],
) -> Iterator[list[_DecodedImage]]:
    """Batches of one shape, out of stretches of a shard's images.

    A stretch is a few batches long, or less where images are large. Where it ends depends on the
    shard's images alone.
    """
    batches: ShapeBatches[_DecodedImage] = ShapeBatches(batch_size)
    length = held = in_a_row = 0
    for row, decoded in readings:
        length += 1
        if isinstance(decoded, str):
            in_a_row += decoded != NOT_THERE
            if in_a_row == IN_A_ROW:
                raise DataError(
                    f"{IN_A_ROW} images in a row cannot be read, the last {row.name} ({decoded}); "
                    "check that the disk is there, repair or remove them, then run it again."
                )
            fail(row, decoded)
        else:
            held, in_a_row = held + decoded.nbytes, 0
            yield from batches.add(_DecodedImage(row, decoded))
        if row.is_last or length == _WINDOW * batch_size or held >= _HOLD_BYTES:
            yield from batches.rest()
            length = held = 0
