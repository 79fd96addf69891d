"""`veca report`: many probe runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import command_line, console, count


def report(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder with runs of `veca probe`, at any depth.")],
    out: Annotated[
        Path | None, typer.Option(help="The page.", show_default="report.html in the folder")
    ] = None,
) -> None:
    """Join probe runs into one HTML page with tables and plots.

    veca report runs/probe
    """
    from veca.probe import write_report

    found = write_report(folder, out, command=command_line(context))
    runs = sum(len(group.runs) for group in found.groups)
    if found.missing_plots:
        console.print(f"no plots: {found.missing_plots}", markup=False, soft_wrap=True)
    console.print(
        f"{count(runs, 'run')}, {count(len(found.groups), 'comparison')} -> {found.page}",
        markup=False,
        soft_wrap=True,
    )
