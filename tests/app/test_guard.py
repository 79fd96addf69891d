"""What is let through to gradio, and what is not."""

from __future__ import annotations

import asyncio
import importlib.util
import json

import pytest

from veca.app import guard as guard_module
from veca.app.guard import EVENT_BYTES, Guard, client_of
from veca.app.hosts import AllowedHosts
from veca.app.uploads import Uploads

needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="gradio is not installed (extra demo)"
)
HOST = "127.0.0.1:7860"
RUN = "/gradio_api/run/predict"
UPLOAD = "/gradio_api/upload"
EVENT = {"data": [32, "norm"], "fn_index": 3, "session_hash": "abc123", "trigger_id": 7}


class Gradio:
    """Stands for gradio's application: remembers what it was asked."""

    def __init__(self):
        self.asked = []
        self.busy = None

    async def __call__(self, scope, receive, send):
        message = await receive() if scope["method"] == "POST" else {"body": b""}
        self.asked.append((scope["path"], scope["query_string"], message["body"]))
        if self.busy:
            await self.busy.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"gradio"})


@pytest.fixture
def gradio():
    return Gradio()


@pytest.fixture
def guard(gradio, tmp_path):
    (tmp_path / "uploads").mkdir()
    uploads = Uploads(tmp_path / "uploads", total=4000)
    return Guard(gradio, AllowedHosts("127.0.0.1", 7860), uploads, tmp_path, 1000)


async def request(guard, method="GET", path="/", body=b"", host=HOST, client="1.2.3.4", **headers):
    """Status, headers and body of an answer; with `body=None` the client goes away instead."""
    fields = [(b"host", host.encode())] if host is not None else []
    if body is not None and method == "POST":
        fields.append((b"content-length", str(len(body)).encode()))
    fields += [
        (key.replace("_", "-").encode(), str(value).encode()) for key, value in headers.items()
    ]
    scope = {
        "type": "http",
        "method": method,
        "path": path.partition("?")[0],
        "query_string": path.partition("?")[2].encode(),
        "headers": fields,
        "client": (client, 1),
    }
    chunks = [] if body is None else [body[:10], body[10:]]

    async def receive():
        if chunks:
            chunk = chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}
        if body is not None:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    await guard(scope, receive, send)
    if not sent:
        return None, {}, b""
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(m["body"] for m in sent[1:])


def ask(*arguments, **options):
    return asyncio.run(request(*arguments, **options))


def status(*arguments, **options):
    return ask(*arguments, **options)[0]


def post(guard, event, **options):
    return status(guard, "POST", RUN, json.dumps(event).encode(), **options)


def test_only_requests_under_our_names_are_answered(guard, gradio):
    assert status(guard) == 200
    for host in ("evil.example", "evil.example:7860", "127.0.0.1:1", None):
        assert status(guard, host=host) in (400, 403), host
        assert post(guard, EVENT, host=host) in (400, 403)
    assert status(guard, x_forwarded_host="evil.example") == 403
    assert status(guard, x_forwarded_host="localhost:7860, evil.example") == 403
    assert len(gradio.asked) == 1
    assert b"--allow-host" in ask(guard, host="evil.example")[2]


def test_requests_of_other_pages_are_refused(guard, gradio):
    own = {"origin": f"http://{HOST}", "sec_fetch_site": "same-origin"}
    assert post(guard, EVENT, **own) == 200
    asked = len(gradio.asked)
    for origin in ("null", "http://evil.example", "http://127.0.0.1:8000", "http://localhost:7860"):
        assert post(guard, EVENT, origin=origin) == 403, origin
        assert status(guard, "POST", UPLOAD, b"x", origin=origin) == 403, origin
        assert status(guard, "OPTIONS", RUN, origin=origin) == 403
    for site in ("cross-site", "same-site"):
        assert post(guard, EVENT, sec_fetch_site=site) == 403
        # As the address of an image, or in a frame; but a link to the page may be followed.
        assert status(guard, path="/config", sec_fetch_site=site, sec_fetch_mode="no-cors") == 403
        assert status(guard, path="/", sec_fetch_site=site, sec_fetch_mode="no-cors") == 403
        assert status(guard, path="/", sec_fetch_site=site, sec_fetch_mode="navigate") == 200
    assert len(gradio.asked) == asked + 2
    assert ask(guard)[1][b"x-frame-options"] == b"DENY"


