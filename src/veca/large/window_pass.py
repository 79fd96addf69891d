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
from veca.large.picture import Pixels
from veca.large.plan import PatchTile
from veca.large.work import Work
from veca.large.writers import Features


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
        for index, (features, cores) in self.tiles_through(
            journal.tiles, self._read, self._compute
        ):
            tile = self.tiles[index]
            self.write(tile, features)
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

    def _read(self, index: int) -> Pixels:
        return self.window(self._window(self.tiles[index]).seen)

    def _compute(self, index: int, read: Pixels) -> tuple[Features, Tensor]:
        """A tile's features, and those of its cores [1, C, D']."""
        tile = self.tiles[index]
        window = self._window(tile)
        if self.keep is not None:
            return self._merged(window, read)
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
            self.model, self.tokens(seen, read), rotation, tokens, raw, beside=beside
        )
        features = self.on_grid(seen, self.given(x)[0])[window.inside]
        return features, self.model.project(self.model.norm(tokens))

    def _merged(self, window: _Window, read: Pixels) -> tuple[Features, Tensor]:
        """By the model itself, which merges patches."""
        model = self.model
        run = model if self.projected else model.tokens
        out = run(self.pixels(read), self.budget, keep=self.keep)
        features = self.on_grid(window.seen, out.patches[0])[window.inside]
        return features, out.cores if self.projected else model.project(out.cores)

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


class OverviewPass(WindowPass):
    """Patches see the cores of an overview and no others, so nothing changes with the tiles."""

    def run(self, writer_resumed: bool) -> tuple[CoreMemory | None, Tensor]:
        _, cores = super().run(writer_resumed)
        return self.memory, cores

    def _read(self, index: int) -> Pixels:
        return self.window(self.tiles[index])

    def _compute(self, index: int, read: Pixels) -> tuple[Features, Tensor]:
        assert self.memory is not None
        tile = self.tiles[index]
        x, rotation = self.tokens(tile, read), self.rotation(tile)
        for number, (keys, values) in enumerate(
            zip(self.memory.keys, self.memory.values, strict=True), start=1
        ):
            x = layers.block_of(self.model, number).read(x, keys, values, rotation)
        return self.on_grid(tile, self.given(x)[0]), self.memory.cores
