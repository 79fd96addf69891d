"""The pass over a picture of any size: layer by layer, and in each layer tile by tile.

Patches see nothing but the cores, so a tile needs only its own pixels or state. The cores see all
patches; what they take from each tile is a few sums, an online softmax. So what is computed is the
plain forward, up to rounding, in the memory of one tile.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca import rope
from veca._util.numbers import gigabytes
from veca.attention import PartialAttention, partial_attention, patch_rows
from veca.checks import check_budget, check_memorable, check_model
from veca.core_memory import CoreMemory, weights_stamp
from veca.errors import LargeError, OutputError
from veca.large.journal import STATES, Journal, LayerStart
from veca.large.picture import Picture, Pixels, as_picture, patch_grid, tile_pixels
from veca.large.plan import Estimate, Mask, PatchTile, checked_mask, cut, plan
from veca.large.states import DiskStates, MemoryStates, NoStates, States
from veca.large.writers import ArrayWriter, NumpyWriter, TileWriter, as_writer
from veca.model import Block, Veca


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
        progress: called with (done, total) tiles of layers.
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
    folder = None if state is None else Path(state).expanduser()
    estimated = plan(
        model,
        grid,
        cores=budget,
        mask=there,
        memory=memory,
        spill=spill,
        has_disk=folder is not None,
        side=tile,
    )
    tiles = list(cut(grid, estimated.side, there))
    settings = {
        "weights": weights_stamp(model),
        "picture": source.identity() if folder is not None else "",
        "grid": list(grid),
        "cores": budget,
        "mask": None if there is None else _digest(there),
        "tile": estimated.side,
    }
    with Journal(folder).opened(settings, model.device) as journal:
        states: States = NoStates()
        try:
            states = _states(estimated, tiles, model, folder)
            resumed = writer.begin(grid, model.config.feature_width, journal.resumed)
            work = _Pass(model, source, grid, tiles, budget, states, journal, writer, progress)
            found = work.run(writer_resumed=resumed)
            writer.finish()
        finally:
            states.close()
            writer.close()
        journal.remove()
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
    ) -> None:
        self.model, self.picture, self.grid, self.tiles = model, picture, grid, tiles
        self.budget, self.states, self.journal, self.writer = budget, states, journal, writer
        self.progress = progress
        c = model.config
        self.periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction, model.device)
        # The sums of many tiles: in float64, which is nothing beside the tiles' own work.
        self.wide = torch.float32 if model.device.type == "mps" else torch.float64

    def run(self, writer_resumed: bool) -> CoreMemory:
        journal, depth = self.journal, len(self.model.blocks)
        if len(journal.layers) == depth and not writer_resumed:
            journal.forget_tiles()  # the last layer's tiles are features, which are not there
        tokens, raw = self._bank()
        for number in range(max(1, len(journal.layers)), depth + 1):
            if number > len(journal.layers):
                journal.begin_layer(self._start(number, tokens, raw))
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

    def _bank(self) -> tuple[Tensor, Tensor]:
        tokens, raw = (part.unsqueeze(0) for part in self.model.bank.prefix(self.budget))
        return tokens, raw if raw.dtype == torch.float64 else raw.float()

    def _block(self, number: int) -> Block:
        return cast(Block, self.model.blocks[number - 1])

    def _start(self, number: int, tokens: Tensor, raw: Tensor) -> LayerStart:
        """The cores before a layer: they move, and hold keys and values ready."""
        if number > 1:
            raw = self.model.moves[number - 2](raw, tokens)
        block = self._block(number)
        rotation = rope.rotation(raw.tanh(), self.periods)
        keys, values = block.attn.keys_and_values(block.norm_attn(tokens), rotation)
        return LayerStart(tokens, raw, keys, values)

    def _layer(self, number: int) -> Tensor:
        """Every tile through one layer; the cores after it [1, C, D]."""
        start, block, journal = self.journal.layers[-1], self._block(number), self.journal
        rotation = rope.rotation(start.raw.tanh(), self.periods)
        queries = block.attn.queries(block.norm_attn(start.tokens), rotation)
        sums = journal.sums
        if sums is None:
            sums = partial_attention(queries, start.keys, start.values).to(self.wide)
        for index in range(journal.tiles, len(self.tiles)):
            part = self._tile(number, index, queries)
            sums = sums.join(part.to(self.wide))
            journal.add_tile(index + 1, sums)
            if self.progress is not None:
                done = (number - 1) * len(self.tiles) + index + 1
                self.progress(done, len(self.model.blocks) * len(self.tiles))
        mixed = sums.result().to(start.tokens.dtype)
        return block.feed(start.tokens + block.attn.joined(mixed))

    def _tile(self, number: int, index: int, queries: Tensor) -> PartialAttention:
        """A tile through one layer; what the cores take from it."""
        tile, start, block = self.tiles[index], self.journal.layers[-1], self._block(number)
        rotation = self._rotation(tile)
        x = self.states.get(index, number - 1) if number > 1 else None
        if x is None:
            x = self._from_pixels(tile, number - 1, rotation)
        normed = block.norm_attn(x)
        keys, values = block.attn.keys_and_values(normed, rotation)
        part = partial_attention(queries, keys, values)
        mixed = patch_rows(block.attn.queries(normed, rotation), start.keys, start.values)
        x = block.feed(x + block.attn.joined(mixed))
        if number < len(self.model.blocks):
            self.states.put(index, number, x)
        else:
            self._write(tile, x)
        return part

    def _from_pixels(self, tile: PatchTile, layers: int, rotation: rope.Rotation) -> Tensor:
        """A tile's state after some layers, from its pixels and what the cores held ready."""
        model = self.model
        shape = (tile.height, tile.width)
        pixels = tile_pixels(self.picture, model.config, (tile.row, tile.column), shape)
        x = model.patch_embed(pixels.to(model.device, model.dtype)).flatten(2).transpose(1, 2)
        x = x if tile.kept is None else x[:, tile.kept.to(x.device)]
        for number, layer in enumerate(self.journal.layers[:layers], start=1):
            x = self._block(number).read(x, layer.keys, layer.values, rotation)
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


def _states(estimated: Estimate, tiles: list[PatchTile], model: Veca, folder: Path | None) -> States:
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
    most = max(tile.patches for tile in tiles)
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
