"""`veca viz`: the paper's figures of any photo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veca.cli.common import (
    Agreement,
    Device,
    Keep,
    ShownSize,
    Threads,
    command_line,
    console,
    find_photos,
    parse_keep,
    parse_numbers,
    parse_size,
    pick_device,
    writable_folder,
)
from veca.config import DEFAULT_SIZE
from veca.errors import InputError

if TYPE_CHECKING:
    from PIL import Image


def viz(
    context: typer.Context,
    figure: Annotated[
        str,
        typer.Argument(
            help="report (all of them as a page), features, sizes, agreement, attention, cores, "
            "paths, states, similarity, merged or numbers; large, of a .zarr of veca large.",
            show_default=False,
        ),
    ],
    photos: Annotated[
        list[str] | None,
        typer.Argument(
            help="Image files, folders and patterns.", show_default=False, metavar="PHOTOS..."
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="A folder; or, for one figure, a file ending in .png, .svg or .html."),
    ] = Path("viz"),
    format: Annotated[
        str | None, typer.Option(help="png, svg or html.", show_default="png")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="A name, a folder, a file or a hub id; by default the bundled weights."),
    ] = None,
    cores: Annotated[
        str | None, typer.Option(help="Budgets, such as 8,32,64.", show_default="the figure's own")
    ] = None,
    keep: Keep = None,
    agreement: Agreement = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers, such as 1,4,8,12.", show_default="the figure's own")
    ] = None,
    size: ShownSize = str(DEFAULT_SIZE),
    sizes: Annotated[str, typer.Option(help="Sizes: short sides in pixels.")] = (
        "256,512,768,1024"
    ),
    kind: Annotated[str, typer.Option(help="Attention: norm (as published) or softmax.")] = "norm",
    colours: Annotated[
        str, typer.Option(help="Projection: pca, or umap (slow; extra umap).")
    ] = "pca",
    overlay: Annotated[
        float, typer.Option(min=0, max=1, help="Features: how much of the photo shines through.")
    ] = 0.0,
    core: Annotated[
        str | None, typer.Option(help="Cores: which, such as 1,2,7.", show_default="the first five")
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            help="Similarity: a point X,Y in pixels of the (first) photo, or in percent, 30%,50%. "
            "Give it again for more points.",
            show_default="the middle",
        ),
    ] = None,
    height: Annotated[int, typer.Option(min=32, help="Height of each picture, in pixels.")] = 256,
    seed: Annotated[int, typer.Option(help="For UMAP.")] = 0,
    openseadragon: Annotated[
        str | None,
        typer.Option(
            help="Large: the npm package openseadragon, a folder or its .tgz.",
            show_default="from npm",
        ),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Draw what the model sees in photos; all pictures are the same each time.

    veca viz report photo.jpg --out report/

    veca viz attention photo.jpg --cores 8,32,64 --layers 1,4,8,12 --format svg
    """
    import torch

    from veca import viz as library
    from veca.errors import suggest
    from veca.viz import numbers
    from veca.viz.catalogue import is_file_name, output_format
    from veca.viz.default_weights import FRESH, load_or_fresh

    known = [*library.FIGURES, "report", "large"]
    if figure not in known and Path(figure).exists():
        raise InputError(
            f"{figure}: the figure comes first, as in veca viz report {figure}; figures: "
            f"{', '.join(known)}."
        )
    if figure not in known:
        raise InputError(f"unknown figure {suggest(figure, known)}")
    if not photos:
        raise InputError(f"no photo to draw; give one, as in veca viz {figure} photo.jpg.")
    if figure == "large":
        _large(photos, out, openseadragon)
        return
    if figure == "report" and (is_file_name(out) or format not in (None, "html")):
        raise InputError("a report is a folder with a page in it; give --out a folder.")
    output_format(out, format)
    asked = {
        "cores": parse_numbers(cores, "--cores") if cores else None,
        "layers": parse_numbers(layers, "--layers") if layers else None,
        "which": parse_numbers(core, "--core") if core else None,
    }
    shorts = parse_numbers(sizes, "--sizes")
    library.Options(kind=kind, method=colours)  # both are checked before the weights are read
    share = parse_keep(keep)
    files, pixels = find_photos(photos), parse_size(size)
    if threads is not None:
        torch.set_num_threads(threads)
    name, model, fresh = load_or_fresh(weights, pick_device(device))
    views = [
        library.View(model, file, pixels, height=height, keep=share, agreement=agreement)
        for file in files
    ]
    options = library.Options(
        **asked,
        sizes=shorts,
        kind=kind,
        method=colours,
        seed=seed,
        overlay=overlay,
        points=[parse_point(text, views[0].photo) for text in at or ["50%,50%"]],
    )
    options.check(model)
    folder = out.parent if is_file_name(out) else out
    command = command_line(context)
    with console.status("looking") as status, writable_folder(folder):
        if figure == "report":
            made = library.report(
                views, out, options, weights=name, progress=status.update, command=command
            )
            written, rows = [made.page], made.rows
        else:
            written = library.save(figure, views, out, options, format=format, command=command)
            rows = numbers.read_csv(written[-1]) if figure == "numbers" else []
    if rows:
        found = numbers.verdicts(rows)
        for verdict in found:
            console.print(str(verdict), markup=False, highlight=False, soft_wrap=True)
        console.print(numbers.summary(found, fresh), markup=False, soft_wrap=True)
    elif fresh:
        console.print(FRESH, style="yellow")
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _large(stores: list[str], out: Path, viewer: str | None) -> None:
    """The page of one picture, or one in a folder for each of several."""
    from veca._util.progress import progress_bar
    from veca.large import FeatureStore
    from veca.viz.large import large_page

    for store in stores:
        folder = out if len(stores) == 1 else out / Path(store).stem
        with progress_bar("tiles", console) as update, writable_folder(folder):
            made = large_page(FeatureStore(store), folder, viewer=viewer, progress=update)
        for path in made:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)


def parse_point(text: str, photo: Image.Image) -> tuple[float, float]:
    """'320,200' (pixels) or '30%,50%' -> (x, y) in 0..1 of the photo."""
    parts = [part.strip() for part in text.split(",")]
    try:
        values = [
            float(part[:-1]) / 100 if part.endswith("%") else (float(part) + 0.5) / side
            for part, side in zip(parts, photo.size, strict=True)
        ]
    except ValueError:
        values = []
    if len(values) != 2 or not all(0 <= value <= 1 for value in values):
        raise InputError(
            f"a point is X,Y in pixels of the photo ({photo.width} wide, {photo.height} high), or "
            f"in percent such as 30%,50%; got {text!r}."
        )
    return values[0], values[1]
