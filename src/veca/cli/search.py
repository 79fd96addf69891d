"""`veca search`: the images of a collection that are most like one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from veca.cli.common import (
    Device,
    Threads,
    command_line,
    console,
    parse_keep,
    parse_stored_size,
    pick_device,
)

_THERE = "the collection's"


def search(
    context: typer.Context,
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="A folder that veca embed has filled, or several.", metavar="FOLDER..."
        ),
    ],
    query: Annotated[str, typer.Argument(help="An image.")],
    top: Annotated[int, typer.Option(min=1, help="How many neighbours.")] = 10,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--index",
            help="Look at every row, which misses nothing; or ask an index, which is fast in "
            "millions of rows and tells its recall.",
            show_default="every row below 100,000",
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Those of the collection.", show_default="where they were")
    ] = None,
    cores: Annotated[int | None, typer.Option(help="The budget.", show_default=_THERE)] = None,
    keep: Annotated[
        str | None, typer.Option(help="The share of patch tokens.", show_default=_THERE)
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Short side in pixels, HEIGHTxWIDTH, or native.", show_default=_THERE),
    ] = None,
    width: Annotated[
        str | None, typer.Option(help="native, projected or mixed.", show_default=_THERE)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Also write an HTML page with the pictures.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Find the images of an embedded collection that are most like one image.

    veca search vectors/ photo.jpg --top 5
    """
    import torch

    from veca._util.files import one_line
    from veca.embed import Collection, contact_sheet
    from veca.embed import search as search_collections

    collections = [Collection(folder) for folder in folders]
    if threads is not None:
        torch.set_num_threads(threads)
    matches = search_collections(
        collections,
        query,
        top,
        exact=exact,
        weights=weights,
        cores=cores,
        keep=parse_keep(keep),
        size=parse_stored_size(size),
        width=width,
        device=pick_device(device),
    )
    for collection in collections:
        if collection.recall is not None:
            typer.echo(
                f"veca: asked an index of {collection.folder}, which finds "
                f"{collection.recall:.1%} of the true 10 nearest; --exact looks at every row.",
                err=True,
            )
    if page is not None:
        contact_sheet(page, query, matches, command=command_line(context))
    if as_json:
        # Not through the console, which would wrap long lines.
        typer.echo(json.dumps([{"path": m.path, "score": m.score} for m in matches], indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("rank", "cosine"):
        table.add_column(name, justify="right")
    table.add_column("image", overflow="fold")
    for rank, match in enumerate(matches, 1):
        table.add_row(str(rank), f"{match.score:.4f}", Text(one_line(match.path)))
    console.print(table)
