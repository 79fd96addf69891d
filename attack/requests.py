"""Requests to the demo that no page of ours sends: foreign names, other files, floods, slowness.

The server runs in this process at 127.0.0.1, and nothing is sent to any other address.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import veca
from attack.damage import JSON, mutate
from attack.files import model
from attack.pictures import photo
from attack.registry import Options, Report
from veca.app import guard, server

_SECONDS = 30.0
_SLOW = 100
"""Clients that send nothing."""
_FLOOD = 120
"""Events of one client at once."""


class Answer(NamedTuple):
    status: int
    """0: the connection was closed without an answer."""
    body: bytes


class Page:
    """The running demo."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        assert parts.hostname == "127.0.0.1" and parts.port is not None
        self.port = parts.port

    def ask(
        self,
        method: str = "GET",
        path: str = "/",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            given = {"Host": f"127.0.0.1:{self.port}", **(headers or {})}
            if body is not None and "Content-Length" not in given:
                given["Content-Length"] = str(len(body))
            for name, value in given.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())
        except (OSError, http.client.HTTPException):
            return Answer(0, b"")
        finally:
            connection.close()

    def event(self, content: object, headers: Mapping[str, str] | None = None) -> Answer:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = {"Content-Type": "application/json"}
        return self.ask("POST", "/gradio_api/run/predict", body, {**kind, **(headers or {})})

    def upload(self, data: bytes, headers: Mapping[str, str] | None = None) -> Answer:
        head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
        more = {"Content-Type": "multipart/form-data; boundary=x", **(headers or {})}
        return self.ask("POST", "/gradio_api/upload", head + data + b"\r\n--x--\r\n", more)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=_SECONDS)


Check = Callable[[Page, random.Random, Counter[str]], None]


class Fault(Exception):
    """An answer that must not be."""


def _refused(answer: Answer, counts: Counter[str], what: str) -> None:
    counts["requests"] += 1
    counts["refused"] += 400 <= answer.status < 500 or answer.status == 0
    if not (400 <= answer.status < 500 or answer.status == 0):
        raise Fault(f"{what} was answered with {answer.status}")


def _visited(page: Page, counts: Counter[str], when: str) -> None:
    """A plain visitor gets the page."""
    counts["requests"] += 1
    answer = page.ask()
    if answer.status != 200:
        raise Fault(f"{when} a visitor gets {answer.status}")
    counts["answered"] += 1


def names(page: Page, rng: random.Random, counts: Counter[str]) -> None:
    """Foreign Host, Origin and sites: DNS rebinding, and pages elsewhere."""
    hosts = ("evil.example", f"evil.example:{page.port}", "127.0.0.1:1", "", "localhost.evil", "*",
             "[::1", f"127.0.0.1:{page.port}@evil.example")  # fmt: skip
    for host in hosts:
        _refused(page.ask(headers={"Host": host}), counts, f"Host {host!r}")
    for origin in (
        "http://evil.example",
        "null",
        "https://127.0.0.1",
        "file://",
        "http://127.0.0.1",
    ):
        for ask in (lambda h: page.event(_event(), h), lambda h: page.upload(b"x", h)):
            _refused(ask({"Origin": origin}), counts, f"Origin {origin!r}")
    for site in ("cross-site", "same-site"):
        _refused(page.upload(b"x", {"Sec-Fetch-Site": site}), counts, site)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
               "Sec-WebSocket-Key": "x" * 16}  # fmt: skip
    _refused(page.ask(path="/queue/join", headers=upgrade), counts, "a WebSocket")
    _visited(page, counts, "after foreign names")


def files(page: Page, rng: random.Random, counts: Counter[str]) -> None:
    """Files that are not the page's, by path and by address."""
    with _trap() as (address, calls):
        paths = [f"/gradio_api/file={name}" for name in _foreign(address)]
        paths += [f"/gradio_api/proxy={address}", "/gradio_api/upload_progress?upload_id=x",
                  f"/gradio_api/file={address}%2f..%2f", "/gradio_api/heartbeat/x", "/docs",
                  "/gradio_api/queue/data?session_hash=x", "/static/../../../../etc/passwd",
                  "/gradio_api/info", "/gradio_api/startup-events"]  # fmt: skip
        for path in paths:
            answer = page.ask(path=path)
            if b"root:" in answer.body:
                raise Fault(f"{path} gave /etc/passwd away")
            _refused(answer, counts, path)
        for name in _foreign(address):
            named = {"path": name, "url": name, "meta": _META}
            for value in ({"path": name}, named, [{"url": name}]):
                event = {**_event(), "data": [value]}
                _refused(page.event(event), counts, f"FileData {value}")
        if calls:
            raise Fault(f"{len(calls)} addresses were fetched on a visitor's behalf")


def sizes(page: Page, rng: random.Random, counts: Counter[str]) -> None:
    """Bodies that are too long, of no or of another length, and images that are none."""
    _refused(page.upload(b"x", {"Content-Length": str(10**12)}), counts, "a vast upload")
    _refused(page.upload(bytes(26 * 2**20)), counts, "an upload of 26 MiB")
    _refused(page.event(b"[" * 70_000), counts, "a long event")
    _refused(page.event({**_event(), "session_hash": "x" * 10**5}), counts, "a long session")
    chunked = {"Transfer-Encoding": "chunked", "Content-Length": "3"}
    answer = page.ask("POST", "/gradio_api/upload", b"3\r\nabc\r\n0\r\n\r\n", chunked)
    _refused(answer, counts, "an upload in chunks")
    for data in (b"", b"\x89PNG\r\n\x1a\n" + bytes(99), _png()[:-30]):
        answer = page.upload(data)
        counts["requests"] += 1
        if answer.status not in (200, 400):  # whether it is an image is asked by the event
            raise Fault(f"an upload that is no image was answered with {answer.status}")
        counts["answered" if answer.status == 200 else "refused"] += 1
    _visited(page, counts, "after long bodies")


