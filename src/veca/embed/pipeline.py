"""Images on their way to the model: read ahead by threads, gathered by size, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from veca._util.threads import lanes_for, open_lanes
from veca.errors import ImageError, VecaError
from veca.images import Preprocessed

Result = TypeVar("Result")

# Decoded pixels held beside the batches that are being computed, at most about twice this: once
# read ahead, once waiting for others of their size. The images of a batch are held whatever their
# size.
HOLD_BYTES = 512 * 2**20


class Item(NamedTuple):
    """An image to be read."""

    place: int
    """In the order of the sources."""
    path: Path
    name: str
    """Its path relative to the root, with forward slashes."""


class Ready(NamedTuple):
    """An image that has been read."""

    item: Item
    image: Preprocessed


Reading: TypeAlias = "Preprocessed | ImageError | None"
"""An image, or why it cannot be read, or None: there is nothing to do."""


def read_ahead(
    items: Sequence[Item], read: Callable[[Item], Reading], *, workers: int, ahead: int
) -> Generator[tuple[Item, Reading], None, None]:
    """What `read` gives for each item, in order, up to `ahead` of them computed in advance."""
    waiting: deque[tuple[Item, Future[Reading]]] = deque()
    left = iter(items)
    with ThreadPoolExecutor(workers, "veca-read") as pool:
        try:
            while True:
                held = sum(_bytes(future.result()) for _, future in waiting if future.done())
                while len(waiting) < ahead and held < HOLD_BYTES:
                    item = next(left, None)
                    if item is None:
                        break
                    waiting.append((item, pool.submit(read, item)))
                if not waiting:
                    return
                item, future = waiting.popleft()
                yield item, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def gather(ready: Iterable[Ready], batch_size: int) -> Iterator[list[Ready]]:
    """Batches of one pixel size. When too many sizes wait for company, the largest group goes."""
    groups: dict[tuple[int, ...], list[Ready]] = {}
    for one in ready:
        shape = tuple(one.image.pixels.shape)
        groups.setdefault(shape, []).append(one)
        if len(groups[shape]) == batch_size:
            yield groups.pop(shape)
            continue
        waiting = [each for group in groups.values() for each in group]
        held = sum(_bytes(each.image) for each in waiting)
        if len(waiting) >= 4 * batch_size or held >= HOLD_BYTES:
            yield groups.pop(max(groups, key=lambda shape: len(groups[shape])))
    yield from groups.values()


def compute_all(
    batches: Iterable[list[Ready]],
    compute: Callable[[list[Ready]], Result],
    *,
    device: torch.device,
    expected: int,
) -> Generator[Result, None, None]:
    """What `compute` gives for each batch, in order; on a CPU several batches at a time.

    `expected` is about how many batches there are: if few, each gets more than one thread. What is
    computed when `batches` raises is given all the same.
    """
    threads = lanes_for(device)
    lanes = max(1, min(threads, expected))
    if device.type != "cpu" or lanes == 1:
        yield from map(compute, batches)
        return
    # A caller's autocast holds in its own thread only.
    autocast = partial(
        torch.autocast,
        "cpu",
        dtype=torch.get_autocast_dtype("cpu"),
        enabled=torch.is_autocast_enabled("cpu"),
    )

    def compute_in_lane(batch: list[Ready]) -> Result:
        with autocast():
            return compute(batch)

    waiting: deque[Future[Result]] = deque()
    with open_lanes(lanes, threads=threads // lanes) as pool:
        try:
            for batch in batches:
                waiting.append(pool.submit(compute_in_lane, batch))
                if len(waiting) > lanes:  # one more than there are lanes: none is ever idle
                    yield waiting.popleft().result()
        except VecaError:
            while waiting:
                yield waiting.popleft().result()
            raise
        while waiting:
            yield waiting.popleft().result()


def _bytes(reading: Reading) -> int:
    return reading.pixels.nbytes if isinstance(reading, Preprocessed) else 0