def test_there_are_no_websockets(guard):
    sent = []

    async def play():
        async def send(message):
            sent.append(message)

        await guard({"type": "websocket", "headers": []}, None, send)

    asyncio.run(play())
    assert sent[0]["type"] == "websocket.close"


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/queue/join",
        "/gradio_api/queue/data",
        "/gradio_api/call/start",
        "/gradio_api/component_server",
        "/gradio_api/proxy=http://127.0.0.1/",
        "/gradio_api/process_recording",
        "/gradio_api/vibe-edit",
        "/gradio_api/heartbeat/abc",
        "/gradio_api/run/../upload",
        "/gradio_api/stream/x",
        "/monitoring/summary",
        "/login",
        "/docs",
        "//config",
    ],
)
def test_routes_that_the_page_does_not_use_are_closed(guard, gradio, path):
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
        assert status(guard, method, path, b"{}") == 404
    assert gradio.asked == []


def test_queries_that_the_page_does_not_use_are_dropped(guard, gradio):
    assert status(guard, path="/?deep_link=../../x&__theme=dark") == 200
    assert gradio.asked == [("/", b"", b"")]


def test_only_files_of_the_page_are_given_out(guard, gradio, tmp_path):
    (tmp_path / "a.png").write_text("x")
    outside = tmp_path.parent / "secret.txt"
    outside.write_text("x")
    (tmp_path / "link.png").symlink_to(outside)
    assert status(guard, path=f"/gradio_api/file={tmp_path}/a.png") == 200
    asked = len(gradio.asked)
    for name in (
        "/etc/passwd",
        f"{tmp_path}/../secret.txt",
        f"{tmp_path}/link.png",
        f"{tmp_path}x/a.png",
        "http://127.0.0.1:1/x",
        "https://example.org/x.png",
        "file:///etc/passwd",
        f"{tmp_path}/a\0.png",
        "",
    ):
        assert status(guard, path=f"/gradio_api/file={name}") == 403, name
    assert len(gradio.asked) == asked


def test_an_event_carries_what_the_page_sends_and_no_more(guard, gradio):
    event = {**EVENT, "event_data": {"index": [3, 4], "value": {"path": "/etc/passwd"}}, "x": 1}
    assert post(guard, event) == 200
    assert json.loads(gradio.asked[0][2]) == {
        "data": [32, "norm"],
        "fn_index": 3,
        "session_hash": "abc123",
        "event_data": {"index": [3, 4], "value": None},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"session_hash": None},
        {"session_hash": "../x"},
        {"session_hash": "a" * 65},
        {"fn_index": "3"},
        {"fn_index": None},
        {"data": {"a": 1}},
        {"data": None},
        {"event_data": {"index": {"a": 1}}},
        {"event_data": {"index": ["a", 1]}},
        {"event_data": 3},
    ],
)
def test_other_events_are_refused(guard, gradio, change):
    assert post(guard, {**EVENT, **change}) == 400
    assert gradio.asked == []


def test_events_that_are_no_json_or_too_long_are_refused(guard, gradio):
    for body in (b"", b"[1]", b"{", b"\xff", b"[" * 50_000, b'{"data": [' + b"[" * 30_000):
        assert status(guard, "POST", RUN, body) == 400, body[:20]
    assert status(guard, "POST", RUN, b"x" * (EVENT_BYTES + 1)) == 413
    assert status(guard, "POST", RUN, b"{}", content_length=1) == 411  # two of them
    for length in ("-1", "1e3", "9" * 20):
        assert status(guard, "POST", RUN, None, content_length=length) in (411, 413)
    assert status(guard, "POST", RUN, None) == 411
    assert gradio.asked == []


def test_more_than_was_announced_is_refused(guard, gradio):
    assert status(guard, "POST", RUN, None, content_length=5) is None  # went away
    body = json.dumps(EVENT).encode()

    async def play():
        scope_length = [(b"content-length", b"12"), (b"host", HOST.encode())]
        scope = {"type": "http", "method": "POST", "path": RUN, "query_string": b"",
                 "headers": scope_length, "client": ("1.2.3.4", 1)}  # fmt: skip
        sent = []

        async def receive():
            return {"type": "http.request", "body": body, "more_body": True}

        async def send(message):
            sent.append(message)

        await guard(scope, receive, send)
        return sent[0]["status"]

    assert asyncio.run(play()) == 413 and gradio.asked == []


def test_files_that_were_not_uploaded_here_are_refused(guard, gradio, tmp_path):
    """Gradio fetches an address in FileData, on the visitor's behalf."""
    for file in (
        {"path": "http://127.0.0.1:1/x.png", "meta": {"_type": "gradio.FileData"}},
        {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}},
        {"path": str(tmp_path / "uploads" / "guess")},
        {"path": ["/etc/passwd"]},
        {"url": "https://example.org/x.png"},
        {"a": [{"path": "/etc/passwd"}]},
        [{"path": "/etc/passwd"}],
    ):
        assert post(guard, {**EVENT, "data": [file]}) in (400, 403), file
    assert gradio.asked == []


def _form(content, name="a.jpg", field="files"):
    body = (
        f'--b\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n\r\n'
    ).encode()
    return body + content + b"\r\n--b--\r\n"


