"""The whole picture as one context: layer by layer, and in each layer tile by tile.

Patches see nothing but the cores, so a tile needs only its own pixels or state. The cores see all
patches; what they take from each tile is a few sums, an online softmax. So what is computed is the
plain forward, up to rounding, in the memory of one tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veca import rope
from veca.attention import PartialAttention, partial_attention
from veca.core_memory import CoreMemory, weights_stamp
from veca.large import layers
from veca.large.picture import Pixels
from veca.large.plan import PatchTile
from veca.large.states import States
from veca.large.work import Work
from veca.large.writers import Features


class ImagePass(Work):
    """Layer by layer: what the cores take from all tiles is what every tile then sees."""

    def __init__(self, *given: Any, states: States, **options: Any) -> None:
        super().__init__(*given, **options)
        self.states = states

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

    def run(self, writer_resumed: bool) -> tuple[CoreMemory | None, Tensor]:
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
        memory = CoreMemory(
            torch.stack([layer.keys for layer in journal.layers]),
            torch.stack([layer.values for layer in journal.layers]),
            model.project(model.norm(tokens)),
            raw.tanh(),
            self.grid,
            model.config.patch_size,
            weights_stamp(model),
        )
        return memory, memory.cores[0]

    def _layer(self, number: int) -> Tensor:
        """Every tile through one layer; the cores after it [1, C, D]."""
        start, journal = self.journal.layers[-1], self.journal
        queries = layers.core_queries(self.model, number, start)
        sums = journal.sums
        if sums is None:
            none = start.keys[:, :, :0]
            sums = partial_attention(queries, none, none).to(self.wide)
        before = (number - 1) * len(self.tiles)
        found = self.tiles_through(
            journal.tiles,
            lambda index: self._read(number, index),
            lambda index, read: self._compute(number, index, *read, queries),
        )
        for index, (x, part) in found:
            sums = sums.join(part.to(self.wide))
            if isinstance(x, Tensor):
                self.states.put(index, number, x)
            else:
                self.write(self.tiles[index], x)
            journal.add_tile(index + 1, sums)
            self.tell(before + index + 1, len(self.model.blocks) * len(self.tiles))
        own = partial_attention(queries, start.keys, start.values).to(self.wide)
        return layers.end(
            layers.block_of(self.model, number), start, self.ranks.join(sums).join(own)
        )

    def _read(self, number: int, index: int) -> tuple[Tensor | None, Pixels | None]:
        """A tile's state before a layer; or else its pixels."""
        x = self.states.get(index, number - 1) if number > 1 else None
        return x, self.window(self.tiles[index]) if x is None else None

    def _compute(
        self, number: int, index: int, x: Tensor | None, window: Pixels | None, queries: Tensor
    ) -> tuple[Tensor | Features, PartialAttention]:
        """A tile through one layer: its state, or after the last its features; and what the cores
        take from it."""
        tile, rotation = self.tiles[index], self.rotation(self.tiles[index])
        if x is None:
            assert window is not None
            x = self._from_pixels(tile, window, number - 1, rotation)
        start, block = self.journal.layers[-1], layers.block_of(self.model, number)
        x, part = layers.through(block, x, rotation, start, queries)
        if number < len(self.model.blocks):
            return x, part
        return self.on_grid(tile, self.given(x)[0]), part

    def _from_pixels(
        self, tile: PatchTile, window: Pixels, after: int, rotation: rope.Rotation
    ) -> Tensor:
        """A tile's state after some layers, from its pixels and what the cores held ready."""
        x = self.tokens(tile, window)
        for number, layer in enumerate(self.journal.layers[:after], start=1):
            x = layers.block_of(self.model, number).read(x, layer.keys, layer.values, rotation)
        return x
