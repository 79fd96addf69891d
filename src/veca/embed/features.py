"""Compute the features of many images and write them to disk.

A folder can be filled in several runs. Each file appears whole or not at all, so a run that was
stopped goes on where it stopped: files that are there, were made with the same settings and from
the image as it is now (its size and its modification time say so) are kept. `features.json` in the
folder records the settings, and a run with other settings is refused. A single file is collected
in memory and written at the very end: it cannot be resumed, and suits collections that fit in
memory. `veca.embed.writers.files` says what the files hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from veca._util.files import place_for
from veca._util.memory import is_out_of_memory
from veca.checks import check_budget, check_model
from veca.config import VecaConfig
from veca.embed.pipeline import Item, Reading, Ready, compute_all, gather, read_ahead
from veca.embed.writers.files import FORMATS
from veca.embed.writers.folder import Done, Folder, Output, SingleFile, write_failures
from veca.errors import ImageError, InputError, at_least, suggest
from veca.images import FITS, Preprocessed, Size, check_size, find_images, preprocess
from veca.model import Veca, evaluating
from veca.weights import weights_hash

WHAT = ("cls", "patches")
"""What can be written: the global embedding, the dense features."""
DTYPES = {"float16": torch.float16, "float32": torch.float32}
"""What features can be written as."""

Source: TypeAlias = "str | os.PathLike[str]"


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
    """Where `failed` is written down, if there is any."""

    @property
    def images_per_second(self) -> float:
        """Computed ones only; reused files count for nothing."""
        return self.computed / self.seconds


def extract(
    model: Veca,
    sources: Source | Iterable[Source],
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
        sources: files, folders (with their subfolders) and glob patterns.
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
    _check_choice("on_error", on_error, ("skip", "raise"))
    settings = _settings(model, cores, size, fit, what, dtype)
    paths = list(dict.fromkeys(_absolute(path) for path in find_images(sources)))
    output = _open_output(
        place,
        settings,
        paths,
        format=format,
        root=None if root is None else _absolute(root),
        overwrite=overwrite,
    )

    tally = _Tally(len(paths), progress)
    read = _reader(model.config, size, fit, output.has)
    reading = read_ahead(output.items, read, workers=workers, ahead=workers + batch_size)
    with evaluating(model), contextlib.closing(output), contextlib.closing(reading):
        ready = _sift(reading, tally, strict=on_error == "raise")
        results = compute_all(
            gather(ready, batch_size),
            lambda batch: _compute(model, batch, settings),
            device=next(model.parameters()).device,
            expected=math.ceil(len(paths) / batch_size),
        )
        with contextlib.closing(results):
            for batch in results:
                output.add(batch)
                tally.count(computed=len(batch))
        if tally.good:
            output.finish()

    failures_file = write_failures(output.failures_path, tally.failed)
    if not tally.good:
        raise ImageError(
            f"none of {len(paths)} images could be read; the first: {': '.join(tally.failed[0])} "
            f"(all are listed in {failures_file})"
        )
    return Summary(
        images=len(paths),
        computed=tally.computed,
        reused=tally.reused,
        failed=tuple(tally.failed),
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
        _check_choice("kind of feature", name, WHAT)
    if not wanted:
        raise InputError("no kind of feature is chosen; choose cls, patches or both.")
    _check_choice("dtype of the written features", dtype, DTYPES)
    _check_choice("fit", fit, FITS)
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


def _open_output(
    out: Path,
    settings: dict[str, Any],
    paths: Sequence[Path],
    *,
    format: str | None,
    root: Path | None,
    overwrite: bool,
) -> Output:
    if format is not None:
        _check_choice("format", format, FORMATS)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    fingerprint = f"veca-features-1-{digest[:16]}"
    implied = out.suffix.removeprefix(".")
    if implied not in FORMATS or out.is_dir():
        return Folder(
            out,
            fingerprint,
            settings,
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
    return SingleFile(out, fingerprint, paths, root=root, overwrite=overwrite)


@dataclass
class _Tally:
    """The counts of a run, told to `progress` as they change."""

    total: int
    progress: Callable[[int, int], None] | None
    computed: int = 0
    reused: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def good(self) -> int:
        return self.computed + self.reused

    def count(
        self, *, computed: int = 0, reused: int = 0, failed: tuple[str, str] | None = None
    ) -> None:
        self.computed += computed
        self.reused += reused
        self.failed += [failed] if failed else []
        if self.progress:
            self.progress(self.good + len(self.failed), self.total)


def _reader(
    config: VecaConfig, size: Size, fit: str, is_done: Callable[[Item], bool]
) -> Callable[[Item], Reading]:
    """What the reading threads do, looking for finished files included: it is slow, too."""

    def read(item: Item) -> Reading:
        try:
            if is_done(item):
                return None
            return preprocess(
                item.path,
                size,
                fit=fit,
                patch_size=config.patch_size,
                mean=config.image_mean,
                std=config.image_std,
            )
        except ImageError as error:
            return error

    return read


def _sift(
    readings: Iterable[tuple[Item, Reading]], tally: _Tally, *, strict: bool
) -> Iterator[Ready]:
    """The images that are there to be computed; the others are counted."""
    for item, reading in readings:
        if reading is None:
            tally.count(reused=1)
        elif isinstance(reading, Preprocessed):
            yield Ready(item, reading)
        elif strict:
            raise reading
        else:
            path = str(item.path)
            tally.count(failed=(path, str(reading).removeprefix(f"{path}: ")))


def _compute(model: Veca, batch: list[Ready], settings: dict[str, Any]) -> list[Done]:
    pixels = torch.cat([one.image.pixels for one in batch])
    height, width = pixels.shape[2:]
    try:
        with torch.inference_mode():
            out = model(pixels.to(next(model.parameters()).device), cores=settings["cores"])
            tensors = {"cls": out.cls, "patches": out.patches.unflatten(1, out.grid)}
            features = {
                name: _as_written(tensors[name], settings["dtype"]) for name in settings["what"]
            }
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"out of memory with {len(batch)} images of {height} x {width} pixels; "
            "use a smaller batch size, a smaller size or, on a CPU, fewer threads."
        ) from error
    done = []
    for i, (item, image) in enumerate(batch):
        facts = {
            "grid": out.grid,
            "cores": settings["cores"],
            "original_size": image.original_sizes[0],
            "input_size": (height, width),
            "valid_size": image.valid,
            "crop_box": image.crop_box[0],
        }
        numbers = {name: np.array(value, dtype=np.int64) for name, value in facts.items()}
        done.append(Done(item, {**{k: v[i] for k, v in features.items()}, **numbers}))
    return done


def _as_written(features: Tensor, dtype: str) -> np.ndarray[Any, Any]:
    written = features.to(DTYPES[dtype])
    if not torch.isfinite(written).all():
        hint = "write them as float32" if torch.isfinite(features).all() else "check the weights"
        raise InputError(f"features are NaN or too large for {dtype}; {hint}.")
    array: np.ndarray[Any, Any] = written.cpu().numpy()
    return array


def _absolute(path: Source) -> Path:
    """Without "..", so that a/../b/x.jpg and b/x.jpg are one image; links are not followed."""
    return Path(os.path.abspath(path))  # noqa: PTH100


def _check_choice(what: str, value: object, known: Collection[str]) -> None:
    if value not in known:
        raise InputError(f"unknown {what} {suggest(str(value), known)}")
