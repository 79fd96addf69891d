"""Features of pictures of any size: what is asked for is checked, planned, and run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.distributed import ProcessGroup

from veca._util.numbers import gigabytes
from veca.checks import check_budget, check_keep, check_memorable, check_model
from veca.config import VecaConfig
from veca.core_memory import CoreMemory, weights_stamp
from veca.errors import LargeError, OutputError, check_choice
from veca.large.image_pass import ImagePass
from veca.large.journal import STATES, Journal
from veca.large.masks import mask_of, shares
from veca.large.picture import Picture, Pixels, as_picture, patch_grid
from veca.large.plan import Estimate, Mask, PatchTile, checked_mask, cut, plan
from veca.large.ranks import Ranks
from veca.large.states import DiskStates, MemoryStates, NoStates, States
from veca.large.view import PictureView, as_view
from veca.large.window_pass import OverviewPass, WindowPass
from veca.large.work import Progress, Work
from veca.large.writers import Layout, TileWriter, as_writer, place_of
from veca.large.writers.arrays import ArrayWriter
from veca.model import Veca
from veca.precision import recorded

CONTEXTS = ("image", "tile", "overview", "tile+overview")
"""What a patch sees beside its own pixels."""
COMMON_CONTEXT = "tile"
"""What the command takes, by measurement: what learnt from photos stays good on pictures of many
scenes. From Python the default is "image", the plain forward."""
WIDTHS = ("native", "projected")
_SIDE, _HALO = 24, 4
"""Patches a side of a tile that is a picture of its own, and those that its window adds around."""
_OVERVIEW = 1024
"""Pixels of an overview's longer side."""


class LargeOutput(NamedTuple):
    """What the model knows about a picture of any size."""

    memory: CoreMemory | None
    """What `Veca.read` reads regions from; None where each tile has a context of its own."""
    grid: tuple[int, int]
    """(h, w): patches down and across."""
    features: np.ndarray[Any, Any] | None
    """[h, w, D'] where they were not given a place to go."""
    cores: Tensor
    """[C, D'] the cores' features, projected; with contexts of tiles the mean over the patches."""


