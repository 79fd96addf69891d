"""Embed a collection: millions of images to Parquet, stopped and resumed at will."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from veca._util.extras import require
from veca._util.files import place_for, printable
from veca._util.numbers import count
from veca._util.threads import batches_at_once
from veca.checks import check_model
from veca.data import pool
from veca.data.sources import ImageSource
from veca.embed.estimate import DiskEstimate, estimate, warn_of_memory
from veca.embed.pca import FILE as PCA_FILE
from veca.embed.pca import Reduction
from veca.embed.pca import load as load_reduction
from veca.embed.pipeline import WHAT, checked_what
from veca.embed.plan import GONE, Plan, begun, images_for, locked, open_plan
from veca.embed.settings import AUTO, AutoSize, Settings
from veca.embed.shards import DecodeAhead, compute_for, embed_shards, fit_reduction
from veca.embed.sources import Sources
from veca.embed.writers import FAILURES, check_folder_name, write_failures
from veca.embed.writers.parquet import MANIFEST, Shard, ShardRecord, finished_shards
from veca.errors import ImageError, InputError, OutputError, at_least, check_choice
from veca.model import Veca, evaluating
from veca.precision import check_precision, in_precision
from veca.weights import load

ENGINES = ("local", "ray")
ON_ERROR = ("skip", "raise")


@dataclass(frozen=True)
class EmbedReport:
    """What a folder holds after a run, and what the run did."""

    out: Path
    images: int
    """Images embedded, by this run and by those before."""
    computed: int
    """Images embedded by this run."""
    failed: int
    """Images that could not be read, in all runs; listed in `failures_file`."""
    added: int
    """Images found in the source that an earlier run did not know."""
    gone: int
    """Images of earlier runs that are not in the source any more; their rows stay."""
    shards: int
    seconds: float
    failures_file: Path | None

    @property
    def images_per_second(self) -> float:
        return self.computed / self.seconds


def embed(
    source: Sources,
    out: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | Veca = "veca_tiny_patch16",
    cores: int | str | None = None,
    keep: float | str | None = None,
    agreement: float | None = None,
    size: AutoSize = AUTO,
    what: Sequence[str] = WHAT[:1],
    width: str = AUTO,
    pca: int | None = None,
    dtype: str = "float16",
    precision: str = "fp32",
    batch_size: int = 32,
    shard_rows: int = 2048,
    fast_jpeg: bool = False,
    device: str | torch.device = "cpu",
    engine: str = "local",
    workers: int | None = None,
    threads: int | None = None,
    address: str | None = None,
    retry_failed: bool = False,
    on_error: str = "skip",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    on_estimate: Callable[[DiskEstimate], None] | None = None,
    on_model: Callable[[Veca], None] | None = None,
    batch: int | None = None,
    patches: bool | None = None,
) -> EmbedReport:
    """Embed every image of a source into Parquet shards; run it again to go on after a stop.

    Each image gets exactly one row, or one line in `failures.jsonl`. The first run writes down
    which image belongs to which shard, and a shard appears whole or not at all, so a run that was
    killed goes on with the shards that are missing and leaves the same bytes as one that was not.
    Images that a later run finds in the source are added in shards of their own; an image is known
    by its path, so one that has changed or is gone keeps its row.

    Args:
        source: files, folders (with their subfolders), lists, tar shards and patterns; see
            `veca.embed.sources`. Or an `ImageSource`.
        out: a new folder, or one that an earlier run with the same settings has begun.
        weights: a name, a folder, a .safetensors file, a hub id, or a model.
        cores: the budget; by default the whole bank. "auto": what the weights' calibration says for
            this size.
        keep: the share of patch tokens that go on after merging, 0.2..1; by default all. "auto":
            each image gets what its content needs.
        agreement: with "auto", the promised cosine with the full pass; 0.98 by default.
        size: short side in pixels, (height, width), or None for each image's own size. Images are
            resized to the nearest size on the patch grid. By default "auto": that of the folder, or
            512 (`veca.config.DEFAULT_SIZE`) in a new one.
        what: ("cls",), or ("cls", "patches") to store the patch grid as well.
        width: "native", features before the output projection, as wide as the network;
            "projected", after it, as wide as the teacher; "mixed", cls projected and patches
            native. By default "auto": that of the folder, or
            "projected" in a new one.
        pca: reduce features to so many numbers, by the principal components of the first images
            (at least 512), which are kept in the folder. By default as the folder is.
        dtype: "float16" or "float32", of the stored features.
        precision: what the model computes in: "fp32", "bf16", "fp16" or "int8" (on a CPU); see
            `veca.precision`. A model passed as `weights` computes in its own.
        batch_size: images of one size that are computed together, at most.
        shard_rows: images in a shard, at most; a run that is killed loses less than one of them
            (with Ray, less than one a worker).
        fast_jpeg: decode JPEG files much larger than `size` at a half, a quarter or an eighth of
            theirs: several times faster, and the features differ a little.
        device: where the model runs; a model passed as `weights` stays where it is. With Ray "cpu",
            "cuda", or "auto": GPUs if the cluster has any.
        engine: "local", or "ray" for a cluster: `out` and the source are then on storage that all
            its machines share.
        workers: processes that decode images (0: none), by default one for each CPU; with Ray,
            model workers, by default as many as the cluster has room for.
        threads: CPU threads of the model, each with a batch of its own; by default torch's number.
        address: the Ray cluster; by default $RAY_ADDRESS, or a new one on this machine.
        retry_failed: do shards again that list failures, after their images were repaired.
        on_error: "skip" lists images that cannot be read and goes on; "raise" stops at the first.
        overwrite: start over: remove what earlier runs wrote to `out`.
        progress: called with (images done, images in all) as the work goes on.
        on_model: called with the model before the work starts.
        on_estimate: called before the work starts with what it will take on the disk.
        batch, patches: the names of `batch_size` and `what` in 0.1.

    Raises:
        DataError: the source is missing or empty, or 100 images in a row cannot be read.
        ImageError: not one image could be read (or one could not, with "raise").
        InputError: an option that cannot be, or `out` was made with other settings or images.
        OutputError: `out` cannot be written, or holds something else.
        MissingExtraError: pyarrow or ray is not installed.
    """
    start = time.perf_counter()
    folder = place_for(out)
    if batch is not None:
        warnings.warn("embed(batch=) is now embed(batch_size=)", DeprecationWarning, stacklevel=2)
        batch_size = batch
    if patches is not None:
        warnings.warn(
            "embed(patches=True) is now embed(what=('cls', 'patches'))",
            DeprecationWarning,
            stacklevel=2,
        )
        what = WHAT if patches else WHAT[:1]
    what = checked_what(what)
    if "cls" not in what:
        raise InputError("a folder of embeddings always holds cls; ask for cls, or cls,patches.")
    check_folder_name(folder, "embeddings are a folder of Parquet files")
    check_choice("on_error", on_error, ON_ERROR)
    check_choice("engine", engine, ENGINES)
    needed, purpose, extra = ["pyarrow", "pyarrow.parquet"], "veca embed", "embed"
    if engine == "ray":  # whose extra brings the others, too
        needed, purpose, extra = [*needed, "ray"], "veca embed --engine ray", "ray"
    for name in needed:
        require(name, purpose, extra)
    if workers is not None:
        workers = at_least("workers", workers, least=1 if engine == "ray" else 0)
    if threads is not None:
        threads = at_least("threads", threads)
    # Before the weights, which may take a download.
    images = images_for(folder, source, overwrite=overwrite)
    there = begun(folder, overwrite=overwrite)
    # With Ray the model runs on the cluster; here it is only packed up.
    model, weights_from = load_model(weights, "cpu" if engine == "ray" else device, precision)
    settings = Settings.of(
        model,
        cores=cores,
        size=size,
        fast_jpeg=fast_jpeg,
        patches="patches" in what,
        dtype=dtype,
        batch_size=batch_size,
        shard_rows=shard_rows,
        width=width,
        keep=keep,
        agreement=agreement,
        there=there[0] if there else None,
    )
    if on_model is not None and engine == "local":
        on_model(model)
    at_once = batches_at_once(model.device, threads)
    decode_ahead = partial(
        pool.ordered_map, workers=pool.default_workers() if workers is None else workers
    )
    if engine == "local":
        warn_of_memory(model, settings.pixels, len(images), settings.batch, at_once)
    with locked(folder):
        settings, reduction, is_new = _reduction(
            folder,
            images,
            model,
            settings,
            there[0] if there else None,
            pca,
            decode_ahead=decode_ahead,
            at_once=at_once,
        )
        plan, added = open_plan(
            folder, images, settings, weights_from=weights_from, overwrite=overwrite
        )
        if reduction is not None and is_new:
            reduction.save(folder / PCA_FILE)
        state = _State(folder, plan, settings, progress, retry_failed=retry_failed)
        if state.left:
            left = sum(shard.stop - shard.start for shard in state.left)
            if on_estimate is not None:
                on_estimate(estimate(images, left, settings.to_dict(), settings.what))
            records = _engine(
                engine,
                state,
                images,
                model,
                reduction,
                workers=workers,
                threads=threads,
                device=str(device),
                address=address,
                strict=on_error == "raise",
            )
            with evaluating(model), closing(records):  # type: ignore[type-var]
                for record in records:
                    state.finish(record)
        state.write_failures()
        state.check()
    if not state.images:
        raise ImageError(
            f"none of {count(plan.images, 'image')} could be read; {folder / FAILURES} says why."
        )
    return EmbedReport(
        out=folder,
        images=state.images,
        computed=state.computed,
        failed=len(state.failures()),
        added=added if added < plan.images else 0,
        gone=sum(int((places < 0).sum()) for places in plan.places),
        shards=len(state.records),
        seconds=time.perf_counter() - start,
        failures_file=folder / FAILURES if state.failures() else None,
    )


def load_model(
    weights: str | os.PathLike[str] | Veca, device: str | torch.device, precision: str
) -> tuple[Veca, str | None]:
    """The model, and where its weights were found, so that a search can load them again."""
    if isinstance(weights, torch.nn.Module):
        check_model(weights, "embed")
        return weights, None
    check_precision(precision)
    model = in_precision(load(weights, device=device), precision)
    path = Path(weights).expanduser()
    return model, str(path.absolute()) if path.exists() else os.fspath(weights)


def _engine(
    engine: str,
    state: _State,
    source: ImageSource,
    model: Veca,
    reduction: Reduction | None,
    *,
    workers: int | None,
    threads: int | None,
    device: str,
    address: str | None,
    strict: bool,
) -> Iterator[ShardRecord]:
    if engine == "ray":
        from veca.embed import cluster

        return cluster.run(
            state.left,
            state.plan,
            source,
            model,
            state.settings,
            state.folder,
            reduction,
            workers=workers,
            threads=threads,
            device=device,
            address=address,
            strict=strict,
            on_images=state.count,
        )
    compute = compute_for(model, state.settings, reduction)
    workers = pool.default_workers() if workers is None else workers
    return embed_shards(
        state.left,
        state.plan,
        source,
        compute,
        state.settings,
        state.folder,
        decode_ahead=partial(pool.ordered_map, workers=workers),
        at_once=batches_at_once(compute.device, threads),
        strict=strict,
        on_images=state.count,
    )


def _reduction(
    folder: Path,
    source: ImageSource,
    model: Veca,
    settings: Settings,
    there: Settings | None,
    wanted: int | None,
    *,
    decode_ahead: DecodeAhead,
    at_once: int,
) -> tuple[Settings, Reduction | None, bool]:
    """The settings with what reduces the features, that itself, and whether it was made now."""
    stored = there.pca if there else None
    if there is not None and (wanted is None or (stored and wanted == stored["dimensions"])):
        settings = replace(settings, pca=stored)
        if stored is None or settings.differences(there):  # which will be refused
            return settings, None, False
        if (folder / PCA_FILE).exists() or finished_shards(folder, settings):
            return settings, load_reduction(folder / PCA_FILE, stored), False
        wanted = stored["dimensions"]  # stopped in its first moment: the same is fitted again
    elif there is not None:
        return replace(settings, pca={"dimensions": wanted, "sha256": ""}), None, False
    if wanted is None:
        return settings, None, False
    reduction = fit_reduction(
        wanted, source, model, settings, decode_ahead=decode_ahead, at_once=at_once
    )
    return replace(settings, pca=reduction.settings), reduction, True


class _State:
    """What of a plan is done, and what is left."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        settings: Settings,
        progress: Callable[[int, int], None] | None,
        *,
        retry_failed: bool,
    ) -> None:
        self.folder, self.plan, self.settings = folder, plan, settings
        self._progress = progress
        self.records = {record.number: record for record in finished_shards(folder, settings)}
        shards = list(plan.shards())
        self._check(shards)
        self.left: Sequence[Shard] = [
            shard
            for shard in shards
            if shard.number not in self.records or (retry_failed and self._repairable(shard))
        ]
        for shard in self.left:
            self.records.pop(shard.number, None)
        self.computed = 0
        self._seen = plan.images - sum(shard.stop - shard.start for shard in self.left)
        self.write_failures()
        self.count(0)

    def _repairable(self, shard: Shard) -> bool:
        """Whether a shard lists failures, and all images that have rows are still there."""
        failed = {name for name, _ in self.records[shard.number].failures}
        names, places = self.plan.names_of(shard), self.plan.places_of(shard)
        gone = {printable(name) for name, p in zip(names, places, strict=True) if p == GONE}
        return bool(failed) and gone <= failed

    @property
    def images(self) -> int:
        return sum(record.rows for record in self.records.values())

    def failures(self) -> list[tuple[str, str]]:
        return [f for number in sorted(self.records) for f in self.records[number].failures]

    def count(self, images: int) -> None:
        """Note images that were gone through."""
        self._seen += images
        if self._progress is not None:
            self._progress(self._seen, self.plan.images)

    def finish(self, record: ShardRecord) -> None:
        """Note a shard that is on the disk."""
        self.records[record.number] = record
        self.computed += record.rows
        if record.failures:
            self.write_failures()

    def write_failures(self) -> None:
        """Make failures.jsonl say what the shards say."""
        write_failures(self.folder / FAILURES, self.failures())

    def check(self) -> None:
        """Raise unless all that is counted is there: somebody may have removed it meanwhile."""
        gone = [record.path for record in self.records.values() if not record.path.is_file()]
        gone += [path for path in (self.folder / MANIFEST,) if not path.is_file()]
        if gone:
            raise OutputError(
                f"{gone[0]} was written and is gone ({len(gone)} such files): something else has "
                f"changed {self.folder} meanwhile; run veca embed again."
            )

    def _check(self, shards: Sequence[Shard]) -> None:
        """Each shard that is there must hold as many images as the plan says."""
        for number, record in self.records.items():
            held = record.rows + len(record.failures)
            planned = shards[number].stop - shards[number].start if number < len(shards) else 0
            if held != planned:
                raise InputError(
                    f"{record.path} holds {held} images where the plan of its folder has "
                    f"{planned}; remove it, then run veca embed again."
                )
