"""Time and memory of networks side by side, on this machine, against resolution and budget."""

from veca._util.machine import Machine, machine
from veca._util.moved import moved
from veca.bench.measure import (
    DENSE,
    DTYPES,
    BenchPlan,
    BenchRow,
    Contender,
    bench,
    check,
    check_shares,
    contenders_for,
    find_model,
    race,
    take_turns,
)
from veca.bench.report import (
    by_contender,
    plot,
    precisions,
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
    "check_shares",
    "contenders_for",
    "find_model",
    "machine",
    "plot",
    "precisions",
    "race",
    "scaling_exponent",
    "scaling_sizes",
    "take_turns",
    "write_csv",
]

# What they were called in 0.1.
__getattr__ = moved(__name__, {"Plan": "BenchPlan", "Row": "BenchRow"})
