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
from veca.checks import check_dials, check_model
from veca.embed.estimate import DiskEstimate, estimate, warn_of_memory
from veca.embed.pca import FILE as PCA_FILE
from veca.embed.pca import Reduction, Sample, sample_size
from veca.embed.pca import load as load_reduction
from veca.embed.pipeline import (
    DTYPES,
    WHAT,
    ModelRunner,
    batch_by_shape,
    checked_what,
    compute_ahead,
    read_ahead,
)
from veca.embed.settings import (
    AUTO,
    AutoSize,
    resolved_size,
    resolved_width,
    with_later,
    without_later,
)
from veca.embed.sources import Source, Sources, open_images, to_read
from veca.embed.writers import CollectionWriter, Result, check_folder_name
from veca.embed.writers.files import FORMATS, NamedImage
from veca.embed.writers.folder import FolderWriter, begun
from veca.embed.writers.single_file import SingleFileWriter
from veca.errors import ImageError, InputError, OutputError, at_least, check_choice
from veca.images import FITS, Preprocessed, Size, preprocess
from veca.model import Veca, evaluating
from veca.precision import recorded
from veca.weights import weights_hash

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
    cores: int | str | None = None,
    keep: float | str | None = None,
    agreement: float | None = None,
    size: AutoSize = AUTO,
    fit: str = "resize",
    what: Sequence[str] = WHAT,
    width: str = AUTO,
    pca: int | None = None,
    format: str | None = None,
    batch_size: int = 16,
    dtype: str = "float16",
    on_error: str = "skip",
    overwrite: bool = False,
    root: Source | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_estimate: Callable[[DiskEstimate], None] | None = None,
) -> Summary:
    """Compute the features of `sources` and write them to `out`.

    Args:
        sources: files, folders (with their subfolders), lists, tar shards and patterns; see
            `veca.embed.sources`.
        out: a folder, or a file ending in .npz or .safetensors that holds all images (with
            patches only if all their grids agree).
        cores: the budget; by default the whole bank. "auto": what the weights' calibration says for
            this size.
        keep: the share of patch tokens that go on after merging, 0.2..1; by default all. "auto":
            each image gets what its content needs.
        agreement: with "auto", the promised cosine with the full pass; 0.98 by default.
        size, fit: how images come onto the patch grid; see `veca.preprocess`. The size is by
            default "auto": that of the folder, or 512 (`veca.config.DEFAULT_SIZE`) in a new one.
        what: "cls", "patches" or both.
        width: "native", features before the output projection, as wide as the network;
            "projected", after it, as wide as the teacher; "mixed", cls projected and patches
            native. By default "auto": that of the folder, or
            "projected" in a new one.
        pca: reduce features to so many numbers, by the principal components of the first images
            (at least 512), which are kept beside the features. By default as the folder is.
        format: "npz" or "safetensors"; by default npz, or what the name of the file says.
        batch_size: images of one pixel size that are computed together, at most.
        dtype: "float16" or "float32", of the features as written; the model computes in its own.
        on_error: "skip" lists images that cannot be read and goes on; "raise" stops at the first.
        overwrite: start over: remove what earlier runs wrote to `out`.
        root: the folder that names start from; by default the one recorded in `out`, or else
            the deepest folder that holds all images.
        workers: threads that read images ahead; by default one a processor, at most 8.
        progress: called with (images finished, images found) as the work goes on.
        on_estimate: called before the work starts with what it will take on the disk.

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
    there = None if overwrite else begun(place)
    settings = _settings(model, cores, keep, agreement, size, fit, what, dtype, width, there)
    source = open_images(sources)
    found: dict[Path, int] = {}
    for i in range(len(source)):
        found.setdefault(_absolute(source.name(i)), i)
    places = list(found.values())
    compute = _runner(model, settings, dtype)
    threads = batches_at_once(compute.device)
    at_once = 1
    if compute.device.type == "cpu":
        at_once = max(1, min(threads, math.ceil(len(places) / batch_size)))
    pixels: Size = (
        tuple(settings["size"]) if isinstance(settings["size"], list) else settings["size"]
    )
    warn_of_memory(model, pixels, len(places), batch_size, at_once)

    def fitted(index: int) -> Preprocessed:
        return preprocess(to_read(source, index), pixels, fit=fit, model=model)

    reduction, is_fitted = _reduction(
        place, there, settings, pca, partial(_sample, model, settings, fitted, places, batch_size)
    )
    if reduction is not None:
        settings["pca"] = reduction.settings
        compute = _runner(model, settings, dtype, reduction)
    elif pca is not None:  # other than the folder's, which will be refused
        settings["pca"] = {"dimensions": pca, "sha256": ""}
    writer = _open_writer(
        place,
        settings,
        list(found),
        precision=recorded(model),
        format=format,
        root=None if root is None else _absolute(root),
        overwrite=overwrite,
    )

    def read(item: NamedImage) -> _Reading:
        # Looking for finished files is slow, too, and so is done by the reading threads.
        try:
            if writer.has(item):
                return item, None
            return item, fitted(places[item.place])
        except OutputError:
            raise
        except ImageError as error:
            return item, error
        except OSError as error:  # of a shard
            return item, ImageError(f"{item.path}: {error.strerror or error}")

    tally = _Tally(len(places), progress)
    if on_estimate is not None:
        on_estimate(estimate(source, len(places), settings, settings["what"]))
    reading = read_ahead(
        read, writer.items, workers=workers, ahead=workers + batch_size, nbytes=_nbytes
    )
    with evaluating(model), contextlib.closing(writer), contextlib.closing(reading):
        if reduction is not None and is_fitted and not _is_file_name(place):
            reduction.save(reduction_file(place))  # before any features that need it
        ready = _sift(
            reading,
            writer,
            tally,
            lambda item: source.name(places[item.place]),
            strict=on_error == "raise",
        )
        results = compute_ahead(
            partial(_compute, compute, settings),
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
            if reduction is not None and is_fitted and _is_file_name(place):
                reduction.save(reduction_file(place))
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
    model: Veca,
    cores: int | str | None,
    keep: float | str | None,
    agreement: float | None,
    size: AutoSize,
    fit: str,
    what: Sequence[str],
    dtype: str,
    width: str,
    there: dict[str, Any] | None,
) -> dict[str, Any]:
    """Everything that decides what the numbers are, as JSON types."""
    wanted = list(checked_what(what))
    pixels = resolved_size(size, model.config, there)
    dials = check_dials(model, cores, keep, agreement, pixels)
    check_choice("dtype of the written features", dtype, DTYPES)
    check_choice("fit", fit, FITS)
    return {
        "weights": weights_hash(model),
        "config": model.config.to_dict(),
        "cores": dials.cores,
        "size": pixels,
        "fit": fit,
        "what": wanted,
        "dtype": dtype,
        "width": resolved_width(width, model.config, wanted, there),
        "pca": None,
        "keep": dials.keep,
        "agreement": dials.agreement,
    }


def _runner(
    model: Veca, settings: dict[str, Any], dtype: str, reduce: Reduction | None = None
) -> ModelRunner:
    return ModelRunner(
        model,
        cores=settings["cores"],
        what=settings["what"],
        dtype=dtype,
        width=settings["width"],
        reduce=reduce,
        keep=settings["keep"],
        agreement=settings["agreement"],
    )


def reduction_file(out: Path) -> Path:
    """Where what reduces the features of an output lies: in a folder, or beside a file."""
    return out.with_name(f"{out.name}.{PCA_FILE}") if _is_file_name(out) else out / PCA_FILE


def _reduction(
    out: Path,
    there: dict[str, Any] | None,
    settings: dict[str, Any],
    wanted: int | None,
    fit: Callable[[int], Reduction],
) -> tuple[Reduction | None, bool]:
    """What reduces the features, and whether it was made now; None also where it is refused."""
    stored = with_later(there)["pca"] if there else None
    if there is not None and (stored is None or wanted not in (None, stored["dimensions"])):
        return None, False
    path = reduction_file(out)
    if stored is not None:
        if path.exists():
            return load_reduction(path, stored), False
        wanted = stored["dimensions"]
    if wanted is None:
        return None, False
    reduction = fit(wanted)
    if stored is not None and reduction.settings != stored:
        return load_reduction(path, stored), False  # which says that it is not there
    return reduction, True


def _sample(
    model: Veca,
    settings: dict[str, Any],
    fitted: Callable[[int], Preprocessed],
    places: Sequence[int],
    batch_size: int,
    dimensions: int,
) -> Reduction:
    """The principal components of the first images."""
    compute = _runner(model, settings, "float32")

    def read(place: int) -> _Reading:
        item = NamedImage(place, Path(), "")
        try:
            return item, fitted(places[place])
        except (ImageError, OSError) as error:
            return item, error if isinstance(error, ImageError) else ImageError(str(error))

    count = min(sample_size(dimensions), len(places))
    found: dict[int, dict[str, Any]] = {}
    reading = read_ahead(
        read, range(count), workers=min(8, os.cpu_count() or 1), ahead=batch_size, nbytes=_nbytes
    )
    with evaluating(model), contextlib.closing(reading):
        images = (_Image(item, one) for item, one in reading if isinstance(one, Preprocessed))
        results = compute_ahead(
            partial(_compute, compute, settings),
            batch_by_shape(images, batch_size),
            at_once=batches_at_once(compute.device),
            threads=1 if compute.device.type == "cpu" else None,
        )
        with contextlib.closing(results):
            for result in (one for batch in results for one in batch):
                found[result.item.place] = result.arrays
    sample = Sample(settings["what"])
    for place in sorted(found):
        sample.add(found[place])
    return sample.fit(dimensions)


def _is_file_name(out: Path) -> bool:
    return out.suffix.removeprefix(".") in FORMATS and not out.is_dir()


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
    hashed = json.dumps(without_later(settings), sort_keys=True)
    digest = hashlib.sha256(hashed.encode()).hexdigest()
    fingerprint = f"veca-features-1-{digest[:16]}"
    implied = out.suffix.removeprefix(".")
    if not _is_file_name(out):
        check_folder_name(
            out, "features are written to a folder, or to a file that ends in .npz or .safetensors"
        )
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


def _compute(
    compute: ModelRunner, settings: dict[str, Any], batch: list[_Image]
) -> list[Result[NamedImage]]:
    pixels = torch.cat([one.pixels for one in batch])
    features, grid = compute(pixels)
    results = []
    for i, (item, image) in enumerate(batch):
        facts = {
            "grid": grid,
            "cores": settings["cores"],
            "original_size": image.original_sizes[0],
            "input_size": tuple(pixels.shape[2:]),
            "valid_size": image.valid,
            "crop_box": image.crop_box[0],
        }
        numbers = {name: np.array(value, dtype=np.int64) for name, value in facts.items()}
        if isinstance(settings["keep"], float) and settings["keep"] != 1:
            numbers["keep"] = np.array(settings["keep"])
        results.append(Result(item, {**{k: v[i] for k, v in features.items()}, **numbers}))
    return results


def _absolute(path: Source) -> Path:
    """Without "..", so that a/../b/x.jpg and b/x.jpg are one image; links are not followed."""
    return Path(os.path.abspath(path))  # noqa: PTH100
