"""`veca cache`: what this package keeps for the next run, and how to have it removed."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from veca.cli.common import console, count
from veca.errors import check_choice

ALL = "all"


def cache(
    clear: Annotated[
        str | None,
        typer.Option(help="Remove a part by its name in the table, or all.", show_default=False),
    ] = None,
    shrink: Annotated[
        str | None,
        typer.Option(
            help="Remove what was used least recently until so much is left, such as 5GB.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what is kept for the next run, and remove it. All of it can be made again.

    Runs keep it below $VECA_CACHE_LIMIT, such as 20GB.
    """
    from veca._util.cache import PARTS, cache_entries, remove_entry, shrink_cache
    from veca._util.numbers import gigabytes, parse_bytes

    if clear is None and shrink is None:
        _show()
        return
    removed = []
    if clear is not None:
        check_choice("part of the cache", clear, (*PARTS, ALL))
        removed = cache_entries(None if clear == ALL else clear)
        for entry in removed:
            remove_entry(entry)
    if shrink is not None:
        removed += shrink_cache(parse_bytes(shrink, least=0))
    size = gigabytes(sum(entry.bytes for entry in removed))
    console.print(f"removed {count(len(removed), 'entry', 'entries')}, {size}", highlight=False)


def _show() -> None:
    from veca._util.cache import PARTS, cache_entries, cache_folder, cache_limit
    from veca._util.numbers import gigabytes

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("part", "what it is"):
        table.add_column(name)
    for name in ("entries", "size", "last used"):
        table.add_column(name, justify="right")
    entries = cache_entries()
    for part, what in PARTS.items():
        mine = [entry for entry in entries if entry.part == part]
        used = max((entry.used for entry in mine), default=0)
        table.add_row(
            part,
            what,
            str(len(mine)),
            gigabytes(sum(entry.bytes for entry in mine)),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(used)) if mine else "",
        )
    console.print(table)
    total = gigabytes(sum(entry.bytes for entry in entries))
    said = f"{total} of at most {gigabytes(cache_limit())} in {cache_folder()}"
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    console.print("VECA_CACHE moves it, VECA_CACHE_LIMIT changes the limit.", style="dim")
