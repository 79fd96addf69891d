"""Memory that all who decode images share: a few large ones at a time, however many read.

What an image will take is known from its header. Who is about to decode one claims that much of the
room, and waits while others have it; an image larger than the room is decoded alone. So the memory
of a run is bounded, whatever the number of its reading threads or processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

ROOM_BYTES = 3 * 2**29
"""Of decoding in one run, together; an image that alone takes more is decoded alone."""

_UNIT = 4 * 2**20
"""What is claimed in; images that take less need no leave."""


class Room:
    """So many bytes, for the threads of this process or, made by `multiprocessing`, for several."""

    def __init__(self, nbytes: int = ROOM_BYTES, makers: Any = threading) -> None:
        self.units = max(1, nbytes // _UNIT)
        self._free = makers.Semaphore(self.units)
        # Who waits does so alone: two that hold half of the room each would wait for ever.
        self._turn = makers.Lock()

    def take(self, nbytes: int) -> int:
        """Wait for room; the units taken, for `give`."""
        wanted, taken = min(self.units, nbytes // _UNIT), 0
        if not wanted:
            return 0
        try:
            with self._turn:
                while taken < wanted:
                    self._free.acquire()
                    taken += 1
        except BaseException:
            self.give(taken)
            raise
        return taken

    def give(self, units: int) -> None:
        """Give back what `take` took."""
        for _ in range(units):
            self._free.release()


class _Claims(threading.local):
    """Of this thread."""

    inside = False
    """Whether it is in `one_by_one`."""
    taken: tuple[Room, int] | None = None


_room = Room()
_claims = _Claims()


def use_room(room: Room) -> None:
    """Share the room of other processes; a worker process calls this first."""
    global _room
    _room = room


def _renew() -> None:
    """In a forked child: another thread of the parent may have had the lock, and is not here."""
    global _room, _claims
    _room, _claims = Room(), _Claims()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Claim room for what the block decodes.

    The claim ends with the block or, in `one_by_one`, when the thread begins another image or
    leaves: what was decoded is still there, and is made smaller only after this.
    """
    _release()
    room = _room
    _claims.taken = (room, room.take(nbytes))
    try:
        yield
    finally:
        if not _claims.inside:
            _release()


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Around work of a thread that has one large image at a time."""
    outer, _claims.inside = _claims.inside, True
    try:
        yield
    finally:
        _claims.inside = outer
        if not outer:
            _release()


def _release() -> None:
    taken, _claims.taken = _claims.taken, None
    if taken is not None:
        taken[0].give(taken[1])
