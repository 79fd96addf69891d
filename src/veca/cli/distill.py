"""`veca distill`: train a student from a frozen teacher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import console
from veca.errors import InputError


def distill(
    config: Annotated[
        str | None, typer.Option(help="A recipe: a name of `veca recipes`, or a TOML file.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Images: a folder, a .txt list, .tar shards, a pattern or photos:N."),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="A short name, a hub id, a folder, or filters.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints, metrics and the student.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting, such as optimizer.lr=1e-3; repeatable."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --out, if any.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what it would do, try one batch, write nothing."),
    ] = False,
) -> None:
    """Distil a frozen teacher into an elastic student, on one device or, with torchrun, many.

    Stops cleanly on Ctrl-C, SIGTERM or after --set max_minutes=N; --resume goes on from there.
    """
    from veca.distill import dry_run as library
    from veca.distill import load_config
    from veca.distill.loop import distill as run

    settings = load_config(config, overrides=set_ or (), data=data, teacher=teacher)
    if dry_run:
        with console.status("setting up"):
            found = library.dry_run(settings)
        for line in found.lines if os.environ.get("RANK", "0") == "0" else ():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    if out is None:
        raise InputError("where should the run go? Give a folder with --out.")
    run(settings, out, resume=resume, console=console)
