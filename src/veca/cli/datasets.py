"""`veca datasets`: the datasets that `veca probe --dataset` takes by name."""

from __future__ import annotations

from typing import Annotated

import typer

from veca.cli.common import say, show_table


def datasets(
    name: Annotated[
        str | None, typer.Argument(help="Only this one, by its name or another of its names.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Only those for classification, segmentation or depth.")
    ] = None,
) -> None:
    """List the datasets for `veca probe`: the task, the files each needs, where to get them."""
    from veca.probe.datasets import find_dataset, list_datasets

    found = list_datasets(task) if name is None else [find_dataset(name, task).info]
    rows = []
    for info in found:
        kind = f"{info.task}, {info.classes} classes" if info.classes else info.task
        images = [f"{s} {info.counts[s]:,}" if s in info.counts else s for s in info.splits]
        layout = info.layout.strip("\n")
        rows.append((info.name, kind, ", ".join(images), layout, info.where, info.licence))
    show_table(("dataset", "task", "images", "files", "where to get it", "licence"), rows)
    for info in found if name is not None else ():
        for option, words in info.options.items():
            say(f"--option {option}=...: {words}")
        if info.aliases:
            say(f"also called {', '.join(info.aliases)}.")
    say("Check a copy: veca probe TASK --dataset NAME --data FOLDER --check")
