"""The weights that visitors can choose: loaded when first asked for, used by one at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from veca.dense import DenseVit
from veca.errors import WeightsError, suggest
from veca.model import Veca
from veca.precision import check_precision, choose, in_precision, recorded
from veca.viz.default_weights import DEFAULT_WEIGHTS, fresh_model, is_fresh
from veca.weights import available, load

FRESH_NAME = "fresh tiny weights (random)"
_LOADED = 2  # models kept in memory


@dataclass
class LoadedModel:
    """Loaded weights."""

    name: str
    model: Veca
    fresh: bool
    dense: DenseVit
    """The yardstick in the same size and precision, with fresh weights: for its time alone."""
    dense_ms: dict[tuple[int, int], float] = field(default_factory=dict)
    """Its measured time by (height, width) in pixels."""


class ModelCache:
    """Weights by name: those given, those on this machine, and fresh ones that say so.

    Of given paths only the last part is the name: visitors need not know the server's folders.
    """

    def __init__(
        self,
        given: Sequence[str] = (),
        device: torch.device | str = "cpu",
        precision: str = "fp32",
    ) -> None:
        self.device, self.precision = device, precision
        # The bundled ones first: they are what a slow machine can follow a slider with.
        here = sorted(available(), key=lambda name: name != DEFAULT_WEIGHTS)
        self._sources = _named([*given, *here])
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def names(self) -> list[str]:
        return [*self._sources, FRESH_NAME]

    @property
    def default(self) -> str:
        return self.names[0]

    @contextmanager
    def use(self, name: str) -> Iterator[LoadedModel]:
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

    def _load(self, name: str) -> LoadedModel:
        if name == FRESH_NAME:
            model = fresh_model(DEFAULT_WEIGHTS).to(self.device)
        else:
            model = load(self._sources[name], device=self.device)
        with torch.random.fork_rng(devices=[]):
            dense = DenseVit(model.config).to(self.device).eval()
        fresh, model = is_fresh(model), choose(model, self.precision).model
        dense = in_precision(dense, check_precision(recorded(model)))
        return LoadedModel(name, model, fresh, dense)


def _named(sources: Sequence[str]) -> dict[str, str]:
    """Sources, each once, under names that differ."""
    named: dict[str, str] = {}
    for source in dict.fromkeys(sources):
        name = unique = Path(source).expanduser().name if _is_path(source) else source
        number = 1
        while unique in named or unique == FRESH_NAME:
            number += 1
            unique = f"{name} ({number})"
        named[unique] = source
    return named


def _is_path(source: str) -> bool:
    path = Path(source).expanduser()
    return bool(path.name) and (path.is_absolute() or path.exists())
