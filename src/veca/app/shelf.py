"""The weights that visitors can choose: loaded when first asked for, used by one at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from veca.dense import DenseVit
from veca.errors import WeightsError, suggest
from veca.model import Veca
from veca.viz.source import DEFAULT_WEIGHTS, fresh_model, is_fresh
from veca.weights import available, load

FRESH_NAME = "fresh tiny weights (random)"
_LOADED = 2  # models kept in memory


@dataclass
class Entry:
    """Loaded weights."""

    name: str
    model: Veca
    fresh: bool
    dense: DenseVit
    """The yardstick of the same size, with fresh weights: only its time is looked at."""
    dense_ms: dict[tuple[int, int], float] = field(default_factory=dict)
    """Its measured time by (height, width) in pixels."""


class Shelf:
    """Weights by name: those given, those on this machine, and fresh ones that say so."""

    def __init__(self, given: Sequence[str] = (), device: torch.device | str = "cpu") -> None:
        self.device = device
        self.names = list(dict.fromkeys([*given, *available(), FRESH_NAME]))
        self._loaded: OrderedDict[str, Entry] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def default(self) -> str:
        return self.names[0]

    @contextmanager
    def use(self, name: str) -> Iterator[Entry]:
        """Loaded weights, for this caller alone until the block ends.

        One at a time also keeps measured times free of other visitors' work.
        """
        if name not in self.names:
            raise WeightsError(f"no weights are called {suggest(name, self.names)}")
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._load(name)
                while len(self._loaded) > _LOADED:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(name)
            yield self._loaded[name]

    def _load(self, name: str) -> Entry:
        if name == FRESH_NAME:
            model = fresh_model(DEFAULT_WEIGHTS).to(self.device)
        else:
            model = load(name, device=self.device)
        with torch.random.fork_rng(devices=[]):
            dense = DenseVit(model.config).to(self.device).eval()
        return Entry(name, model, is_fresh(model), dense)
