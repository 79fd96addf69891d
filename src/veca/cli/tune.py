"""`veca tune`: measure this machine with your own photos, and choose where on the dial to work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veca._util import numbers
from veca._util.files import check_written
from veca.cli.common import (
    Device,
    Images,
    Threads,
    Weights,
    What,
    console,
    parse_numbers,
    parse_what,
    pick_device,
    say,
    say_passed_over,
    writable_folder,
)
from veca.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from rich.table import Table

    from veca.tune import Tuning

POINT = "point.json"


def tune(
    photos: Images,
    out: Annotated[
        Path, typer.Option(help="Folder for the measurements, the plot and point.json.")
    ] = Path("tune"),
    weights: Weights = "veca_tiny_patch16",
    latency: Annotated[
        str | None, typer.Option(help="Choose the point that takes at most so long: 50ms, 0.2s.")
    ] = None,
    throughput: Annotated[
        str | None, typer.Option(help="Choose the point that makes so many images a second: 20/s.")
    ] = None,
    agreement: Annotated[
        float | None,
        typer.Option(help="Choose the fastest point that agrees so far, such as 0.99."),
    ] = None,
    sizes: Annotated[str, typer.Option(help="Short sides to try, in pixels.")] = "256,384,512",
    cores: Annotated[
        str | None,
        typer.Option(help="Budgets to try.", show_default="1/8, 1/4, 1/2 and all of the bank"),
    ] = None,
    keep: Annotated[str, typer.Option(help="Shares of patch tokens to try.")] = "1,0.7,0.5,0.35",
    precisions: Annotated[
        str, typer.Option(help="What to compute in: fp32, bf16, fp16 (GPU), int8 (CPU).")
    ] = "fp32,bf16",
    what: What = "cls,patches",
    count: Annotated[
        int, typer.Option("--photos", min=1, help="How many of the photos to measure on.")
    ] = 12,
    batch_size: Annotated[int, typer.Option(min=1, help="Images computed together.")] = 1,
    limit: Annotated[
        float, typer.Option(min=0, help="No new round (a photo) after this many seconds.")
    ] = 300.0,
    device: Device = "auto",
    threads: Threads = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over: forget what OUT has measured.")
    ] = False,
) -> None:
    """Measure this machine with your photos, and choose size, cores, keep and precision.

    Each photo is a round in which every point runs once. Agreement is the mean cosine with the
    full pass at the largest size. A second run goes on where the first stopped. The chosen point
    goes to features, embed, probe, export and bench as --point OUT/point.json.

    veca tune photos/ --latency 50ms
    """
    import torch

    from veca import tune as library
    from veca._util.progress import progress_bar
    from veca.embed.sources import open_images
    from veca.weights import load, weights_hash

    wish = library.Wish(
        parse_latency(latency) if latency is not None else None,
        parse_rate(throughput) if throughput is not None else None,
        agreement,
    )
    images = open_images(photos)  # before the weights: they may take a download
    say_passed_over(images)
    if threads is not None:
        torch.set_num_threads(threads)
    model = load(weights, device=pick_device(device))
    with writable_folder(out), progress_bar("tuning", console) as update:
        tuning = library.tune(
            model,
            images,
            out,
            sizes=parse_numbers(sizes, "--sizes"),
            cores=parse_numbers(cores, "--cores") if cores else None,
            keep=_shares(keep),
            precisions=[part.strip() for part in precisions.split(",") if part.strip()],
            what=parse_what(what),
            count=count,
            batch_size=batch_size,
            limit=limit,
            sha256=weights_hash(weights),
            overwrite=overwrite,
            progress=update,
        )
    console.print(_table(tuning))
    facts = tuning.conditions
    if facts["enlarged"]:
        say(
            f"warning: of {numbers.count(facts['photos'], 'photo')} {facts['enlarged']} smaller "
            f"than {tuning.reference.size} px had to be enlarged, which flatters small points."
        )
    point = tuning.choose(wish) if wish else None
    written = []
    if point is not None:
        point.save(out / POINT)
        written.append(out / POINT)
        say(f"chosen: {point.size} px, {point.cores} cores, keep {point.keep:g}, {point.precision}")
    try:
        library.plot(out / "tune.png", tuning, point)
        written.append(out / "tune.png")
    except MissingExtraError as error:
        say(f"no plot: {error}")
    written.append(out / library.MEASUREMENTS)
    check_written(written)
    say(f"wrote {', '.join(map(str, written))}")


def parse_latency(text: str) -> float:
    """'50ms', '0.05s' or '50' -> 50.0, milliseconds."""
    plain = text.strip().lower().replace(" ", "")
    factor = 1.0 if plain.endswith("ms") or not plain.endswith("s") else 1000.0
    return factor * _number(plain.removesuffix("ms").removesuffix("s"), "--latency", "50ms", text)


def parse_rate(text: str) -> float:
    """'20/s' or '20' -> 20.0, images a second."""
    plain = text.strip().lower().replace(" ", "")
    return _number(plain.removesuffix("/s"), "--throughput", "20/s", text)


def _number(plain: str, option: str, example: str, given: str) -> float:
    try:
        return float(plain)
    except ValueError:
        raise InputError(f"{option} is a number such as {example}, got {given!r}.") from None


def _shares(text: str) -> list[float]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return [_number(part, "--keep", "1,0.5,0.35", text) for part in parts]


def _table(tuning: Tuning) -> Table:
    from rich.table import Table

    facts = tuning.conditions
    table = Table(
        title=f"{tuning.weights}, {tuning.machine}, {numbers.count(facts['threads'], 'thread')}, "
        f"{numbers.count(facts['photos'], 'photo')}",
        caption=f"points that no other beats; agreement with {tuning.reference}",
    )
    for name in ("size", "cores", "keep", "precision", "ms", "images/s", "CLS", "patches"):
        table.add_column(name, justify="left" if name == "precision" else "right")
    for point in tuning.pareto():
        one = point.candidate
        patches = "" if point.patches is None else f"{point.patches:.4f}"
        table.add_row(
            *(str(one.size), str(one.cores), f"{one.keep:g}", one.precision),
            *(f"{point.ms:.3g}", f"{point.images_per_s:.3g}", f"{point.cls:.4f}", patches),
        )
    return table
