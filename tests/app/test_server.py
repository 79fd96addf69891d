"""Connections that are kept open for nothing are dropped."""

from __future__ import annotations

import importlib.util
import socket
import time

import pytest

from veca.errors import InputError

if importlib.util.find_spec("uvicorn") is None:
    pytest.skip("uvicorn is not installed (extra demo)", allow_module_level=True)

from veca.app.server import Connection, address_of, listen, serving


async def application(scope, receive, send):
    """Sends many bytes at /long, else a word."""
    if scope["type"] == "lifespan":
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})
        return
    body = b"x" * (64 * 2**20) if scope["path"] == "/long" else b"hello"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(Connection, "head_seconds", 1.0)
    monkeypatch.setattr(Connection, "stalled_seconds", 1.0)
    monkeypatch.setattr(Connection, "look_seconds", 0.1)
    with listen("127.0.0.1", 0) as listener:
        place = listener.getsockname()
        with serving(application, listener):
            yield place


def _closed(connection, seconds=20.0, feed=b""):
    """Whether the server closes a connection, to which a byte is sent now and then."""
    end = time.monotonic() + seconds
    connection.settimeout(0.1)
    while time.monotonic() < end:
        try:
            if feed:
                connection.sendall(feed)
            if not connection.recv(2**16):
                return True
        except TimeoutError:
            pass
        except OSError:
            return True
    return False


@pytest.mark.parametrize(
    ("sent", "feed"),
    [
        (b"", b""),  # nothing at all
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"a"),  # headers that trickle in
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b""),  # nothing after the first answer
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"G"),  # a second request that trickles in
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n",
            b"a",
        ),
    ],
)
@pytest.mark.slow
def test_idle_connections_are_dropped(address, sent, feed):
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        assert _closed(connection, feed=feed)


@pytest.mark.slow
def test_clients_that_do_not_read_are_dropped(address):
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(2.5)
        received = 0
        connection.settimeout(5)
        with pytest.raises(OSError):
            while True:
                chunk = connection.recv(2**16)
                received += len(chunk)
                if not chunk:
                    raise OSError
        assert received < 64 * 2**20


@pytest.mark.slow
def test_a_client_has_so_many_connections_and_no_more(address, monkeypatch):
    monkeypatch.setattr(Connection, "head_seconds", 30.0)
    monkeypatch.setattr(Connection, "most_of_a_client", 5)
    held = [socket.create_connection(address) for _ in range(9)]
    time.sleep(0.3)
    assert [_closed(connection, 0.3) for connection in held].count(True) == 4
    for connection in held:
        connection.close()


def test_busy_and_unknown_places_are_told():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert address_of("127.0.0.1", listener) == f"http://127.0.0.1:{port}/"
        assert address_of("0.0.0.0", listener) == f"http://localhost:{port}/"
        assert address_of("::1", listener) == f"http://[::1]:{port}/"
        with pytest.raises(InputError, match=f"port {port}"):
            listen("127.0.0.1", port)
    with pytest.raises(InputError, match="host"):
        listen("192.0.2.1", 0)  # an address of no machine
