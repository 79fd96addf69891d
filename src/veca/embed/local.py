"""One machine: worker processes decode, a few threads compute, one thread writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from veca._util.threads import lanes_for
from veca.data import pool
from veca.data.sources import ImageSource
from veca.embed.plan import Plan, Shard
from veca.embed.settings import Settings
from veca.embed.shards import Compute, Results, embed_shards
from veca.embed.writers.parquet import ShardRecord
from veca.model import Veca


def run(
    shards: Sequence[Shard],
    plan: Plan,
    source: ImageSource,
    model: Veca,
    settings: Settings,
    folder: Path,
    *,
    workers: int | None,
    threads: int | None,
    on_images: Callable[[int], None],
) -> Iterator[ShardRecord]:
    """Work through `shards`; yields each when it is on the disk."""
    workers = pool.default_workers() if workers is None else workers

    def decoding(function: Callable[[Any], Any], jobs: Iterable[Any]) -> Results:
        yield from pool.ordered_map(function, jobs, workers)

    return embed_shards(
        shards,
        plan,
        source,
        Compute(model, settings),
        settings,
        folder,
        ordered_map=decoding,
        lanes=lanes_for(next(model.parameters()).device, threads),
        on_images=on_images,
    )
