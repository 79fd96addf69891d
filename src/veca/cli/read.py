"""`veca read`: features of a region of a large picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import Device, Threads, Weights, pick_device, say
from veca.cli.large import parse_region
from veca.errors import InputError


def read(
    store: Annotated[Path, typer.Argument(help="A .zarr of `veca large`.")],
    region: Annotated[str, typer.Option(help="x,y,width,height in pixels of the picture.")],
    out: Annotated[Path, typer.Option(help="A .npy file, [h, w, D'].")] = Path("region.npy"),
    compute: Annotated[
        bool,
        typer.Option("--compute", help="From the core memory and pixels, though features exist."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Where the picture is.", show_default="where it was")
    ] = None,
    weights: Weights = "veca_tiny_patch16",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Read the features of a region: from the store, or exactly from its core memory and pixels.

    veca read features.zarr --region 4096,8192,512,512
    """
    import numpy as np

    from veca._util.files import atomic_write, place_for
    from veca.large import FeatureStore

    place = place_for(out)
    if place.suffix != ".npy":
        raise InputError(f"a region is written as .npy, got {place}.")
    found = FeatureStore(store)
    asked = parse_region(region)
    assert asked is not None
    if found.features is not None and not compute:
        array, way = found.read(asked), "from the store"
    else:
        import torch

        from veca.embed.embedding import load_model

        if threads is not None:
            torch.set_num_threads(threads)
        found.patches(asked)  # before the weights
        model, _ = load_model(weights, pick_device(device), found.facts["precision"])
        array = found.compute(model, asked, None if picture is None else found.picture(picture))
        way = "from the core memory and pixels"
    with atomic_write(place) as file:
        np.save(file, array)
    row, column, rows, columns = found.patches(asked)
    say(
        f"{rows} x {columns} patches of {array.shape[2]} numbers, from row {row}, column {column}, "
        f"{way} -> {place}"
    )
