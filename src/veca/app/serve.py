"""Running the page: on this machine alone unless told otherwise, with nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from veca._util.extras import require
from veca.app.content import Limits
from veca.app.handlers import Handlers
from veca.app.model_cache import ModelCache
from veca.app.page import CSS, build_page
from veca.errors import InputError

LOCAL = "127.0.0.1"
_VISITORS = 32  # whose photos are kept; the longest unseen is forgotten first


@contextlib.contextmanager
def running(
    weights: Sequence[str] = (),
    *,
    host: str = LOCAL,
    port: int | None = None,
    device: torch.device | str = "cpu",
    limits: Limits | None = None,
) -> Iterator[str]:
    """Serve the page until the block ends; gives its address.

    Everything the page writes goes into a temporary folder, removed at the end. No request leaves
    this machine: analytics, fonts from the web and share links are off.

    Args:
        weights: further weights to choose from: names, folders, files or hub ids. The first is
            loaded at once, so that a wrong name is told here.
        host: the address to listen on; the default is reachable from this machine only.
        port: by default the first free one from 7860.
    """
    limits = limits or Limits()
    with (
        tempfile.TemporaryDirectory(prefix="veca-demo-", ignore_cleanup_errors=True) as folder,
        _environment(folder),
    ):
        gr = require("gradio", "the demo")
        page = build_page(Handlers(ModelCache(weights, device), limits, folder))
        try:
            _, address, _ = page.queue(max_size=64, api_open=False).launch(
                server_name=host,
                server_port=port,
                share=False,
                quiet=True,
                inbrowser=False,
                prevent_thread_lock=True,
                show_error=False,
                footer_links=[],
                run_history=False,
                mcp_server=False,
                ssr_mode=False,
                pwa=False,
                enable_monitoring=False,
                max_file_size=limits.file_bytes,
                state_session_capacity=_VISITORS,
                theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
                css=CSS,
            )
        except OSError as error:
            where = host if port is None else f"{host}, port {port}"
            reason = str(error).splitlines()[0].rstrip(".")
            raise InputError(
                f"cannot serve on {where} ({reason}); choose another with --port or --host."
            ) from error
        try:
            yield address
        finally:
            page.close(verbose=False)


def serve(
    weights: Sequence[str] = (),
    *,
    host: str = LOCAL,
    port: int | None = None,
    device: torch.device | str = "cpu",
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page until interrupted or ended; `ready` is called with its address."""
    with running(weights, host=host, port=port, device=device) as address, _stop_signal() as stop:
        ready(address)
        with contextlib.suppress(KeyboardInterrupt):
            while not stop.wait(1):  # not for ever: some systems interrupt no endless wait
                pass


@contextlib.contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """An event that is set when the process is asked to end, so that it can clean up."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread hears of signals
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _environment(folder: str) -> Iterator[None]:
    """What gradio and its libraries read when imported or launched."""
    ours = {
        "GRADIO_TEMP_DIR": folder,
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MPLCONFIGDIR": folder,
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
