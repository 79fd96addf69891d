"""`veca features`: the features of many images, written to disk."""

from __future__ import annotations

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
    say_estimate,
    say_hint,
    say_passed_over,
)

_SHOWN_FAILURES = 10


def features(
    sources: Images,
    out: Annotated[
        Path,
        typer.Option(
            help="A folder: one file an image, and a stopped run goes on where it stopped. Or a "
            "file ending in .npz or .safetensors: all images, written at the end, no resuming."
        ),
    ],
    weights: Weights = "veca_tiny_patch16",
    cores: AutoCores = None,
    keep: Keep = None,
    agreement: Agreement = None,
    size: StoredSize = None,
    fit: Annotated[
        str, typer.Option(help="How images come onto the patch grid: resize, pad, crop or error.")
    ] = "resize",
    what: What = "cls,patches",
    width: Width = None,
    pca: Pca = None,
    format: Annotated[
        str | None, typer.Option(help="npz or safetensors.", show_default="npz")
    ] = None,
    dtype: Dtype = "float16",
    precision: Precision = "fp32",
    batch_size: BatchSize = 16,
    device: Device = "auto",
    threads: Threads = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Threads that read images ahead.", show_default="one a processor"),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            help="The folder that names start from.", show_default="what all images share"
        ),
    ] = None,
    strict: Strict = False,
    overwrite: Overwrite = False,
) -> None:
    """Compute the features of images and write them to disk.

    veca features photos/ "more/*.jpg" --out features/ --cores 32 --size 512
    """
    import torch

    from veca._util.files import one_line
    from veca._util.progress import progress_bar
    from veca.embed import extract
    from veca.embed.embedding import load_model
    from veca.embed.sources import open_images

    wanted = parse_what(what)
    pixels = parse_stored_size(size)
    share = parse_keep(keep)
    images = open_images(sources)  # before the weights: they may take a download
    say_passed_over(images)
    if threads is not None:
        torch.set_num_threads(threads)
    model, _ = load_model(weights, pick_device(device), precision)
    say_hint(model)

    with progress_bar("features", console) as update:
        summary = extract(
            model,
            images,
            out,
            cores=parse_cores(cores),
            keep=share,
            agreement=agreement,
            size=pixels,
            fit=fit,
            what=wanted,
            width=width or "auto",
            pca=pca,
            format=format,
            batch_size=batch_size,
            dtype=dtype,
            on_error="raise" if strict else "skip",
            overwrite=overwrite,
            root=root,
            workers=workers,
            progress=update,
            on_estimate=say_estimate,
        )

    for name, message in summary.failed[:_SHOWN_FAILURES]:
        said = one_line(f"skipped {name}: {message}")
        console.print(said, style="yellow", markup=False, soft_wrap=True)
    if len(summary.failed) > _SHOWN_FAILURES:
        console.print(f"... and {len(summary.failed) - _SHOWN_FAILURES} more", style="yellow")
    parts = [count(summary.computed, "image")]
    if summary.reused:
        parts.append(f"{summary.reused} there already")
    if summary.failed:
        parts.append(f"{len(summary.failed)} skipped (listed in {summary.failures_file})")
    parts.append(f"{summary.images_per_second:.1f} images/s")
    console.print(f"{', '.join(parts)} -> {summary.out}", markup=False, soft_wrap=True)