def send_file(guard, content, client="1.2.3.4", **options):
    return ask(
        guard, "POST", UPLOAD, _form(content, **options), client=client,
        content_type="multipart/form-data; boundary=b",
    )  # fmt: skip


@needs_gradio
def test_an_upload_is_kept_for_its_event(guard, gradio):
    code, _, body = send_file(guard, b"photo", name="../../holiday.jpg")
    (path,) = json.loads(body)
    assert code == 200 and path in guard.uploads
    file = {"path": path, "url": "http://evil.example/x", "orig_name": "x", "mime_type": "x"}
    assert post(guard, {**EVENT, "data": [file]}) == 200
    sent = json.loads(gradio.asked[0][2])["data"][0]
    assert sent == {"path": path, "meta": {"_type": "gradio.FileData"}}
    with guard.uploads.take(path) as (kept, name):
        assert kept.read_bytes() == b"photo" and name == "holiday.jpg"


@needs_gradio
def test_uploads_are_bounded(guard, tmp_path):
    assert send_file(guard, b"x" * 20_000)[0] == 413
    assert send_file(guard, b"x", field="other")[0] == 400
    assert status(guard, "POST", UPLOAD, b"x", content_type="text/plain") == 400
    assert status(guard, "POST", UPLOAD, b"x", content_type="multipart/form-data") == 400
    assert status(guard, "POST", UPLOAD, None) == 411
    two = _form(b"x")[:-7] + b"\r\n" + _form(b"y")
    form = {"content_type": "multipart/form-data; boundary=b"}
    assert status(guard, "POST", UPLOAD, two, **form) == 400
    assert status(guard, "POST", UPLOAD, None, content_length=500, **form) is None  # went away
    assert list((tmp_path / "uploads").iterdir()) == []
    codes = [send_file(guard, b"x" * 900)[0] for _ in range(4)]
    assert codes == [200, 200, 429, 429]  # half of 4000 bytes is for one client
    assert send_file(guard, b"x" * 900, client="5.6.7.8")[0] == 200


def test_a_body_that_trickles_in_is_given_up(guard, monkeypatch):
    monkeypatch.setattr(guard_module, "BODY_SECONDS", 0.05)

    async def play():
        headers = [(b"content-length", b"12"), (b"host", HOST.encode())]
        scope = {"type": "http", "method": "POST", "path": RUN, "query_string": b"",
                 "headers": headers, "client": ("1.2.3.4", 1)}  # fmt: skip
        sent = []

        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        await guard(scope, receive, send)
        return sent[0]["status"]

    assert asyncio.run(play()) == 408


def test_a_flood_of_one_client_keeps_no_other_out(guard, gradio):
    async def play():
        gradio.busy = asyncio.Event()
        body = json.dumps(EVENT).encode()

        def event(client):
            return asyncio.ensure_future(request(guard, "POST", RUN, body, client=client))

        flood = [event("6.6.6.6") for _ in range(100)]
        refused = []
        while len(refused) < 50:
            await asyncio.sleep(0.01)
            refused = [call.result()[0] for call in flood if call.done()]
        visitor = event("1.2.3.4")
        await asyncio.sleep(0.05)
        assert not visitor.done()
        gradio.busy.set()
        assert (await visitor)[0] == 200
        await asyncio.gather(*flood)
        return refused

    refused = asyncio.run(play())
    assert len(refused) == 100 - 2 - 48 and set(refused) == {429}


def test_who_goes_away_is_not_served(guard, gradio):
    async def play():
        gradio.busy = asyncio.Event()
        body = json.dumps(EVENT).encode()
        inside = [asyncio.ensure_future(request(guard, "POST", RUN, body)) for _ in range(2)]
        await asyncio.sleep(0.01)
        gone = asyncio.Event()
        headers = [(b"content-length", str(len(body)).encode()), (b"host", HOST.encode())]
        scope = {"type": "http", "method": "POST", "path": RUN, "query_string": b"",
                 "headers": headers, "client": ("9.9.9.9", 1)}  # fmt: skip
        chunks = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if chunks:
                return chunks.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        waiting = asyncio.ensure_future(guard(scope, receive, None))
        await asyncio.sleep(0.01)
        gone.set()
        await asyncio.wait_for(waiting, 1)
        gradio.busy.set()
        await asyncio.gather(*inside)
        assert (await request(guard, "POST", RUN, body))[0] == 200

    asyncio.run(play())
    assert len(gradio.asked) == 3


def test_a_client_is_an_address_or_a_network_of_one():
    assert client_of("1.2.3.4") != client_of("1.2.3.5")
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff") != client_of("2001:db8:1::1")
    assert client_of("::1") == "::1" and client_of("nobody") == "nobody"
