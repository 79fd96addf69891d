"""Who is served next: a few at a time, client by client, so that none keeps the others out."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque

from veca.errors import InputError


class Turnstile:
    """Lets `inside` callers in at a time; the others wait, each client in a queue of its own.

    Clients take turns, so a newcomer waits for one caller of each other client, however many they
    sent. When `waiting` callers wait, a client that has nobody there may still send one.

    Args:
        each: callers of one client that may wait.
    """

    def __init__(self, inside: int = 2, waiting: int = 64, each: int = 48) -> None:
        self.waiting = waiting
        self.each = each
        self._free = inside
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, client: str) -> None:
        """Wait for a turn, which ends with `leave`. A caller that is cancelled no longer waits.

        Raises:
            InputError: too many wait.
        """
        if self._free:  # nobody waits while somebody could go in
            self._free -= 1
            return
        own = len(self._queues.get(client, ()))
        everybody = sum(map(len, self._queues.values()))
        if own >= self.each or everybody >= 4 * self.waiting or (own and everybody >= self.waiting):
            raise InputError("too many are waiting for this page; try again in a moment.")
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with contextlib.suppress(KeyError, ValueError):  # `leave` may have passed it over
                    self._queues[client].remove(turn)
            else:
                self.leave()  # the turn came in the moment the caller went away
            raise

    def leave(self) -> None:
        """Let the next one in."""
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            turn = queue.popleft() if queue else None
            self._queues.move_to_end(client)
            if not queue:
                del self._queues[client]
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._free += 1