def events(page: Page, rng: random.Random, counts: Counter[str]) -> None:
    """Mutants of an event of the page: each gets an answer, and the page goes on."""
    whole = json.dumps(_real_event(page)).encode()
    for _ in range(counts.pop("count")):
        answer = page.event(mutate(whole, JSON, rng).data)
        counts["requests"] += 1
        counts["refused" if 400 <= answer.status < 500 else "answered"] += 1
        if answer.status in (0, 500) and b"error" not in answer.body:
            raise Fault(f"a mutant of an event was answered with {answer.status}")
    _visited(page, counts, "after mutants of events")


def flood(page: Page, rng: random.Random, counts: Counter[str]) -> None:
    """Many events of one client at once; then there is still an answer for a visitor."""
    event, answers = _real_event(page), []
    threads = [
        threading.Thread(target=lambda: answers.append(page.event(event).status))
        for _ in range(_FLOOD)
    ]
    for thread in threads:
        thread.start()
    _visited(page, counts, "during a flood")
    for thread in threads:
        thread.join()
    counts["requests"] += len(answers)
    counts["refused"] += sum(status in (0, 429) for status in answers)
    counts["answered"] += sum(status == 200 for status in answers)
    if not {0, 200, 429}.issuperset(answers) or 200 not in answers:
        raise Fault(f"a flood was answered with {Counter(answers)}")
    _visited(page, counts, "after a flood")


def slow(page: Page, rng: random.Random, counts: Counter[str]) -> None:
    """Clients that send nothing, or a byte now and then: dropped, and others are served."""
    lines = [page.connect() for _ in range(_SLOW)]
    try:
        for number, line in enumerate(lines):
            if number % 2:
                line.sendall(b"POST /gradio_api/upload HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-")
        _visited(page, counts, "beside slow clients")
        until = time.monotonic() + _SECONDS
        open_still = set(lines)
        while open_still and time.monotonic() < until:
            time.sleep(0.2)
            open_still = {line for line in open_still if not _closed(line)}
        counts["requests"] += len(lines)
        counts["refused"] += len(lines) - len(open_still)
        if open_still:
            raise Fault(f"{len(open_still)} of {len(lines)} idle clients were never dropped")
    finally:
        for line in lines:
            line.close()
    _visited(page, counts, "after slow clients")


CHECKS: Mapping[str, Check] = {
    "names": names, "files": files, "sizes": sizes, "events": events, "flood": flood, "slow": slow,
}  # fmt: skip
_META = {"_type": "gradio.FileData"}


def _event() -> dict[str, Any]:
    """As the page sends one; the server fills in what it remembers of the visit."""
    return {"data": ["weights", 128, 4, 2, 1, "norm", 1.0], "fn_index": 0, "session_hash": "abc",
            "event_data": None}  # fmt: skip


def _real_event(page: Page) -> dict[str, Any]:
    """A photo picked, which makes the model work: as the page itself would send it."""
    config = json.loads(page.ask(path="/config").body)
    made = [{**_event(), "fn_index": one["id"]} for one in config["dependencies"]]
    works = [event for event in made if page.event(event).status == 200]
    if not works:
        raise Fault("no event of the page itself is answered")
    return works[0]


def _foreign(address: str) -> list[str]:
    return ["/etc/passwd", "../../../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", address,
            f"{address}/a.png", "file:///etc/passwd", "/proc/self/environ", __file__,
            "//etc/passwd", "/etc/passwd%00.png", "~/.ssh/id_rsa"]  # fmt: skip


def _png() -> bytes:
    import io

    file = io.BytesIO()
    photo().save(file, "PNG")
    return file.getvalue()


@contextlib.contextmanager
def _trap() -> Iterator[tuple[str, list[Any]]]:
    """An address of this machine that nobody may ask."""
    calls: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    calls.append(listener.accept())

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", calls
        finally:
            over.set()
            thread.join()


def _closed(line: socket.socket) -> bool:
    line.settimeout(0.001)
    try:
        return line.recv(1024) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def demo(folder: Path) -> Iterator[Page]:
    """The page with small weights, and less patience than it has for people."""
    from veca.app.serve import running

    weights = veca.save(model(), folder / "weights")
    before = server.Connection.head_seconds, guard.BODY_SECONDS
    server.Connection.head_seconds, guard.BODY_SECONDS = 3.0, 3.0
    try:
        with running([str(weights)]) as address:
            yield Page(address)
    finally:
        server.Connection.head_seconds, guard.BODY_SECONDS = before


def checked(page: Page, what: str, seed: int, count: int) -> dict[str, Any]:
    """One row of the table."""
    counts: Counter[str] = Counter()
    if what == "events":
        counts["count"] = count
    fault = ""
    try:
        CHECKS[what](page, random.Random(f"{seed} {what}"), counts)
    except Fault as error:
        fault = str(error)
    numbers = {name: counts[name] for name in ("requests", "refused", "answered")}
    return {"check": what, **numbers, "faults": int(bool(fault)), "detail": fault}


def run(options: Options) -> Report:
    rows = []
    with tempfile.TemporaryDirectory() as folder, demo(Path(folder)) as page:
        for what in options.only or CHECKS:
            rows.append(checked(page, what, options.seed, options.count))
            print(rows[-1], flush=True)
            if options.is_over:
                break
    failed = [f"{row['check']}: {row['detail']}" for row in rows if row["faults"]]
    return Report(rows, failed, len(rows) == len(options.only or CHECKS))
