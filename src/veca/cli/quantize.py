"""`veca quantize`: weights in int8, checked on photos."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from veca.cli.common import console, find_photos, parse_numbers, say


def quantize(
    weights: Annotated[
        str, typer.Argument(help="A name, a folder, a .safetensors file or a hub id.")
    ],
    out: Annotated[Path, typer.Option(help="Folder, or .safetensors file, of the int8 weights.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Photos to calibrate with and to compare on: files, folders, patterns. "
            "Repeatable; your own are better than the default.",
            show_default="the bundled photos",
        ),
    ] = None,
    leave: Annotated[
        str, typer.Option(help="Linear layers that stay in float32, such as project,blocks.0.*.")
    ] = "project",
    cores: Annotated[
        str | None,
        typer.Option(help="Budgets to compare at, such as 8,64.", show_default="an eighth to all"),
    ] = None,
    cls: Annotated[float, typer.Option(min=0, max=1, help="Gate: least agreement of CLS.")] = 0.998,
    patches: Annotated[
        float, typer.Option(min=0, max=1, help="Gate: least agreement of patches.")
    ] = 0.996,
    size: Annotated[int, typer.Option(min=1, help="Short side of the photos, in pixels.")] = 224,
    limit: Annotated[int, typer.Option(min=1, help="Photos to use, at most.")] = 32,
) -> None:
    """Round weights to int8, compare with float32 on photos, and write them if they agree.

    Commands with --precision int8, and veca.load, take the folder. A report lies in it.

    veca quantize tiny --data photos/ --out tiny-int8
    """
    from veca._util.progress import progress_bar
    from veca.quantization import Agreement
    from veca.weights.quantized import quantize as run
    from veca.weights.quantized import report_table

    photos = None
    if data is not None:
        found = find_photos(data)
        photos = found[:: -(-len(found) // limit)]
    budgets = parse_numbers(cores, "--cores") if cores else None
    names = [part.strip() for part in leave.split(",") if part.strip()]
    with progress_bar("quantising", console) as update:
        report = run(
            weights,
            out,
            photos,
            leave=names,
            cores=budgets,
            gate=Agreement(cls, patches),
            size=size,
            progress=lambda done, total, text: update(done, total, text),
        )
    table = Table(title=f"agreement with float32 on {report.photos} photos")
    table.add_column("int8")
    for name in ("CLS", "patches"):
        table.add_column(name, justify="right")
    for row in report_table(report):
        table.add_row(*row)
    console.print(table)
    say(f"wrote {out}")
