"""`veca calibrate`: what keep="auto" and cores="auto" need to know of weights, from photos."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veca.cli.common import (
    Device,
    Precision,
    Threads,
    console,
    parse_numbers,
    pick_device,
    say,
    say_passed_over,
    writable_folder,
)
from veca.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from veca.calibrate import HeldOut

_MEASURED = "calibration.measured.json"


def calibrate(
    weights: Annotated[str, typer.Argument(help="A name, a folder, a file or a hub id.")],
    data: Annotated[
        list[str],
        typer.Option(
            help="Photos such as those to come: files, folders, lists, patterns. Give it again for "
            "more. They should be as large as the sizes."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for calibration.json; one without weights gets the weights, too.",
            show_default="the folder WEIGHTS",
        ),
    ] = None,
    sizes: Annotated[str, typer.Option(help="Sides in pixels. Others go by them.")] = "224,512",
    count: Annotated[
        int, typer.Option("--photos", help="How many of the photos to measure on; at least 20.")
    ] = 150,
    precision: Precision = "float32",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure on photos what keep=auto and cores=auto need, and keep it beside the weights.

    The table tells how promises are kept on photos that were held out, and what is saved beside the
    best fixed share of tokens and beside an oracle. A run that was stopped goes on. Sizes of an
    earlier calibration stay, where they are not measured anew.

    veca calibrate my-weights --data photos/
    """
    import torch

    from veca import calibrate as library
    from veca import content
    from veca._util.files import atomic_write
    from veca._util.progress import progress_bar
    from veca.embed.embedding import load_model
    from veca.embed.sources import open_images
    from veca.weights import save
    from veca.weights.names import locate
    from veca.weights.store import holds_weights, read_hash

    shorts = parse_numbers(sizes, "--sizes")
    images = open_images(data)  # before the weights: they may take a download
    say_passed_over(images)
    if out is None:
        if not Path(weights).expanduser().is_dir():
            raise InputError(
                f"say with --out where the calibration of {weights} goes: a folder, which gets the "
                "weights, too."
            )
        out = Path(weights).expanduser()
    if threads is not None:
        torch.set_num_threads(threads)
    model, _ = load_model(weights, pick_device(device), precision)
    there = out.is_dir() and holds_weights(out)
    if there and read_hash(out) != read_hash(locate(weights)):
        raise InputError(f"{out} holds other weights; choose another --out.")
    measured = out / _MEASURED
    with writable_folder(out), progress_bar("calibrating", console) as update:
        found = library.calibrate(
            model, images, sizes=shorts, count=count, measured=measured, progress=update
        )
        found = library.extended(found, content.found_in(model.beside))
        if there:
            with atomic_write(out / content.FILE) as file:
                file.write(found.to_bytes())
        else:
            stored, _ = load_model(weights, "cpu", "float32")
            stored.beside = {**stored.beside, content.FILE: found.to_bytes()}
            save(stored, out)
        measured.unlink(missing_ok=True)
    checks = [library.HeldOut(**row) for row in found.about["held_out"]]
    console.print(_table(checks))
    for size, enlarged in found.about["enlarged"].items():
        if enlarged:
            say(
                f"warning: {enlarged} of {found.about['photos'][size]} photos are smaller than "
                f"{size} px and were enlarged, which flatters what is chosen."
            )
    say(f"wrote {out / content.FILE}")


def _table(checks: Sequence[HeldOut]) -> Table:
    from rich.table import Table

    table = Table(
        title=f"{', '.join(map(str, sorted({row.photos for row in checks})))} photos, each held "
        "out once",
        caption="work: operations over those of the full pass. Fixed: the least share for all that "
        "keeps the promise on 95 of 100. Oracle: the least for each.",
    )
    columns = ("size", "promise", "kept", "mean keep", "work", "fixed keep", "work", "oracle")
    for name in (*columns, "cores"):
        table.add_column(name, justify="right")
    for row in checks:
        table.add_row(
            *(str(row.size), f"{row.agreement:g}", f"{row.kept:.1%}", f"{row.keep:.2f}"),
            *(f"{row.work:.3f}", f"{row.fixed_keep:g}", f"{row.fixed_work:.3f}"),
            *(f"{row.oracle_work:.3f}", str(row.cores)),
        )
    return table
