"""What benchmarks share: graph timing side by side, the two ceilings, whole runs, and the CSV."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.rows import RESULTS, others, write_rows
from veca._util.cuda import side_stream
from veca._util.memory import peak_tensor_memory
from veca.bench import BenchPlan, machine, take_turns
from veca.data import InMemoryImages

if TYPE_CHECKING:
    from veca.distill import DistillConfig

Call = Callable[[], object]


def capture(calls: Sequence[Call]) -> Call:
    """Several calls as one CUDA graph: no launch overhead, and as many input sets as calls."""
    with side_stream():
        for call in calls:
            call()
        calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def time_side_by_side(
    contenders: Mapping[str, Call], *, seconds: float = 0.6, rounds: int = 5
) -> dict[str, float]:
    """Median milliseconds of each contender; they take turns, so that all share slow moments."""
    plan = BenchPlan(device="cuda", repeats=rounds, seconds=seconds * len(contenders))
    return {name: statistics.median(ms) for name, ms in take_turns(contenders, plan).items()}


def peak_memory(call: Call) -> float:
    """MiB that one call allocates at its peak, beyond what was there before."""
    call()
    return peak_tensor_memory(call, "cuda")[1] / 2**20


def copy_bandwidth() -> float:
    """TB/s of a large device-to-device copy, bytes read plus bytes written."""
    source = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    ms = time_side_by_side({"copy": lambda: target.copy_(source)}, seconds=0.3)["copy"]
    return 2 * source.numel() * 2 / ms / 1e9


def matmul_rate() -> float:
    """TFLOP/s of a large bfloat16 matrix product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ms = time_side_by_side({"matmul": lambda: a @ b}, seconds=0.3)["matmul"]
    return 2 * 8192**3 / ms / 1e9


def random_images(size: int, device: torch.device | str) -> InMemoryImages:
    """4,096 images of noise on the device, where only speed is measured."""
    pixels = torch.randint(0, 256, (4096, 3, size, size), dtype=torch.uint8, device=device)
    names = [f"random {i}" for i in range(len(pixels))]
    return InMemoryImages(
        pixels, np.arange(len(pixels)), names, mode="square", source_fingerprint="random"
    )


def distill_whole(config: DistillConfig, folder: str, **given: Any) -> None:
    """A run with all its steps; where someone stops it, the script ends instead of going on."""
    from veca.distill import distill

    if distill(config, folder, **given).stopped == "signal":
        raise SystemExit("stopped; the run that was under way is not in the results.")


def write_csv(
    name: str,
    rows: Sequence[Mapping[str, object]],
    folder: Path = RESULTS,
    *,
    device: str = "cuda",
    key: str = "",
) -> Path:
    """Rows with the facts of the machine that `device` is in beside them, as results/NAME.csv.

    With `key`, rows of the file in which that column has another value are kept, with their facts.
    """
    facts = asdict(machine(device))
    path = folder / f"{name}.csv"
    kept = others(path, key, rows) if key else []
    columns = [column for row in (*kept, *rows) for column in row if column not in facts]
    columns = [*dict.fromkeys(columns), *facts]
    cells = [{k: f"{v:.5g}" if isinstance(v, float) else v for k, v in r.items()} for r in rows]
    return write_rows(path, [*kept, *({**row, **facts} for row in cells)], columns)


def print_table(rows: Sequence[dict[str, object]]) -> None:
    """A short aligned table, the last thing a benchmark prints."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = [
        [f"{v:.4g}" if isinstance(v := row.get(c, ""), float) else str(v) for c in columns]
        for row in rows
    ]
    widths = [max(len(c), *(len(line[i]) for line in text)) for i, c in enumerate(columns)]
    for line in [columns, *text]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
