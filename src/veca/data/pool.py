"""Work on many pieces in several processes, results in order."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from veca._util.room import Room, one_by_one, use_room
from veca.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 4  # pieces under way for each worker: none idles, and memory stays bounded

_work: Callable[[Any], Any]


def default_workers() -> int:
    """One for each CPU this process may use, shared among the ranks of this machine; at most 16."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(16, (usable or 1) // (int(ranks) if ranks.isdigit() and int(ranks) else 1)))


def ordered_map(
    function: Callable[[T], R], items: Iterable[T], workers: int
) -> Generator[R, None, None]:
    """`map`, in `workers` processes; with 0, in this one. `function` must be picklable.

    At most a few items per worker are taken ahead of the result that is waited for. Workers end
    with this process, however it ends.
    """
    if workers <= 0:
        yield from map(function, items)
        return
    # Forking shares what `function` holds; elsewhere than on Linux it is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(
        workers,
        mp_context=context,
        initializer=_begin,
        initargs=(function, os.getpid(), Room(makers=context)),
    )
    waiting: deque[Future[R]] = deque()
    queue = iter(items)
    try:
        while True:
            for item in itertools.islice(queue, _AHEAD * workers - len(waiting)):
                waiting.append(pool.submit(_call, item))
            if not waiting:
                return
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, perhaps for lack of memory; use fewer workers or free memory."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(function: Callable[[Any], Any], parent: int, room: Room) -> None:
    global _work
    _work = function
    use_room(room)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    """A parent that is killed cannot end its workers, and they would wait for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _call(item: Any) -> Any:
    with one_by_one():
        return _work(item)
