"""What every pass over tiles does, whatever the tiles see of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from veca import rope
from veca._util.threads import batches_at_once
from veca.core_memory import CoreMemory
from veca.embed.pipeline import compute_ahead, read_ahead
from veca.large import layers
from veca.large.journal import Journal
from veca.large.picture import Picture, Pixels, normalized, tile_window
from veca.large.plan import PatchTile
from veca.large.ranks import Ranks
from veca.large.writers import Features, Layout, TileWriter
from veca.large.writers.arrays import ArrayWriter
from veca.model import Veca

Found = TypeVar("Found")
Made = TypeVar("Made")


READ_AHEAD = 2
"""Tiles that wait to be computed, beside those that are."""


class Progress(Protocol):
    """Told after each tile of each layer how many are done, of how many."""

    def __call__(self, done: int, total: int) -> None: ...


class Work:
    """One pass under way; a subclass says what is computed of a tile."""

    def __init__(
        self,
        model: Veca,
        layout: Layout,
        tiles: Sequence[PatchTile],
        budget: int,
        journal: Journal,
        writer: TileWriter,
        progress: Progress | None,
        ranks: Ranks,
        *,
        projected: bool,
    ) -> None:
        self.model, self.layout, self.tiles, self.budget = model, layout, tiles, budget
        self.journal, self.writer, self.progress, self.ranks = journal, writer, progress, ranks
        self.projected = projected
        self.picture: Picture = layout.picture
        self.grid = layout.grid
        self.periods = layers.periods_of(model)
        # The sums of many tiles: in float64, which is nothing beside the tiles' own work.
        self.wide = torch.float32 if model.device.type == "mps" else torch.float64

    def run(self, writer_resumed: bool) -> tuple[CoreMemory | None, Tensor]:
        """The memory, where there is one of the whole picture, and the cores' features [C, D']."""
        raise NotImplementedError

    def begin_writer(self) -> bool:
        """Whether tiles that were written before are still there."""
        ranks, device = self.ranks, self.model.device
        there = False
        with ranks.together(device):
            if ranks.rank == 0:
                there = self.writer.begin(self.layout, self.journal.resumed)
        with ranks.together(device):  # the others find what the first has made
            if ranks.rank:
                self.writer.begin(self.layout, True)
        found = ranks.from_rank(0, torch.tensor(int(there), device=device))
        # In memory each rank has its own.
        return bool(found) and not isinstance(self.writer, ArrayWriter)

    def tiles_through(
        self, first: int, read: Callable[[int], Found], compute: Callable[[int, Found], Made]
    ) -> Iterator[tuple[int, Made]]:
        """What `compute` makes of what `read` gives for the tiles from `first` on, in order.

        One thread reads ahead, and on a CPU each of torch's threads computes a tile of its own; so
        what comes out does not depend on how many there are.
        """
        device = self.model.device

        def read_one(index: int) -> tuple[int, Found]:
            return index, read(index)

        @torch.no_grad()  # which holds in its own thread alone
        def compute_one(found: tuple[int, Found]) -> tuple[int, Made]:
            return found[0], compute(*found)

        at_once = batches_at_once(device)
        ahead = read_ahead(
            read_one, range(first, len(self.tiles)), workers=1, ahead=at_once + READ_AHEAD
        )
        threads = 1 if device.type == "cpu" else None
        yield from compute_ahead(compute_one, ahead, at_once=at_once, threads=threads)

    def window(self, tile: PatchTile) -> Pixels:
        """uint8 [h, w, 3]: a quarter of what is computed with, while it waits."""
        place, shape = (tile.row, tile.column), (tile.height, tile.width)
        return tile_window(self.picture, self.model.config.patch_size, place, shape)

    def pixels(self, window: Pixels) -> Tensor:
        return normalized(window, self.model.config).to(self.model.device, self.model.dtype)

    def tokens(self, tile: PatchTile, window: Pixels) -> Tensor:
        """The patches of a tile that are there, embedded [1, n, D]."""
        x = self.model.patch_embed(self.pixels(window)).flatten(2).transpose(1, 2)
        return x if tile.kept is None else x[:, tile.kept.to(x.device)]

    def rotation(self, tile: PatchTile) -> rope.Rotation:
        place, shape = (tile.row, tile.column), (tile.height, tile.width)
        xy = rope.region_coordinates(self.grid, place, shape, self.periods.device)
        xy = xy if tile.kept is None else xy[tile.kept.to(xy.device)]
        return rope.rotation(xy.unsqueeze(0), self.periods)

    def on_grid(self, tile: PatchTile, found: Tensor) -> Features:
        """What belongs to the patches of a tile that are there [n, D'] as [h, w, D'], else 0."""
        found = found.float().cpu()
        if tile.kept is not None:
            whole = found.new_zeros(tile.height * tile.width, found.shape[1])
            found = whole.index_copy(0, tile.kept, found)
        return found.view(tile.height, tile.width, -1).numpy()

    def write(self, tile: PatchTile, features: Features) -> None:
        self.writer.add(tile.row, tile.column, features)

    def given(self, x: Tensor) -> Tensor:
        """Features of tokens that went through all layers."""
        x = self.model.norm(x)
        return self.model.project(x) if self.projected else x

    def tell(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)
