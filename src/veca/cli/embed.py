"""`veca embed`: a whole collection of images as vectors in Parquet files."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import (
    Agreement,
    AutoCores,
    BatchSize,
    Device,
    Dtype,
    Images,
    Keep,
    Overwrite,
    Pca,
    Precision,
    StoredSize,
    Strict,
    Threads,
    Weights,
    What,
    Width,
    console,
    count,
    parse_cores,
    parse_keep,
    parse_stored_size,
    parse_what,
    pick_device,
    renamed,
    say_estimate,
    say_hint,
    say_passed_over,
)


class Engine(str, Enum):
    local = "local"
    ray = "ray"


def embed(
    sources: Images,
    out: Annotated[Path, typer.Option(help="Folder for the Parquet shards.")],
    weights: Weights = "veca_tiny_patch16",
    cores: AutoCores = None,
    keep: Keep = None,
    agreement: Agreement = None,
    size: StoredSize = None,
    what: What = "cls",
    width: Width = None,
    pca: Pca = None,
    dtype: Dtype = "float16",
    precision: Precision = "fp32",
    batch_size: BatchSize = 32,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes that decode images; with ray, model workers.",
            show_default="one for each CPU; with ray, all the cluster has room for",
        ),
    ] = None,
    shard_rows: Annotated[
        int,
        typer.Option(
            min=1, help="Images in a shard, at most. A killed run loses less than one shard."
        ),
    ] = 2048,
    fast_jpeg: Annotated[
        bool,
        typer.Option(
            "--fast-jpeg",
            help="Decode large JPEG files at a fraction of their size: faster, and the features "
            "differ a little.",
        ),
    ] = False,
    device: Device = "auto",
    threads: Threads = None,
    engine: Annotated[Engine, typer.Option(help="This machine, or a Ray cluster.")] = Engine.local,
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster.", show_default="$RAY_ADDRESS, or a new one on this machine"
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Do shards again that list failures.")
    ] = False,
    strict: Strict = False,
    overwrite: Overwrite = False,
    batch: Annotated[int | None, typer.Option(min=1, hidden=True)] = None,
    patches: Annotated[bool, typer.Option("--patches", hidden=True)] = False,
) -> None:
    """Embed a whole collection into Parquet shards; run it again to go on after a stop.

    veca embed photos/ --out vectors/ --weights my-weights --cores 32
    """
    from veca._util.files import place_for
    from veca._util.progress import progress_bar
    from veca.embed import embed as embed_collection
    from veca.embed.plan import images_for

    if batch is not None:
        renamed("--batch", "--batch-size")
        batch_size = batch
    if patches:
        renamed("--patches", "--what cls,patches")
        what = "cls,patches"
    images = images_for(place_for(out), sources, overwrite=overwrite)
    say_passed_over(images)
    with progress_bar("embedding", console) as update:
        report = embed_collection(
            images,
            out,
            weights=weights,
            cores=parse_cores(cores),
            keep=parse_keep(keep),
            agreement=agreement,
            size=parse_stored_size(size),
            what=parse_what(what),
            width=width or "auto",
            pca=pca,
            dtype=dtype,
            precision=precision,
            batch_size=batch_size,
            shard_rows=shard_rows,
            fast_jpeg=fast_jpeg,
            # With ray the devices are the cluster's.
            device=device if engine is Engine.ray else pick_device(device),
            engine=engine.value,
            workers=workers,
            threads=threads,
            address=address,
            retry_failed=retry_failed,
            on_error="raise" if strict else "skip",
            overwrite=overwrite,
            progress=update,
            on_estimate=say_estimate,
            on_model=say_hint,
        )
    if report.computed:
        speed = f"({report.images_per_second:.1f} images/s)"
        parts = [f"{count(report.computed, 'image')} embedded {speed}"]
        if report.images > report.computed:
            parts.append(f"{report.images - report.computed:,} there already")
    elif report.added:
        parts = [f"nothing embedded, {count(report.images, 'image')} there already"]
    else:
        parts = [f"nothing to do, {count(report.images, 'image')} there already"]
    if report.added:
        parts.append(f"{report.added:,} new in the source")
    if report.gone:
        parts.append(f"{report.gone:,} not in the source any more (rows stay)")
    if report.failed:
        parts.append(f"{report.failed:,} could not be read (listed in {report.failures_file})")
    said = f"{', '.join(parts)}; {count(report.shards, 'shard')} in {report.out}"
    console.print(said, markup=False, highlight=False, soft_wrap=True)
