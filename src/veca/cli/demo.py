"""`veca demo`: the live page in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from veca.cli.common import AutoPrecision, Device, Threads, console, pick_device, say


def demo(
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="Weights to choose from: a name, a folder, a file or a hub id. Give it again for "
            "more; those on this machine are there anyway.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. 0.0.0.0 lets other machines in, by any of this machine's "
            "addresses or its name."
        ),
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name that browsers may ask for: NAME, with any port, or NAME:PORT, as "
            "behind a proxy or a forwarded port. Give it again for more. Requests under other "
            "names are refused.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, show_default="the first free one from 7860")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    precision: AutoPrecision = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """A local page: drop a photo, move the budget, see features, attention and cost change.

    Stop it with Ctrl-C. Needs the extra `demo`.
    """
    import ipaddress
    import webbrowser

    import torch

    from veca.app.serve import serve
    from veca.precision import check_precision, expected

    place = pick_device(device)
    if check_precision(precision, "auto") == "auto":
        say(f"precision auto: most likely {': '.join(expected(place))}")
    if threads is not None:
        torch.set_num_threads(threads)

    def ready(address: str) -> None:
        console.print(f"VECA is at {address} (Ctrl-C stops it)", markup=False, soft_wrap=True)
        try:
            local = ipaddress.ip_address(host).is_loopback
        except ValueError:
            local = host == "localhost"
        if not local:
            console.print(
                f"Listening on {host}: anyone who can reach this machine can use the page.",
                style="yellow",
            )
        if browser:
            webbrowser.open(address)

    with console.status("starting") as status:

        def started(address: str) -> None:
            status.stop()
            ready(address)

        serve(
            weights or (),
            host=host,
            port=port,
            allow_hosts=allow_host or (),
            device=place,
            precision=precision,
            ready=started,
        )
