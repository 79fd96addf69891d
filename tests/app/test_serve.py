"""Serving: only where asked, with nothing left behind."""

from __future__ import annotations

import importlib.util
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
        assert folder.name.startswith("veca-demo-")
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
def test_wrong_weights_are_told_before_anything_is_served():
    with pytest.raises(WeightsError, match="no-such-weights"), running(["./no-such-weights"]):
        pass
    assert not Path("./no-such-weights").exists()
