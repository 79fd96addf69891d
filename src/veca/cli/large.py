"""`veca large`: the features of pictures of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veca._util.numbers import gigabytes
from veca.cli.common import (
    Device,
    Overwrite,
    Precision,
    Threads,
    Weights,
    console,
    parse_keep,
    parse_numbers,
    pick_device,
    say,
    say_estimate,
)
from veca.errors import AlreadyThereError, InputError

Region = Annotated[
    str | None,
    typer.Option(help="A part, as x,y,width,height in pixels.", show_default="the whole picture"),
]


def large(
    pictures: Annotated[
        list[Path],
        typer.Argument(
            help="Pictures: images, TIFF, slides, GeoTIFF, Zarr and Zoomify folders, .dzi, .npy."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Ends in .zarr, .h5, .tif (components or classes on the map) or .npy. Of several "
            "pictures: a folder, for one .zarr each."
        ),
    ],
    weights: Weights = "veca_tiny_patch16",
    level: Annotated[
        int | None, typer.Option(min=0, help="Of those in the file, 0 the finest.")
    ] = None,
    mpp: Annotated[
        str | None, typer.Option(help="Micrometres a pixel, such as 0.5; or with a unit: 10m.")
    ] = None,
    region: Region = None,
    mask: Annotated[
        str | None,
        typer.Option(
            help="tissue, nodata, or an image that is 0 where nothing is to be computed.",
            show_default="none",
        ),
    ] = None,
    context: Annotated[
        str,
        typer.Option(
            help="What a patch sees: tile, tile+overview, overview, or image: the whole picture, "
            "as one forward has it, from whose core memory `veca read` computes regions."
        ),
    ] = "tile",
    cores: Annotated[
        int | None, typer.Option(min=1, help="The budget.", show_default="all the model has")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="With --context tile: the share of patches that go on after merging."),
    ] = None,
    width: Annotated[
        str,
        typer.Option(help="native: as wide as the network. projected: as wide as the teacher."),
    ] = "native",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the written features: float16, float32.", show_default="float16; .npy float32"
        ),
    ] = None,
    precision: Precision = "float32",
    memory: Annotated[
        str, typer.Option(help="What the pass may take beside weights, picture and features.")
    ] = "1GB",
    spill: Annotated[
        str, typer.Option(help="Where states wait: memory, disk, recompute, or auto.")
    ] = "auto",
    state: Annotated[
        Path | None,
        typer.Option(help="A folder for what a stopped run goes on from.", show_default="at OUT"),
    ] = None,
    bands: Annotated[
        str | None,
        typer.Option(help="One or three, such as 4,3,2.", show_default="the first three"),
    ] = None,
    value_range: Annotated[
        str | None,
        typer.Option("--range", help="LOW,HIGH that become black and white, if not of 8 bit."),
    ] = None,
    components: Annotated[int, typer.Option(min=1, help=".tif: how many components.")] = 3,
    head: Annotated[
        Path | None,
        typer.Option(help=".tif: a linear classifier (.safetensors); its classes are written."),
    ] = None,
    pool: Annotated[
        int, typer.Option(min=1, help=".h5: patches a side of a row: 16 for tiles of 256 px.")
    ] = 1,
    features: Annotated[
        bool, typer.Option(help=".zarr: keep features, or the core memory alone.")
    ] = True,
    overwrite: Overwrite = False,
    engine: Annotated[
        str, typer.Option(help="For several pictures: local, or ray, a cluster.")
    ] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="Of the cluster.", show_default="$RAY_ADDRESS, or here")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Compute the features of pictures of any size, and write them to disk.

    A run that was stopped goes on when it is started again. Under torchrun, processes share a
    picture.

    veca large slide.svs --out features.zarr --mask tissue

    torchrun --nproc-per-node=2 -m veca large map.tif --out features.zarr --mpp 1m
    """
    import torch

    from veca._util.progress import progress_bar
    from veca.embed.embedding import load_model
    from veca.large.collection import collect
    from veca.large.job import LargeJob, describe
    from veca.large.ranks import processes
    from veca.large.view import look_at

    if threads is not None:
        torch.set_num_threads(threads)
    job = LargeJob(
        out=out,
        look=look_at(
            level,
            mpp,
            parse_region(region),
            None if bands is None else parse_numbers(bands, "--bands"),
            parse_range(value_range),
        ),
        mask=mask,
        context=context,
        cores=cores,
        keep=parse_share(keep),
        width=width,
        dtype=dtype,
        memory=memory,
        spill=spill,
        state=state,
        components=components,
        head=head,
        pool=pool,
        keep_features=features,
        overwrite=overwrite,
    )
    if len(pictures) > 1 or engine != "local":
        # A cluster has devices of its own.
        model, _ = load_model(weights, pick_device("cpu" if engine == "ray" else device), precision)
        with progress_bar("pictures", console) as update:
            done = collect(
                pictures, job, model, engine=engine, address=ray_address, device=device,
                threads=threads, progress=update,
            )  # fmt: skip
        for name, reason in done.failed:
            say(f"failed {name}: {reason}")
        say(f"{len(done.written)} of {len(pictures)} pictures -> {out}")
        if done.failed:
            raise InputError(f"{len(done.failed)} of {len(pictures)} pictures failed; see above.")
        return
    with processes(device) as (group, own_device, is_first):
        picture = job.open(pictures[0])
        model, _ = load_model(weights, pick_device(own_device), precision)
        there = job.mask_for(picture, model)
        if is_first:
            say(describe(picture, model.config.patch_size))
            say_estimate(job.estimate(model, picture, there))
        try:
            with progress_bar("tiles of layers", console) as update:
                told = update if is_first else None
                made = job.run(model, picture, there, group=group, progress=told)
        except AlreadyThereError as found:
            say(str(found))
            return
    if is_first:
        rows, columns = made.grid
        kept = "" if made.memory is None else f", core memory {gigabytes(made.memory.nbytes)}"
        say(f"{columns} x {rows} patches{kept} -> {out}")


def parse_share(text: str | None) -> float | None:
    """'0.5' -> 0.5; what is chosen photo by photo is no choice for a picture's tiles."""
    share = parse_keep(text)
    if isinstance(share, str):
        raise InputError("a large picture takes a share, such as --keep 0.5, not auto.")
    return share


def parse_range(text: str | None) -> tuple[float, float] | None:
    """'0,3000' -> (0.0, 3000.0)."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"a range is LOW,HIGH, such as 0,3000; got {text!r}.") from error
    return low, high


def parse_region(text: str | None) -> tuple[int, int, int, int] | None:
    """'0,512,1024,768' -> (0, 512, 1024, 768)."""
    if text is None:
        return None
    try:
        sides = [int(part) for part in text.split(",")]
    except ValueError:
        sides = []
    if len(sides) != 4:
        raise InputError(f"a region is x,y,width,height in pixels, got {text!r}.")
    x, y, width, height = sides
    return x, y, width, height
