"""Names that live elsewhere now: they still work, and warn."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose old `names` stand for others, here or elsewhere.

    >>> __getattr__ = moved(__name__, {"Row": "BenchRow", "search": "veca.embed.search"})
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        warnings.warn(f"{module}.{name} is called {new} now", DeprecationWarning, stacklevel=2)
        place, _, last = new.rpartition(".")
        return getattr(importlib.import_module(place or module), last)

    return find
