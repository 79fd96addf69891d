"""Each tile as a picture of its own, or beside an overview of the whole picture.

One pass: a tile goes through all layers at once. Windows reach a few patches beyond their tile, so
that patches at its edge have neighbours on all sides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from veca import rope
from veca.attention import PartialAttention
from veca.core_memory import CoreMemory
from veca.large import layers
from veca.large.picture import tile_pixels
from veca.large.plan import PatchTile
from veca.large.work import Work


class _Window(NamedTuple):
    """A tile and what is seen around it."""

    seen: PatchTile
    inside: tuple[slice, slice]
    """Where the tile lies in it."""


class WindowPass(Work):
    """Cores of its own for each tile; with a memory, patches see those of an overview, too."""

    def __init__(
        self,
        *given: Any,
        halo: int,
        keep: float | None = None,
        memory: CoreMemory | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            halo: patches that a window reaches beyond its tile.
            keep: the share of patches that go on after merging.
            memory: of the overview.
        """
        super().__init__(*given, **options)
        self.halo, self.keep, self.memory = halo, keep, memory

    def run(self, writer_resumed: bool) -> tuple[CoreMemory | None, Tensor]:
        journal, total = self.journal, len(self.tiles)
        if not journal.layers:
            tokens, raw = layers.bank_of(self.model, self.budget)
            journal.begin_layer(layers.begin(self.model, 1, tokens, raw))
        elif not writer_resumed:
            journal.forget_tiles()
        sums = journal.sums or self._none()
        for index in range(journal.tiles, total):
            tile = self.tiles[index]
            cores = self._tile(tile)
            # The mean over patches of what their tiles' cores became.
            share = self._none()
            share = share._replace(total=share.total + tile.patches)
            sums = sums.join(share._replace(values=cores.to(self.wide)[None] * tile.patches))
            journal.add_tile(index + 1, sums)
            self.tell(index + 1, total)
        return None, self.ranks.join(sums).result()[0, 0]

    def _none(self) -> PartialAttention:
        """The sums of no tiles; nothing is weighed here, so the peak is 0 and stays it."""
        c = self.model.config
        zero = torch.zeros(1, 1, self.budget, dtype=self.wide, device=self.model.device)
        return PartialAttention(zero, zero, zero.new_zeros(1, 1, self.budget, c.feature_width))

    def _tile(self, tile: PatchTile) -> Tensor:
        """Compute and write a tile; its cores' features [1, C, D']."""
        window = self._window(tile)
        if self.keep is not None:
            return self._merged(tile, window)
        seen, shape = window.seen, (window.seen.height, window.seen.width)
        xy = rope.region_coordinates(shape, (0, 0), shape, self.periods.device)
        xy = xy if seen.kept is None else xy[seen.kept.to(xy.device)]
        rotation = rope.rotation(xy.unsqueeze(0), self.periods)
        beside = None
        if self.memory is not None:
            there = self.rotation(seen)
            beside = [
                layers.Beside(there, keys, values)
                for keys, values in zip(self.memory.keys, self.memory.values, strict=True)
            ]
        tokens, raw = layers.bank_of(self.model, self.budget)
        x, tokens, _ = layers.forward(
            self.model, self.tokens(seen), rotation, tokens, raw, beside=beside
        )
        self._write_inside(tile, window, self.given(x)[0])
        return self.model.project(self.model.norm(tokens))

    def _merged(self, tile: PatchTile, window: _Window) -> Tensor:
        """By the model itself, which merges patches."""
        model, seen = self.model, window.seen
        shape, at = (seen.height, seen.width), (seen.row, seen.column)
        pixels = tile_pixels(self.picture, model.config, at, shape)
        run = model if self.projected else model.tokens
        out = run(pixels.to(model.device, model.dtype), self.budget, keep=self.keep)
        self._write_inside(tile, window, out.patches[0])
        return out.cores if self.projected else model.project(out.cores)

    def _window(self, tile: PatchTile) -> _Window:
        (rows, columns), halo = self.grid, self.halo
        top, left = max(0, tile.row - halo), max(0, tile.column - halo)
        bottom = min(rows, tile.row + tile.height + halo)
        right = min(columns, tile.column + tile.width + halo)
        kept = None
        if self.layout.mask is not None:
            part = torch.from_numpy(self.layout.mask[top:bottom, left:right])
            kept = None if bool(part.all()) else part.flatten().nonzero().flatten()
        down, across = tile.row - top, tile.column - left
        inside = (slice(down, down + tile.height), slice(across, across + tile.width))
        return _Window(PatchTile(top, left, bottom - top, right - left, kept), inside)

    def _write_inside(self, tile: PatchTile, window: _Window, found: Tensor) -> None:
        """Write the tile's features out of its window's [n, D']."""
        seen, found = window.seen, found.float().cpu()
        if seen.kept is not None:
            whole = found.new_zeros(seen.height * seen.width, found.shape[1])
            found = whole.index_copy(0, seen.kept, found)
        features = found.view(seen.height, seen.width, -1)[window.inside]
        self.writer.add(tile.row, tile.column, features.numpy())


class OverviewPass(WindowPass):
    """Patches see the cores of an overview and no others, so nothing changes with the tiles."""

    def run(self, writer_resumed: bool) -> tuple[CoreMemory | None, Tensor]:
        _, cores = super().run(writer_resumed)
        return self.memory, cores

    def _tile(self, tile: PatchTile) -> Tensor:
        assert self.memory is not None
        x, rotation = self.tokens(tile), self.rotation(tile)
        for number, (keys, values) in enumerate(
            zip(self.memory.keys, self.memory.values, strict=True), start=1
        ):
            x = layers.block_of(self.model, number).read(x, keys, values, rotation)
        self.write(tile, x)
        return self.memory.cores