def estimate(
    model: Veca,
    picture: Picture | Pixels | Image.Image | str | os.PathLike[str] | tuple[int, int],
    out: object = None,
    *,
    cores: int | None = None,
    context: str = "image",
    mask: object = None,
    memory: int | str = "2GB",
    spill: str = "auto",
    state: str | os.PathLike[str] | None = None,
    tile: int | None = None,
) -> Estimate:
    """What `features` would take, with the same arguments; `print` it.

    Args:
        picture: or its (height, width) in pixels.
    """
    check_model(model, "veca.large.estimate")
    check_choice("context", context, CONTEXTS)
    size = model.config.patch_size
    if isinstance(picture, tuple):
        grid = (-(-picture[0] // size), -(-picture[1] // size))
    else:
        grid = patch_grid(as_picture(picture), size)
    there = checked_mask(mask, grid)
    disk = state is not None or isinstance(out, (str, os.PathLike))
    side, halo = _tiling(context, tile)
    return plan(
        model,
        grid,
        cores=cores,
        mask=there,
        memory=memory,
        spill=spill,
        has_disk=disk,
        side=side,
        halo=halo,
    )


@torch.no_grad()
def features(
    model: Veca,
    picture: Picture | Pixels | Image.Image | str | os.PathLike[str],
    out: TileWriter | str | os.PathLike[str] | None = None,
    *,
    cores: int | None = None,
    context: str = "image",
    keep: float | None = None,
    width: str = "projected",
    dtype: str | None = None,
    mask: object = None,
    memory: int | str = "2GB",
    spill: str = "auto",
    state: str | os.PathLike[str] | None = None,
    tile: int | None = None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> LargeOutput:
    """Features of a picture of any size: by default those of the plain forward, up to rounding.

    A pass that was stopped goes on at its last finished tile when it is asked for again.

    Args:
        picture: what `open_picture` gives, or a path for it; a NumPy array or memory map uint8
            [H, W, 3], a Pillow image, or your own `Picture`. It is normalised as the weights want.
            Where its sides are no multiples of the patch size, the last patches repeat its last
            pixels.
        out: a path that ends in .zarr, .h5, .tif (a GeoTIFF of three components) or .npy, or a
            `TileWriter`; None keeps the features in memory.
        cores: the budget, 1..M, by default all M.
        context: what a patch sees beside its own pixels. "image": the whole picture, exactly.
            "tile": a window around its tile. "overview": the picture scaled down.
            "tile+overview": both.
        keep: with context "tile": the share of patches that go on after merging.
        width: "projected", features as the model gives them; "native", before the output
            projection, as wide as the network.
        dtype: of the features as they are written, float16 or float32; by default float16 in Zarr
            and HDF5.
        mask: booleans [h, w], one for each patch: those that are False are no tokens at all. They
            cost nothing, the cores do not see them, and their features are 0. Or what `mask_of`
            takes: "tissue", "nodata", the path of an image.
        memory: what the pass may take beside the weights, the picture and the features: "2GB".
        spill: where patches' states wait from layer to layer. "memory" is fastest; "disk" writes
            and reads each state once a layer; "recompute" needs neither, and about (L + 1) / 2
            times the work. "auto" is the first of these that `memory` and `state` allow.
            `estimate` has the figures.
        state: a folder for states and for what a stopped pass needs to go on; it is removed at the
            end. By default beside `out`, where that is a path.
        tile: patches a side of a tile, by default what suits the device and the memory. Where each
            tile has a context of its own, features depend on it; then 24, in windows of 32.
        progress: called with (done, total) tiles of layers, of this process.
        group: processes of torch.distributed that share the work: each takes some of the tiles and
            writes them, and all call this with the same arguments. `out` and `state` are places
            that all of them see; features that stay in memory are, on each, those of its own
            tiles, and 0 elsewhere.
    """
    config = check_pass(model, context, keep, width, mask)
    source = as_picture(picture)
    grid = patch_grid(source, config.patch_size)
    there = _mask(source, mask, grid, config.patch_size)
    budget = check_budget(cores, config.num_cores)
    writer = as_writer(out, dtype)
    path = place_of(writer)
    if state is None and path is not None:
        state = path.with_name(f".{path.name}.state")
    ranks = Ranks(group)
    folder = None if state is None else Path(state).expanduser()
    if folder is not None and ranks.size > 1:
        folder = folder / f"{ranks.rank}-of-{ranks.size}"
    side, halo = _tiling(context, tile)
    estimated = plan(
        model,
        grid,
        cores=budget,
        mask=there,
        memory=memory,
        spill=spill,
        has_disk=folder is not None,
        side=side,
        ranks=ranks.size,
        halo=halo,
    )
    tiles = list(cut(grid, estimated.side, there))[ranks.rank :: ranks.size]
    identity = source.identity() if folder is not None or path is not None else ""
    settings = {
        "weights": weights_stamp(model),
        "precision": recorded(model),
        "picture": identity,
        "grid": list(grid),
        "cores": budget,
        "context": context,
        "keep": keep,
        "width": width,
        "mask": None if there is None else _digest(there),
        "tile": estimated.side,
    }
    facts = {**settings, **_facts(source, config)}
    numbers = config.feature_width if width == "projected" else config.width
    layout = Layout(grid, numbers, estimated.side, config.patch_size, source, there, facts)
    journal = Journal(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.close)
        with ranks.together(model.device):
            stack.enter_context(journal.opened(settings, model.device))
            states = _states(estimated, tiles, model, folder)
            stack.callback(states.close)
        given = (model, layout, tiles, budget, journal, writer, progress, ranks)
        projected = width == "projected"
        work: Work
        if halo is None:
            work = ImagePass(*given, states=states, projected=projected)
        else:
            beside = None
            if context != "tile":
                beside = _overview_memory(model, source, grid, budget, there, memory)
            kind = OverviewPass if context == "overview" else WindowPass
            work = kind(*given, halo=halo, keep=keep, memory=beside, projected=projected)
        found, last = work.run(work.begin_writer())
        ranks.wait(model.device)  # all tiles are there
        if ranks.rank == 0:
            writer.finish(found)
        journal.remove()
    if folder is not None and ranks.size > 1:
        with contextlib.suppress(OSError):  # the last of the ranks
            folder.parent.rmdir()
    array = writer.array if isinstance(writer, ArrayWriter) else None
    return LargeOutput(found, grid, array, last)


def check_pass(
    model: Veca, context: str, keep: float | None, width: str, mask: object
) -> VecaConfig:
    """Refuse what cannot be computed together; the network's configuration."""
    check_model(model, "veca.large.features")
    check_choice("context", context, CONTEXTS)
    check_choice("width", width, WIDTHS)
    if context == "tile" and keep is not None:
        check_keep(keep)
        if mask is not None:
            raise LargeError("keep merges patches of whole windows, so it takes no mask.")
    elif keep is not None and keep != 1:
        raise LargeError(
            f"keep={keep:g} goes with context='tile' alone, got {context!r}, in which every patch "
            "goes on. Leave keep out, or choose the context tile."
        )
    check_memorable(model.training, None)
    if model.config.in_channels != 3:
        raise LargeError(f"pictures are RGB, and the model takes {model.config.in_channels} bands.")
    return model.config


def _tiling(context: str, tile: int | None) -> tuple[int | None, int | None]:
    """Patches a side of a tile, where that is fixed, and those that a window adds around it."""
    if context == "image":
        return tile, None
    if context == "overview":  # nothing depends on the tiles
        return tile, 0
    return tile or _SIDE, _HALO


def _mask(source: Picture, mask: object, grid: tuple[int, int], patch_size: int) -> Mask | None:
    if isinstance(mask, (str, os.PathLike)):
        mask = mask_of(source, mask, patch_size)
    return checked_mask(mask, grid)


def _facts(source: Picture, config: VecaConfig) -> dict[str, Any]:
    """What is known of a picture, as JSON."""
    found: dict[str, Any] = {"patch_size": config.patch_size, "shape": list(source.shape)}
    if isinstance(source, PictureView):
        path = getattr(source.source, "path", None)  # a picture in memory has none
        found["path"] = None if path is None else os.path.abspath(path)  # noqa: PTH100
        found["look"] = source.look.to_dict()
        if source.microns is not None:
            found["microns_per_pixel"] = list(source.microns)
        if source.place is not None:
            found["crs"] = source.place.crs
            part = source.place.part(0, 0, config.patch_size, config.patch_size)
            found["transform_of_patches"] = list(part.transform)
    return found


def _overview_memory(
    model: Veca,
    source: Picture,
    grid: tuple[int, int],
    budget: int,
    mask: Mask | None,
    memory: int | str,
) -> CoreMemory:
    """The memory of the picture scaled down, to be read on the whole's grid."""
    small = as_view(source).reduced(_OVERVIEW)
    size = model.config.patch_size
    there = None
    if mask is not None:
        there = shares(mask, patch_grid(small, size), small.shape, size) > 0
    out = features(model, small, _Nowhere(), cores=budget, mask=there, memory=memory)
    assert out.memory is not None
    return replace(out.memory, grid=grid)


class _Nowhere:
    """Where features go that nobody wants."""

    def begin(self, layout: Layout, resumed: bool) -> bool:
        return True

    def add(self, row: int, column: int, features: np.ndarray[Any, Any]) -> None:
        pass

    def finish(self, memory: CoreMemory | None) -> None:
        pass

    def close(self) -> None:
        pass


def _states(
    estimated: Estimate, tiles: list[PatchTile], model: Veca, folder: Path | None
) -> States:
    """Where states wait; the disk is asked for room first."""
    if estimated.spill == "memory":
        return MemoryStates()
    if estimated.spill in ("recompute", "none"):
        return NoStates()
    if folder is None:
        raise LargeError("spill='disk' needs a place: name a folder with state=...")
    path = folder / STATES
    there = path.stat().st_size if path.exists() else 0
    _check_space(folder, estimated.disk_bytes - there, "the patches' states")
    most = max((tile.patches for tile in tiles), default=1)
    return DiskStates(path, len(tiles), most, model.config.width, model.dtype, model.device)


def _check_space(folder: Path, needed: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutputError(
            f"{what} need {gigabytes(needed)} in {folder}, and {gigabytes(free)} are free; free "
            "some space, name another folder, or choose spill='recompute'."
        )


def _digest(mask: Mask) -> str:
    return hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()
