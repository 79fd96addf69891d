"""`veca pack`: an image set as tar shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import console, count, say_passed_over


def pack(
    source: Annotated[
        list[str],
        typer.Argument(help="A folder, a .txt list, .tar shards or a pattern; several are joined."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the shards.")],
    size: Annotated[
        str, typer.Option(help="Side in pixels; 'native' keeps each image's own.")
    ] = "224",
    mode: Annotated[
        str,
        typer.Option(
            help="short: the short side, never enlarged; square: the centred square; squash: the "
            "whole image as a square."
        ),
    ] = "short",
    format: Annotated[str, typer.Option(help="jpeg or webp.")] = "jpeg",
    quality: Annotated[int, typer.Option(help="1 to 100.")] = 75,
    shard_size: Annotated[str, typer.Option(help="Largest shard, such as 64MiB or 1GB.")] = "64MiB",
    per_shard: Annotated[
        int | None, typer.Option(help="Images per shard, instead of --shard-size.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes.", show_default="one for each CPU")
    ] = None,
) -> None:
    """Pack images into tar shards (webdataset layout); run it again to go on after a stop."""
    from rich.filesize import decimal

    from veca._util.progress import progress_bar
    from veca.data import DataError, open_source
    from veca.data import pack as pack_images
    from veca.data.packing import FAILURES

    if size != "native" and not size.isdigit():
        raise DataError(f"--size is a number of pixels or 'native'; got {size!r}.")
    images = open_source(source[0] if len(source) == 1 else source)
    say_passed_over(images)
    with progress_bar("packing", console) as update:
        report = pack_images(
            images,
            out,
            size=None if size == "native" else int(size),
            mode=mode,
            format=format,
            quality=quality,
            shard_size=shard_size,
            per_shard=per_shard,
            workers=workers,
            progress=update,
        )
    earlier = report.images - report.written
    said = (
        f"{count(report.images, 'image')} in {count(len(report.shards), 'shard')}, "
        f"{decimal(report.bytes)} ({decimal(report.bytes // report.images)} each), in {report.out}"
    )
    if earlier:
        said += f"; {earlier:,} were there already"
    if report.failures:
        said += f"\n{count(len(report.failures), 'image')} could not be read; "
        said += f"{report.out / FAILURES} says which"
    console.print(said, highlight=False, markup=False)
