"""Time and memory of networks side by side, on this machine, against resolution and budget."""

import warnings
from typing import Any

from veca.bench.measure import (
    DENSE,
    DTYPES,
    BenchPlan,
    BenchRow,
    Contender,
    bench,
    check,
    contenders_for,
    find_model,
    race,
    take_turns,
)
from veca.bench.report import (
    Machine,
    by_contender,
    machine,
    plot,
    scaling_exponent,
    scaling_sizes,
    write_csv,
)

__all__ = [
    "DENSE",
    "DTYPES",
    "BenchPlan",
    "BenchRow",
    "Contender",
    "Machine",
    "bench",
    "by_contender",
    "check",
    "contenders_for",
    "find_model",
    "machine",
    "plot",
    "race",
    "scaling_exponent",
    "scaling_sizes",
    "take_turns",
    "write_csv",
]

_RENAMED = {"Plan": BenchPlan, "Row": BenchRow}
"""What they were called in 0.1."""


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(
        f"veca.bench.{name} is called {new.__name__} now", DeprecationWarning, stacklevel=2
    )
    return new
