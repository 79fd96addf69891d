"""The pass over a picture of any size: layer by layer, and in each layer tile by tile.

Patches see nothing but the cores, so a tile needs only its own pixels or state. The cores see all
patches; what they take from each tile is a few sums, an online softmax. So what is computed is the
plain forward, up to rounding, in the memory of one tile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.distributed import ProcessGroup

from veca import rope
from veca._util.numbers import gigabytes
from veca.attention import PartialAttention, partial_attention
from veca.checks import check_budget, check_memorable, check_model
from veca.core_memory import CoreMemory, weights_stamp
from veca.errors import LargeError, OutputError
from veca.large import layers
from veca.large.journal import STATES, Journal
from veca.large.picture import Picture, Pixels, as_picture, patch_grid, tile_pixels
from veca.large.plan import Estimate, Mask, PatchTile, checked_mask, cut, plan
from veca.large.ranks import Ranks
from veca.large.states import DiskStates, MemoryStates, NoStates, States
from veca.large.writers import ArrayWriter, NumpyWriter, TileWriter, as_writer
from veca.model import Veca


class Progress(Protocol):
    """Told after each tile of each layer how many are done, of how many."""

    def __call__(self, done: int, total: int) -> None: ...


class LargeOutput(NamedTuple):
    """What the model knows about a picture of any size."""

    memory: CoreMemory
    """The global features (`memory.cls`, `memory.cores`), and what `Veca.read` reads from."""
    grid: tuple[int, int]
    """(h, w): patches down and across."""
    features: np.ndarray[Any, Any] | None
    """[h, w, D'] where they were not given a place to go."""


def estimate(
    model: Veca,
    picture: Picture | Pixels | Image.Image | tuple[int, int],
    out: object = None,
    *,
    cores: int | None = None,
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
    size = model.config.patch_size
    if isinstance(picture, tuple):
        grid = (-(-picture[0] // size), -(-picture[1] // size))
    else:
        grid = patch_grid(as_picture(picture), size)
    there = checked_mask(mask, grid)
    disk = state is not None or isinstance(out, (str, os.PathLike))
    return plan(
        model, grid, cores=cores, mask=there, memory=memory, spill=spill, has_disk=disk, side=tile
    )


@torch.no_grad()
def features(
    model: Veca,
    picture: Picture | Pixels | Image.Image,
    out: TileWriter | str | os.PathLike[str] | None = None,
    *,
    cores: int | None = None,
    mask: object = None,
    memory: int | str = "2GB",
    spill: str = "auto",
    state: str | os.PathLike[str] | None = None,
    tile: int | None = None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> LargeOutput:
    """Features of a picture of any size: those of the plain forward, up to rounding.

    A pass that was stopped goes on at its last finished tile when it is asked for again.

    Args:
        picture: a `Picture`, a NumPy array or memory map uint8 [H, W, 3], or a Pillow image. It is
            normalised as the weights want. Where its sides are no multiples of the patch size, the
            last patches repeat its last pixels.
        out: a `.npy` file, or a `TileWriter`; None keeps the features in memory.
        cores: the budget, 1..M, by default all M.
        mask: booleans [h, w], one for each patch: those that are False are no tokens at all. They
            cost nothing, the cores do not see them, and their features are 0.
        memory: what the pass may take beside the weights, the picture and the features: "2GB".
        spill: where patches' states wait from layer to layer. "memory" is fastest; "disk" writes
            and reads each state once a layer; "recompute" needs neither, and about (L + 1) / 2
            times the work. "auto" is the first of these that `memory` and `state` allow.
            `estimate` has the figures.
        state: a folder for states and for what a stopped pass needs to go on; it is removed at the
            end. By default beside `out`, where that is a path.
        tile: patches a side of a tile, by default what suits the device and the memory.
        progress: called with (done, total) tiles of layers, of this process.
        group: processes of torch.distributed that share the work: each takes some of the tiles and
            writes them, and all call this with the same arguments. `out` and `state` are places
            that all of them see; features that stay in memory are, on each, those of its own
            tiles, and 0 elsewhere.
    """
    check_model(model, "veca.large.features")
    check_memorable(model.training, None)
    if model.config.in_channels != 3:
        raise LargeError(f"pictures are RGB, and the model takes {model.config.in_channels} bands.")
    source = as_picture(picture)
    grid = patch_grid(source, model.config.patch_size)
    there = checked_mask(mask, grid)
    budget = check_budget(cores, model.config.num_cores)
    writer = as_writer(out)
    if state is None and isinstance(writer, NumpyWriter):
        state = writer.path.with_name(f".{writer.path.name}.state")
    ranks = Ranks(group)
    folder = None if state is None else Path(state).expanduser()
    if folder is not None and ranks.size > 1:
        folder = folder / f"{ranks.rank}-of-{ranks.size}"
    estimated = plan(
        model,
        grid,
        cores=budget,
        mask=there,
        memory=memory,
        spill=spill,
        has_disk=folder is not None,
        side=tile,
        ranks=ranks.size,
    )
    tiles = list(cut(grid, estimated.side, there))[ranks.rank :: ranks.size]
    settings = {
        "weights": weights_stamp(model),
        "picture": source.identity() if folder is not None else "",
        "grid": list(grid),
        "cores": budget,
        "mask": None if there is None else _digest(there),
        "tile": estimated.side,
    }
    journal = Journal(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.close)
        with ranks.together(model.device):
            stack.enter_context(journal.opened(settings, model.device))
            states = _states(estimated, tiles, model, folder)
            stack.callback(states.close)
        work = _Pass(model, source, grid, tiles, budget, states, journal, writer, progress, ranks)
        found = work.run(work.begin_writer())
        ranks.wait(model.device)  # all tiles are there
        if ranks.rank == 0:
            writer.finish()
        journal.remove()
    if folder is not None and ranks.size > 1:
        with contextlib.suppress(OSError):  # the last of the ranks
            folder.parent.rmdir()
    return LargeOutput(found, grid, writer.array if isinstance(writer, ArrayWriter) else None)


class _Pass:
    """One pass under way."""

    def __init__(
        self,
        model: Veca,
        picture: Picture,
        grid: tuple[int, int],
        tiles: list[PatchTile],
        budget: int,
        states: States,
        journal: Journal,
        writer: TileWriter,
        progress: Progress | None,
        ranks: Ranks,
    ) -> None:
        self.model, self.picture, self.grid, self.tiles = model, picture, grid, tiles
        self.budget, self.states, self.journal, self.writer = budget, states, journal, writer
        self.progress, self.ranks = progress, ranks
        self.periods = layers.periods_of(model)
        # The sums of many tiles: in float64, which is nothing beside the tiles' own work.
        self.wide = torch.float32 if model.device.type == "mps" else torch.float64

    def begin_writer(self) -> bool:
        """Whether tiles that were written before are still there."""
        ranks, width, device = self.ranks, self.model.config.feature_width, self.model.device
        there = False
        with ranks.together(device):
            if ranks.rank == 0:
                there = self.writer.begin(self.grid, width, self.journal.resumed)
        with ranks.together(device):  # the others find what the first has made
            if ranks.rank:
                self.writer.begin(self.grid, width, True)
        found = ranks.from_rank(0, torch.tensor(int(there), device=device))
        # In memory each rank has its own.
        return bool(found) and not isinstance(self.writer, ArrayWriter)

    def _catch_up(self) -> None:
        """A stopped rank may be a layer behind the others, which tell it how the layer began."""
        ranks, journal, device = self.ranks, self.journal, self.model.device
        known = len(journal.layers)
        for number in range(1, ranks.most(known, device) + 1):
            teller = ranks.most(ranks.rank if known >= number else -1, device)
            start = journal.layers[number - 1] if known >= number else self._blank_start()
            start = layers.LayerStart(*(ranks.from_rank(teller, part) for part in start))
            if number > known:
                journal.begin_layer(start)

    def _blank_start(self) -> layers.LayerStart:
        """Of the shapes that one has."""
        tokens, raw = layers.bank_of(self.model, self.budget)
        return layers.begin(self.model, 1, tokens, raw)

    def run(self, writer_resumed: bool) -> CoreMemory:
        journal, depth = self.journal, len(self.model.blocks)
        if self.ranks.size > 1:
            self._catch_up()
        if len(journal.layers) == depth and not writer_resumed:
            journal.forget_tiles()  # the last layer's tiles are features, which are not there
        tokens, raw = layers.bank_of(self.model, self.budget)
        for number in range(max(1, len(journal.layers)), depth + 1):
            if number > len(journal.layers):
                journal.begin_layer(layers.begin(self.model, number, tokens, raw))
            raw = journal.layers[-1].raw
            tokens = self._layer(number)
        model = self.model
        return CoreMemory(
            torch.stack([layer.keys for layer in journal.layers]),
            torch.stack([layer.values for layer in journal.layers]),
            model.project(model.norm(tokens)),
            raw.tanh(),
            self.grid,
            model.config.patch_size,
            weights_stamp(model),
        )

    def _layer(self, number: int) -> Tensor:
        """Every tile through one layer; the cores after it [1, C, D]."""
        start, journal = self.journal.layers[-1], self.journal
        queries = layers.core_queries(self.model, number, start)
        sums = journal.sums
        if sums is None:
            none = start.keys[:, :, :0]
            sums = partial_attention(queries, none, none).to(self.wide)
        for index in range(journal.tiles, len(self.tiles)):
            part = self._tile(number, index, queries)
            sums = sums.join(part.to(self.wide))
            journal.add_tile(index + 1, sums)
            if self.progress is not None:
                done = (number - 1) * len(self.tiles) + index + 1
                self.progress(done, len(self.model.blocks) * len(self.tiles))
        own = partial_attention(queries, start.keys, start.values).to(self.wide)
        return layers.end(
            layers.block_of(self.model, number), start, self.ranks.join(sums).join(own)
        )

    def _tile(self, number: int, index: int, queries: Tensor) -> PartialAttention:
        """A tile through one layer; what the cores take from it."""
        tile, rotation = self.tiles[index], self._rotation(self.tiles[index])
        x = self.states.get(index, number - 1) if number > 1 else None
        if x is None:
            x = self._from_pixels(tile, number - 1, rotation)
        start, block = self.journal.layers[-1], layers.block_of(self.model, number)
        x, part = layers.through(block, x, rotation, start, queries)
        if number < len(self.model.blocks):
            self.states.put(index, number, x)
        else:
            self._write(tile, x)
        return part

    def _from_pixels(self, tile: PatchTile, after: int, rotation: rope.Rotation) -> Tensor:
        """A tile's state after some layers, from its pixels and what the cores held ready."""
        model = self.model
        shape = (tile.height, tile.width)
        pixels = tile_pixels(self.picture, model.config, (tile.row, tile.column), shape)
        x = model.patch_embed(pixels.to(model.device, model.dtype)).flatten(2).transpose(1, 2)
        x = x if tile.kept is None else x[:, tile.kept.to(x.device)]
        for number, layer in enumerate(self.journal.layers[:after], start=1):
            x = layers.block_of(model, number).read(x, layer.keys, layer.values, rotation)
        return x

    def _rotation(self, tile: PatchTile) -> rope.Rotation:
        place, shape = (tile.row, tile.column), (tile.height, tile.width)
        xy = rope.region_coordinates(self.grid, place, shape, self.periods.device)
        xy = xy if tile.kept is None else xy[tile.kept.to(xy.device)]
        return rope.rotation(xy.unsqueeze(0), self.periods)

    def _write(self, tile: PatchTile, x: Tensor) -> None:
        found = self.model.project(self.model.norm(x))[0].float().cpu()
        if tile.kept is not None:
            whole = found.new_zeros(tile.height * tile.width, found.shape[1])
            found = whole.index_copy(0, tile.kept, found)
        found = found.view(tile.height, tile.width, -1)
        self.writer.add(tile.row, tile.column, found.numpy())


def _states(
    estimated: Estimate, tiles: list[PatchTile], model: Veca, folder: Path | None
) -> States:
    """Where states wait; the disk is asked for room first."""
    if estimated.spill == "memory":
        return MemoryStates()
    if estimated.spill == "recompute":
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
