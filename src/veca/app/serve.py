"""Running the page: on this machine alone unless told otherwise, with nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from veca._util.extras import require
from veca.app.content import Limits
from veca.app.folder import temporary_folder
from veca.app.guard import Guard
from veca.app.handlers import Handlers
from veca.app.hosts import AllowedHosts
from veca.app.model_cache import ModelCache
from veca.app.page import CSS, build_page
from veca.app.uploads import Uploads
from veca.app.visitors import Visitors

LOCAL = "127.0.0.1"
_SESSIONS = 256  # of which gradio remembers the sliders' ends


@contextlib.contextmanager
def running(
    weights: Sequence[str] = (),
    *,
    host: str = LOCAL,
    port: int | None = None,
    allow_hosts: Sequence[str] = (),
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    limits: Limits | None = None,
) -> Iterator[str]:
    """Serve the page until the block ends; gives its address.

    Everything the page writes goes into a temporary folder, removed at the end. No request leaves
    this machine: analytics, fonts from the web and share links are off, and no address that a
    visitor names is fetched.

    Args:
        weights: further weights to choose from: names, folders, files or hub ids. The first is
            loaded at once, so that a wrong name is told here.
        host: the address to listen on; the default is reachable from this machine only.
        port: by default the first free one from 7860.
        allow_hosts: names, beside the page's own (`veca.app.hosts.AllowedHosts`), under which
            browsers may ask for it: "demo.example.org", or "localhost:8000" of a forwarded port.
        precision: what models and the dense ViT compute in, as `veca.precision.choose` takes it.
    """
    limits = limits or Limits()
    with temporary_folder() as folder, _environment(str(folder)):
        require("gradio", "the demo")
        from veca.app.server import address_of, listen, serving

        with listen(host, port) as listener:
            names = AllowedHosts(host, listener.getsockname()[1], allow_hosts)
            uploads = Uploads(folder / "uploads")
            handlers = Handlers(ModelCache(weights, device, precision), limits, uploads, folder)
            app = _application(build_page(handlers, Visitors()), limits)
            with serving(Guard(app, names, uploads, folder, limits.file_bytes), listener):
                yield address_of(host, listener)


def _application(page: Any, limits: Limits) -> Any:
    """Gradio's web application, with everything off that the page has no need of."""
    gr = require("gradio", "the demo")
    page.state_session_capacity = _SESSIONS
    page.queue(api_open=False)
    app = gr.mount_gradio_app(
        require("fastapi", "the demo").FastAPI(openapi_url=None),
        page,
        path="",
        show_error=False,
        footer_links=[],
        run_history=False,
        mcp_server=False,
        ssr_mode=False,
        pwa=False,
        enable_monitoring=False,
        max_file_size=limits.file_bytes,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
        css=CSS,
    )
    page.has_launched = True  # or gradio would not check where files come from
    return app


def serve(
    weights: Sequence[str] = (),
    *,
    host: str = LOCAL,
    port: int | None = None,
    allow_hosts: Sequence[str] = (),
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page until interrupted or ended; `ready` is called with its address."""
    served = running(
        weights,
        host=host,
        port=port,
        allow_hosts=allow_hosts,
        device=device,
        precision=precision,
    )
    with served as address, _stop_signal() as stop:
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
