"""Time and memory of networks side by side, on this machine, against resolution and budget."""

from veca.bench.measure import (
    DENSE,
    DTYPES,
    Contender,
    Plan,
    Row,
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
    "Contender",
    "Machine",
    "Plan",
    "Row",
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
