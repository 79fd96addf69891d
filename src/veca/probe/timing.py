"""What each row costs: counted interactions and FLOPs, and milliseconds measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from veca.bench import BenchPlan, take_turns
from veca.probe.backbone import Backbone, Compute
from veca.probe.protocol import Protocol


class RowCost(NamedTuple):
    compute: Compute
    ms: float | None
    """Median time of one image, resizing and normalising included; None: not measured."""
    spread_ms: float | None
    """Interquartile range."""


def costs(
    rows: Sequence[tuple[Backbone, tuple[int, int]]], protocol: Protocol, *, measure: bool = True
) -> list[RowCost]:
    """The cost of one image for each (backbone, pixels (height, width)); they take turns."""
    cell, timing = protocol.extract.cell, protocol.timing
    counted = [backbone.compute(size, cell) for backbone, size in rows]
    if not measure or not timing.repeats:
        return [RowCost(compute, None, None) for compute in counted]
    calls = {}
    for i, (backbone, size) in enumerate(rows):
        generator = torch.Generator().manual_seed(0)
        pixels = torch.rand(timing.batch, 3, *size, generator=generator).to(backbone.device)
        grid = backbone.grid_for(size, cell)
        calls[str(i)] = lambda b=backbone, p=pixels, g=grid: b.features(p, g)
    plan = BenchPlan(
        batch=timing.batch,
        device=str(rows[0][0].device),
        repeats=timing.repeats,
        seconds=timing.seconds,
        limit=timing.limit,
    )
    times = take_turns(calls, plan)
    found = []
    for i, compute in enumerate(counted):
        each = [ms / timing.batch for ms in times[str(i)]]
        spread = None
        if len(each) > 1:
            low, _, high = statistics.quantiles(each, n=4, method="inclusive")
            spread = high - low
        found.append(RowCost(compute, statistics.median(each), spread))
    return found
