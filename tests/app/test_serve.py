"""Serving: only where asked, with nothing left behind."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from veca.app.serve import _stop_signal, running
from veca.cli.demo import demo
from veca.errors import InputError, MissingExtraError, WeightsError

JSON = {"Content-Type": "application/json"}
needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="gradio is not installed (extra demo)"
)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(MissingExtraError, match=r"\[demo\]"), running():
        pass
    app = typer.Typer()
    app.command()(demo)
    result = CliRunner().invoke(app, ["--no-browser"])
    assert isinstance(result.exception, MissingExtraError)


@pytest.mark.slow
@needs_gradio
def test_it_listens_on_this_machine_alone_and_cleans_up(weights, monkeypatch, tmp_path):
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    for folder in (home, temporary):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(home)
    before = dict(os.environ)
    look_up, hosts = socket.getaddrinfo, set()

    def recorded(host, *args, **options):
        hosts.add(host)
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", recorded)
    with running([weights]) as address:
        assert address.startswith("http://127.0.0.1:")
        (folder,) = temporary.iterdir()
        assert folder.name.startswith("veca-demo-run-")
        page = urllib.request.urlopen(address, timeout=30).read().decode()
        assert "VECA" in page
        port = int(address.rstrip("/").rpartition(":")[2])
        with socket.socket() as other:  # nobody listens on the machine's other addresses
            other.bind(("127.0.0.2", port))
        with pytest.raises(InputError, match=f"port {port}"), running([weights], port=port):
            pass
    assert hosts <= {"127.0.0.1", "localhost", None}  # no name of any other machine was looked up
    assert dict(os.environ) == before
    assert list(temporary.iterdir()) == [] and list(home.iterdir()) == []


def test_being_asked_to_end_is_heard():
    before = signal.getsignal(signal.SIGTERM)
    with _stop_signal() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)
    assert signal.getsignal(signal.SIGTERM) is before


@needs_gradio
@pytest.mark.slow
def test_wrong_weights_are_told_before_anything_is_served():
    with pytest.raises(WeightsError, match="no-such-weights"), running(["./no-such-weights"]):
        pass
    assert not Path("./no-such-weights").exists()


@pytest.fixture
def page(weights):
    """(host, port) of a running page."""
    with running([weights]) as address:
        yield address.removeprefix("http://").rstrip("/").split(":")


def _ask(page, method, path, body=None, headers=None):
    """Status and body of an answer."""
    connection = http.client.HTTPConnection(page[0], int(page[1]), timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.slow
@needs_gradio
def test_a_running_page_is_closed_to_strangers(page, noise, tmp_path):
    """The whole way through gradio: what the page does works, the rest is refused."""
    config = json.loads(_ask(page, "GET", "/config")[1])
    names = [c["props"].get("elem_id") for c in config["components"]]
    assert "cores" in names and not config["connect_heartbeat"]
    for host in ("evil.example", f"evil.example:{page[1]}"):
        assert _ask(page, "GET", "/config", headers={"Host": host})[0] == 403
        assert _ask(page, "POST", "/gradio_api/upload", b"x", {"Host": host})[0] == 403
    assert _ask(page, "GET", "/", headers={"Host": f"localhost:{page[1]}"})[0] == 200

    noise().save(tmp_path / "photo.png")
    form = b'--b\r\nContent-Disposition: form-data; name="files"; filename="sent.png"\r\n\r\n'
    form += (tmp_path / "photo.png").read_bytes() + b"\r\n--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    assert _ask(page, "POST", "/gradio_api/upload", form, {**headers, "Origin": "null"})[0] == 403
    code, answer = _ask(page, "POST", "/gradio_api/upload", form, headers)
    (path,) = json.loads(answer)
    assert code == 200

    upload = next(c["id"] for c in config["components"] if c["props"].get("elem_id") == "upload")
    event = next(d for d in config["dependencies"] if [upload, "upload"] in d["targets"])

    def send(file):
        data = ["weights", 64, 4, 3, 1, "norm", 1, file]
        body = {"data": data, "fn_index": event["id"], "session_hash": "abc"}
        return _ask(page, "POST", "/gradio_api/run/predict", json.dumps(body), JSON)

    fetched = []
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        stranger.settimeout(0.5)
        url = f"http://127.0.0.1:{stranger.getsockname()[1]}/x.png"
        for named in (url, "/etc/passwd", str(tmp_path / "photo.png"), "file:///etc/passwd"):
            file = {"path": named, "url": url, "meta": {"_type": "gradio.FileData"}}
            assert send(file)[0] == 403, named
            assert _ask(page, "GET", f"/gradio_api/file={named}")[0] == 403, named
        with pytest.raises(TimeoutError):
            fetched.append(stranger.accept())
    assert fetched == []

    code, answer = send({"path": path, "url": url, "meta": {"_type": "gradio.FileData"}})
    assert code == 200 and "sent at 64 x 96" in answer.decode()
    assert not Path(path).exists()  # only the shrunk photo is kept
    assert send({"path": path})[0] == 403
