"""`veca quickstart`: a first look at the bundled photos."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from veca.cli.common import (
    AutoPrecision,
    Device,
    command_line,
    console,
    find_photos,
    pick_device,
    say,
    writable_folder,
)
from veca.config import DEFAULT_SIZE


def quickstart(
    context: typer.Context,
    photos: Annotated[
        list[Path] | None, typer.Argument(help="Image files; by default the bundled photos.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures and the page.")] = Path(
        "quickstart"
    ),
    weights: Annotated[
        str | None,
        typer.Option(help="A name, a folder, a file or a hub id; by default the bundled weights."),
    ] = None,
    size: Annotated[
        int, typer.Option(help="Short side of the photos, in pixels; fitted to the patch grid.")
    ] = DEFAULT_SIZE,
    precision: AutoPrecision = "auto",
    device: Device = "auto",
) -> None:
    """Run photos at every budget, time them beside a dense ViT, and write a page of pictures."""
    from veca import quickstart as library

    sources = find_photos([str(p) for p in photos]) if photos else None
    place = pick_device(device)
    with console.status("loading") as status, writable_folder(out) as folder:
        result = library.quickstart(
            folder,
            sources,
            weights=weights,
            size=size,
            device=place,
            precision=precision,
            progress=lambda line: status.update(line),
            command=command_line(context),
        )
    header, rows = library.table(result)
    grid = Table(title=f"{escape(result.weights)}, {result.size} x {result.size} px, {place}")
    for name in header:
        grid.add_column(name, justify="right")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
    if result.rough:
        console.print(result.rough, soft_wrap=True, markup=False, highlight=False)
    say(f"precision {result.precision}: {result.reason}")
    if not result.trained:
        console.print(library.FRESH, style="yellow")
    console.print(f"Page: {result.page}", soft_wrap=True, markup=False)
