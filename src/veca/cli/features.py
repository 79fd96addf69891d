"""`veca features`: the features of many images, written to disk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import (
    Cores,
    Device,
    ShownSize,
    Threads,
    Weights,
    console,
    parse_size,
    pick_device,
    say_passed_over,
)

_SHOWN_FAILURES = 10


def features(
    sources: Annotated[
        list[str], typer.Argument(help="Image files, folders (with subfolders) and patterns.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="A folder: one file an image, and a stopped run goes on where it stopped. Or a "
            "file ending in .npz or .safetensors: all images, written at the end, no resuming."
        ),
    ],
    weights: Weights = "veca_tiny_patch16",
    cores: Cores = None,
    size: ShownSize = "512",
    fit: Annotated[
        str, typer.Option(help="How images come onto the patch grid: resize, pad, crop or error.")
    ] = "resize",
    what: Annotated[str, typer.Option(help="cls, patches, or both.")] = "cls,patches",
    format: Annotated[
        str | None, typer.Option(help="npz or safetensors.", show_default="npz")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the written features: float16, float32.")] = (
        "float16"
    ),
    batch_size: Annotated[
        int, typer.Option(min=1, help="Images of one size that are computed together, at most.")
    ] = 16,
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
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first image that cannot be read.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over: remove what earlier runs wrote to OUT.")
    ] = False,
) -> None:
    """Compute the features of images and write them to disk.

    veca features photos/ "more/*.jpg" --out features/ --cores 32 --size 512
    """
    import torch

    from veca._util.files import printable
    from veca._util.progress import progress_bar
    from veca.embed import extract
    from veca.images import find_images
    from veca.weights import load

    wanted = [part.strip() for part in what.split(",") if part.strip()]
    pixels = parse_size(size)
    others = Counter[str]()
    found = find_images(sources, passed_over=others)  # before the weights: they may take a download
    say_passed_over(others)
    if threads is not None:
        torch.set_num_threads(threads)
    model = load(weights, device=pick_device(device))

    with progress_bar("features", console) as update:
        summary = extract(
            model,
            found,
            out,
            cores=cores,
            size=pixels,
            fit=fit,
            what=wanted,
            format=format,
            batch_size=batch_size,
            dtype=dtype,
            on_error="raise" if strict else "skip",
            overwrite=overwrite,
            root=root,
            workers=workers,
            progress=update,
        )

    for name, message in summary.failed[:_SHOWN_FAILURES]:
        said = printable(f"skipped {name}: {message}")
        console.print(said, style="yellow", markup=False, soft_wrap=True)
    if len(summary.failed) > _SHOWN_FAILURES:
        console.print(f"... and {len(summary.failed) - _SHOWN_FAILURES} more", style="yellow")
    parts = [f"{summary.computed} images"]
    if summary.reused:
        parts.append(f"{summary.reused} there already")
    if summary.failed:
        parts.append(f"{len(summary.failed)} skipped (listed in {summary.failures_file})")
    parts.append(f"{summary.images_per_second:.1f} images/s")
    console.print(f"{', '.join(parts)} -> {summary.out}", markup=False, soft_wrap=True)
