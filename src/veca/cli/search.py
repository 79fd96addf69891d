"""`veca search`: the images of a collection that are most like one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from veca.cli.common import Device, command_line, console, pick_device


def search(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="A folder that veca embed has filled.")],
    query: Annotated[Path, typer.Argument(help="An image.")],
    top: Annotated[int, typer.Option(min=1, help="How many neighbours.")] = 10,
    exact: Annotated[
        bool, typer.Option("--exact", help="Look at every row; needs no index, and reads it all.")
    ] = False,
    weights: Annotated[
        str | None, typer.Option(help="Those of the collection.", show_default="where they were")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Also write an HTML page with the pictures.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Find the images of an embedded collection that are most like one image.

    veca search vectors/ photo.jpg --top 5
    """
    from veca.embed import contact_sheet
    from veca.embed import search as search_collection

    matches = search_collection(
        folder, query, top, exact=exact, weights=weights, device=pick_device(device)
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
        table.add_row(str(rank), f"{match.score:.4f}", Text(match.path))
    console.print(table)
