"""Compute the features of many images and write them to disk.

A folder can be filled in several runs. Each file appears whole or not at all, so a run that was
stopped goes on where it stopped: files that are there, were made with the same settings and from
the image as it is now (its size and its modification time say so) are kept. `features.json` in the
folder records the settings, and a run with other settings is refused. A single file is collected
in memory and written at the very end: it cannot be resumed, and suits collections that fit in
memory. `veca.embed.writers.files` says what they hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from veca._util.files import place_for
from veca._util.numbers import count
from veca._util.threads import batches_at_once
from veca.checks import check_budget, check_model
from veca.embed.pipeline import DTYPES, ModelRunner, batch_by_shape, compute_ahead, read_ahead
from veca.embed.sources import Source, Sources, open_images, to_read
from veca.embed.writers import CollectionWriter, Result
from veca.embed.writers.files import FORMATS, NamedImage
from veca.embed.writers.folder import FolderWriter
from veca.embed.writers.single_file import SingleFileWriter
from veca.errors import ImageError, InputError, at_least, check_choice
from veca.images import FITS, Preprocessed, Size, check_size, preprocess
from veca.model import Veca, evaluating
from veca.weights import weights_hash

WHAT = ("cls", "patches")
"""What can be written: the global embedding, the dense features."""

_FileWriter: TypeAlias = "FolderWriter | SingleFileWriter"


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    images: int
    """Images found."""
    computed: int
    reused: int
    """Images whose features were there already."""
    failed: tuple[tuple[str, str], ...]
    """(path, message) of each image that could not be read."""
    seconds: float
    out: Path
    failures_file: Path | None
    """Where `failed` is written down, after what earlier runs could not read; None if there is
    nothing to write."""

    @property
    def images_per_second(self) -> float:
        """Computed ones only; reused files count for nothing."""
        return self.computed / self.seconds


def extract(
    model: Veca,
    sources: Sources,
    out: Source,
    *,
    cores: int | None = None,
    size: Size = 512,
    fit: str = "resize",
    what: Sequence[str] = WHAT,
    format: str | None = None,
    batch_size: int = 16,
    dtype: str = "float16",
    on_error: str = "skip",
    overwrite: bool = False,
    root: Source | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Compute the features of `sources` and write them to `out`.

    Args:
        sources: files, folders (with their subfolders), lists, tar shards and patterns; see
            `veca.embed.sources`.
        out: a folder, or a file ending in .npz or .safetensors that holds all images (with
            patches only if all their grids agree).
        cores: the budget; by default the whole bank.
        size, fit: how images come onto the patch grid; see `veca.preprocess`.
        what: "cls", "patches" or both.
        format: "npz" or "safetensors"; by default npz, or what the name of the file says.
        batch_size: images of one pixel size that are computed together, at most.
        dtype: "float16" or "float32", of the features as written; the model computes in its own.
        on_error: "skip" lists images that cannot be read and goes on; "raise" stops at the first.
        overwrite: start over: remove what earlier runs wrote to `out`.
        root: the folder that names start from; by default the one recorded in `out`, or else
            the deepest folder that holds all images.
        workers: threads that read images ahead; by default one a processor, at most 8.
        progress: called with (images finished, images found) as the work goes on.

    Raises:
        ImageError: a source is missing, or no image could be read (or one, with "raise").
        InputError: an option the model cannot take, or `out` was made with other settings.
        OutputError: `out` cannot be written.
    """
    start = time.perf_counter()
    check_model(model, "extract")
    place = place_for(out)
    batch_size = at_least("batch_size", batch_size)
    workers = min(8, os.cpu_count() or 1) if workers is None else at_least("workers", workers)
    check_choice("on_error", on_error, ("skip", "raise"))
    settings = _settings(model, cores, size, fit, what, dtype)
    source = open_images(sources)
    found: dict[Path, int] = {}
    for i in range(len(source)):
        found.setdefault(_absolute(source.name(i)), i)
    places = list(found.values())
    writer = _open_writer(
        place,
        settings,
        list(found),
        precision=str(model.dtype).removeprefix("torch."),
        format=format,
        root=None if root is None else _absolute(root),
        overwrite=overwrite,
    )

    def read(item: NamedImage) -> _Reading:
        # Looking for finished files is slow, too, and so is done by the reading threads.
        try:
            if writer.has(item):
                return item, None
            return item, preprocess(to_read(source, places[item.place]), size, fit=fit, model=model)
        except ImageError as error:
            return item, error
        except OSError as error:  # of a shard
            return item, ImageError(f"{item.path}: {error.strerror or error}")

    tally = _Tally(len(places), progress)
    compute = ModelRunner(model, cores=settings["cores"], what=settings["what"], dtype=dtype)
    threads = batches_at_once(compute.device)
    at_once = 1
    if compute.device.type == "cpu":
        at_once = max(1, min(threads, math.ceil(len(places) / batch_size)))
    reading = read_ahead(
        read, writer.items, workers=workers, ahead=workers + batch_size, nbytes=_nbytes
    )
    with evaluating(model), contextlib.closing(writer), contextlib.closing(reading):
        ready = _sift(
            reading,
            writer,
            tally,
            lambda item: source.name(places[item.place]),
            strict=on_error == "raise",
        )
        results = compute_ahead(
            partial(_compute, compute, cores=settings["cores"]),
            batch_by_shape(ready, batch_size),
            at_once=at_once,
            # If there are few batches, each gets more than one thread.
            threads=threads // at_once if at_once > 1 else None,
        )
        with contextlib.closing(results):
            for batch in results:
                writer.add(batch)
                tally.count(computed=len(batch))
        if tally.good:
            writer.finish()

    failures_file = writer.write_failures()
    if not tally.good:
        raise ImageError(
            f"none of {count(len(places), 'image')} could be read; the first: "
            f"{': '.join(writer.failed[0])} (all are listed in {failures_file})"
        )
    return Summary(
        images=len(places),
        computed=tally.computed,
        reused=tally.reused,
        failed=tuple(writer.failed),
        seconds=time.perf_counter() - start,
        out=place,
        failures_file=failures_file,
    )


