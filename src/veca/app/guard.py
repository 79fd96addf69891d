"""What stands before gradio: who may ask, for what, how much, and when.

An ASGI application around gradio's. It refuses what does not come from the page itself, lets
through the few routes the page uses, takes uploads, and has visitors take turns. The page's events
are plain requests (`queue=False`): whoever goes away while waiting is forgotten at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from veca._util.extras import require
from veca.app.hosts import AllowedHosts, same_origin
from veca.app.turnstile import Turnstile
from veca.app.uploads import Uploads
from veca.errors import InputError

T = TypeVar("T")
Scope: TypeAlias = "MutableMapping[str, Any]"
Message: TypeAlias = "MutableMapping[str, Any]"
Receive: TypeAlias = "Callable[[], Awaitable[Message]]"
Send: TypeAlias = "Callable[[Message], Awaitable[None]]"
App: TypeAlias = "Callable[[Scope, Receive, Send], Awaitable[None]]"

_PAGES = re.compile(r"/|/config/?|/theme\.css|/gradio_api/theme\.css|/favicon\.ico|/manifest\.json"
                    r"|/(assets|static|svelte)/.+")  # fmt: skip
_FILE = "/gradio_api/file="
_UPLOAD = "/gradio_api/upload"
_RUN = re.compile(r"/gradio_api/run/\w+/?")
_SESSION = re.compile(r"\w{1,64}")

EVENT_BYTES = 64 * 2**10
"""Of what the page sends at a touch: the values of its controls."""
_FORM_BYTES = 16 * 2**10  # around the file of an upload
BODY_SECONDS = 60.0
"""Until all of a request has arrived."""
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"same-origin"),
]


class _Refused(Exception):
    """A request that is answered here."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Guard:
    """Gradio's application behind a guard.

    Args:
        names: the Hosts that the page answers to.
        folder: whose files, and no others, gradio may give out.
        file_bytes: of one upload.
    """

    def __init__(
        self, app: App, names: AllowedHosts, uploads: Uploads, folder: Path, file_bytes: int
    ) -> None:
        self.app = app
        self.names = names
        self.uploads = uploads
        self.folder = Path(os.path.realpath(folder))
        self.file_bytes = file_bytes
        self.turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # the page has no WebSockets
            return await send({"type": "websocket.close", "code": 1008})
        try:
            self._check_names(scope)
            await self._route(scope, receive, send)
        except _Refused as refused:
            await _answer(send, refused.status, {"error": str(refused)})
        except _Gone:
            pass

    def _check_names(self, scope: Scope) -> None:
        """Refuse a request that no page of ours sent."""
        hosts = _values(scope, b"host")
        forwarded = ",".join(_values(scope, b"x-forwarded-host"))
        names = [*hosts, *(name.strip() for name in forwarded.split(",") if forwarded)]
        for host in names:
            if not self.names.accept(host):
                raise _Refused(
                    403,
                    f"This page does not answer to the name {host[:100]!r}. Who runs it can allow "
                    "it: veca demo --allow-host NAME.",
                )
        if len(hosts) != 1:
            raise _Refused(400, "Expected one Host.")
        for origin in _values(scope, b"origin"):
            if not any(same_origin(origin, host) for host in names):
                raise _Refused(403, "Requests from other pages are refused.")
        # Browsers say where a request comes from even when it has no Origin, as that of an <img>.
        site, mode = _values(scope, b"sec-fetch-site"), _values(scope, b"sec-fetch-mode")
        visit = scope["method"] == "GET" and scope["path"] == "/" and mode == ["navigate"]
        if not visit and not {"same-origin", "none"}.issuperset(site):
            raise _Refused(403, "Requests from other pages are refused.")

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if method in ("GET", "HEAD") and path.startswith(_FILE):
            self._check_file(path.removeprefix(_FILE))
            await self.app(scope, receive, _with_headers(send))
        elif method in ("GET", "HEAD") and _PAGES.fullmatch(path):
            await self.app({**scope, "query_string": b""}, receive, _with_headers(send))
        elif method == "POST" and path == _UPLOAD:
            await self._upload(scope, receive, send)
        elif method == "POST" and _RUN.fullmatch(path):
            await self._event(scope, receive, send)
        else:
            raise _Refused(404, "Not found.")

    def _check_file(self, name: str) -> None:
        """Only what the page wrote itself: gradio would also fetch an address that is named."""
        if "\0" in name or not Path(os.path.realpath(name)).is_relative_to(self.folder):
            raise _Refused(403, "This is no file of this page.")

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Keep a file until the event that names it; the answer is its path, as gradio's would."""
        size = _length(scope, self.file_bytes + _FORM_BYTES)
        with _refusals(429), self.uploads.place(_client(scope), size) as path:
            await _in_time(self._store(scope, _limited(receive, size), path))
        await _answer(send, 200, [path])

    async def _store(self, scope: Scope, receive: Receive, path: str) -> None:
        faults = require("starlette.formparsers", "the demo").MultiPartException
        request = require("starlette.requests", "the demo").Request(scope, receive)
        try:
            async with request.form(max_files=1, max_fields=0) as form:
                file = form.get("files")
                if not getattr(file, "filename", ""):
                    raise _Refused(400, "Expected one file.")
                await asyncio.to_thread(self.uploads.write, path, file.filename, file.file)
        except faults as error:
            raise _Refused(400, "Expected one file in a form.") from error

    async def _event(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the page's event through when its turn comes."""
        size = _length(scope, EVENT_BYTES)
        body = self._checked(await _in_time(_read(_limited(receive, size))))
        headers = [header for header in scope["headers"] if header[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % len(body)))
        client, waiting = _client(scope), iter([body])

        async def replay() -> Message:
            for content in waiting:
                return {"type": "http.request", "body": content, "more_body": False}
            return await receive()

        turn = asyncio.ensure_future(self.turnstile.enter(client))
        gone = asyncio.ensure_future(_disconnected(receive))
        await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not turn.done():
            turn.cancel()
            raise _Gone
        with _refusals(429):
            turn.result()
        try:
            await self.app({**scope, "headers": headers}, replay, _with_headers(send))
        finally:
            self.turnstile.leave()

    def _checked(self, body: bytes) -> bytes:
        """An event with nothing in it but what the page sends."""
        try:
            event = json.loads(body)
            index = (event.get("event_data") or {}).get("index")
            pixel = isinstance(index, list) and len(index) == 2 and all(map(_is_whole, index))
            if not _SESSION.fullmatch(event["session_hash"]) or not _is_whole(event["fn_index"]):
                raise ValueError
            if not (index is None or _is_whole(index) or pixel):
                raise ValueError
            if not isinstance(event["data"], list):
                raise ValueError
            checked = {
                "data": [self._without_foreign_files(value) for value in event["data"]],
                "fn_index": event["fn_index"],
                "session_hash": event["session_hash"],
                "event_data": None if index is None else {"index": index, "value": None},
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _Refused(400, "Expected an event of the page.") from error
        return json.dumps(checked).encode()

    def _without_foreign_files(self, value: Any) -> Any:
        """A value in which files, by path or address, are uploads of this server, and no more."""
        if isinstance(value, list):
            return [self._without_foreign_files(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("path") not in self.uploads:
            raise _Refused(403, "This file was not uploaded here.")
        return {"path": value["path"], "meta": {"_type": "gradio.FileData"}}


class _Gone(Exception):
    """The client went away."""


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _in_time(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await asyncio.wait_for(work, BODY_SECONDS)
    except asyncio.TimeoutError as error:
        raise _Refused(408, "This took too long to arrive.") from error


@contextlib.contextmanager
def _refusals(status: int) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise _Refused(status, str(error)) from error


def _limited(receive: Receive, most: int) -> Receive:
    """`receive` of a body of at most `most` bytes."""
    left = most

    async def limited() -> Message:
        nonlocal left
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        left -= len(message.get("body", b""))
        if left < 0:
            raise _Refused(413, "This is more than was announced.")
        return message

    return limited


def _length(scope: Scope, most: int) -> int:
    """The announced length of a body."""
    announced = _values(scope, b"content-length")
    if len(announced) != 1 or not announced[0].isdecimal():
        raise _Refused(411, "Expected a Content-Length.")
    if len(announced[0]) > 12 or int(announced[0]) > most:
        raise _Refused(413, f"This is more than the {most:,} bytes that are taken.")
    return int(announced[0])


def _client(scope: Scope) -> str:
    """Whose request it is: an address, or the network of one in IPv6."""
    return client_of((scope.get("client") or ("", 0))[0])


def client_of(address: str) -> str:
    """The client that an address belongs to: of IPv6 one has a whole /64."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 6 and not parsed.is_loopback and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _with_headers(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *_HEADERS]
        await send(message)

    return with_headers


async def _answer(send: Send, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
        *_HEADERS,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
