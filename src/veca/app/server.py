"""The web server under the page: uvicorn, with patience that ends."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from veca.app.guard import App, client_of
from veca.errors import InputError

_FIRST_PORT, _PORTS = 7860, 100
_ALL_ADDRESSES = {"0.0.0.0": "localhost", "::": "localhost"}


class Connection(H11Protocol):
    """A connection that is dropped when the client keeps it open for nothing.

    Uvicorn waits for ever for the first request, for the end of one that trickles in, and for a
    client that does not read its answer.
    """

    head_seconds = 15.0  # until a request's headers are here, from the start or the last answer
    stalled_seconds = 30.0  # in which a client reads nothing of an answer
    look_seconds = 1.0
    most = 400
    most_of_a_client = 200

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._stalled_since = 0.0
        others = [c for c in self.connections if isinstance(c, Connection) and c is not self]
        own = sum(c._address() == self._address() for c in others)
        if len(others) >= self.most or own >= self.most_of_a_client:
            transport.abort()
            return
        self._watch = self.loop.call_later(self.look_seconds, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if hasattr(self, "_watch"):
            self._watch.cancel()

    def on_response_complete(self) -> None:
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._stalled_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_since, self._waits_since = 0.0, self.loop.time()
        super().resume_writing()

    def _look(self) -> None:
        now = self.loop.time()
        asked = self.cycle is not None and not self.cycle.response_complete
        if self._stalled_since:
            late = now - self._stalled_since > self.stalled_seconds
        else:
            late = not asked and now - self._waits_since > self.head_seconds
        if late:
            self.transport.abort()
        else:
            self._watch = self.loop.call_later(self.look_seconds, self._look)

    def _address(self) -> str:
        return client_of(self.client[0] if self.client else "")


def listen(host: str, port: int | None) -> socket.socket:
    """A socket on `host`, at `port` or at the first free one.

    Raises:
        InputError: there is none.
    """
    fault: OSError | None = None
    for candidate in [port] if port is not None else range(_FIRST_PORT, _FIRST_PORT + _PORTS):
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                host.strip("[]"), candidate, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind)
            try:
                if os.name == "posix":  # elsewhere this would share a port that is in use
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen()
            except OSError:
                listener.close()
                raise
            return listener
        except OSError as error:
            fault = error
    where = host if port is None else f"{host}, port {port}"
    raise InputError(
        f"cannot serve on {where} ({fault.strerror if fault else 'no port'}); choose another with "
        "--port or --host."
    ) from fault


def address_of(host: str, listener: socket.socket) -> str:
    """Where a browser on this machine finds the page."""
    name = _ALL_ADDRESSES.get(host, host).strip("[]")
    return f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}/"


@contextlib.contextmanager
def serving(app: App, listener: socket.socket) -> Iterator[None]:
    """Serve an application in a thread until the block ends."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Connection,
        ws="none",
        lifespan="on",
        log_level="error",
        proxy_headers=False,  # anybody could say whose request it is
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="veca-demo", daemon=True
    )
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        if not server.started:
            raise InputError("the page's server did not start; its messages above say why.")
        yield
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