def _settings(
    model: Veca, cores: int | None, size: Size, fit: str, what: Sequence[str], dtype: str
) -> dict[str, Any]:
    """Everything that decides what the numbers are, as JSON types."""
    wanted = [what] if isinstance(what, str) else list(what)
    for name in wanted:
        check_choice("kind of feature", name, WHAT)
    if not wanted:
        raise InputError("no kind of feature is chosen; choose cls, patches or both.")
    check_choice("dtype of the written features", dtype, DTYPES)
    check_choice("fit", fit, FITS)
    pixels = check_size(size, model.config.patch_size)
    return {
        "weights": weights_hash(model),
        "config": model.config.to_dict(),
        "cores": check_budget(cores, model.config.num_cores),
        "size": list(pixels) if isinstance(pixels, tuple) else pixels,
        "fit": fit,
        "what": [name for name in WHAT if name in wanted],
        "dtype": dtype,
    }


def _open_writer(
    out: Path,
    settings: dict[str, Any],
    paths: Sequence[Path],
    *,
    precision: str,
    format: str | None,
    root: Path | None,
    overwrite: bool,
) -> _FileWriter:
    if format is not None:
        check_choice("format", format, FORMATS)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    fingerprint = f"veca-features-1-{digest[:16]}"
    implied = out.suffix.removeprefix(".")
    if implied not in FORMATS or out.is_dir():
        return FolderWriter(
            out,
            fingerprint,
            # Not in the fingerprint, which is 0.1's: the hash of the weights depends on it.
            {**settings, "precision": precision},
            paths,
            format=format or FORMATS[0],
            root=root,
            overwrite=overwrite,
        )
    if format not in (None, implied):
        raise InputError(
            f"format {format!r} does not agree with the name {out.name!r}; leave out the format, "
            "or choose another name."
        )
    return SingleFileWriter(out, fingerprint, paths, root=root, overwrite=overwrite)


@dataclass
class _Tally:
    """The counts of a run, told to `progress` as they change."""

    total: int
    progress: Callable[[int, int], None] | None
    computed: int = 0
    reused: int = 0
    failed: int = 0

    @property
    def good(self) -> int:
        return self.computed + self.reused

    def count(self, *, computed: int = 0, reused: int = 0, failed: int = 0) -> None:
        self.computed += computed
        self.reused += reused
        self.failed += failed
        if self.progress:
            self.progress(self.good + self.failed, self.total)


class _Image(NamedTuple):
    """An image that has been read."""

    item: NamedImage
    image: Preprocessed

    @property
    def pixels(self) -> Tensor:
        return self.image.pixels


_Reading: TypeAlias = "tuple[NamedImage, Preprocessed | ImageError | None]"
"""An image, or why it cannot be read, or None: there is nothing to do."""


def _nbytes(reading: _Reading) -> int:
    return reading[1].pixels.nbytes if isinstance(reading[1], Preprocessed) else 0


def _sift(
    readings: Iterable[_Reading],
    writer: CollectionWriter[NamedImage],
    tally: _Tally,
    name_read: Callable[[NamedImage], str],
    *,
    strict: bool,
) -> Iterator[_Image]:
    """The images that are there to be computed; the others are counted.

    A message begins with the name that was read, which may not be the path ("..").
    """
    for item, reading in readings:
        if reading is None:
            tally.count(reused=1)
        elif isinstance(reading, Preprocessed):
            yield _Image(item, reading)
        else:
            reason = str(reading).removeprefix(f"{name_read(item)}: ")
            writer.fail(item, reason.removeprefix(f"{item.path}: "))
            if strict:
                raise reading
            tally.count(failed=1)


def _compute(compute: ModelRunner, batch: list[_Image], *, cores: int) -> list[Result[NamedImage]]:
    pixels = torch.cat([one.pixels for one in batch])
    features, grid = compute(pixels)
    results = []
    for i, (item, image) in enumerate(batch):
        facts = {
            "grid": grid,
            "cores": cores,
            "original_size": image.original_sizes[0],
            "input_size": tuple(pixels.shape[2:]),
            "valid_size": image.valid,
            "crop_box": image.crop_box[0],
        }
        numbers = {name: np.array(value, dtype=np.int64) for name, value in facts.items()}
        results.append(Result(item, {**{k: v[i] for k, v in features.items()}, **numbers}))
    return results


def _absolute(path: Source) -> Path:
    """Without "..", so that a/../b/x.jpg and b/x.jpg are one image; links are not followed."""
    return Path(os.path.abspath(path))  # noqa: PTH100
