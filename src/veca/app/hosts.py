"""The names that a page answers to: the defence against DNS rebinding.

A web page elsewhere can make its own name lead to this machine, but it cannot make the browser
send another name than its own: so a request under a name that is not ours is not from our page.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from veca.errors import InputError

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:/@\\?#\[\]]+)(:(?P<port>[0-9]{1,5}))?")
_DEFAULT_PORTS = (":80", ":443")


class AllowedHosts:
    """Which Host a request may have, of a page that listens on `host` and `port`.

    On this machine alone: localhost, 127.0.0.1 and [::1], with the port. On all addresses
    (0.0.0.0 or ::): any numeric address, which no name server can forge, localhost and the
    machine's own name. On one address or name: that one.

    Args:
        more: further names, with any port, or with one: "demo.example.org", "localhost:8000".
    """

    def __init__(self, host: str, port: int, more: Sequence[str] = ()) -> None:
        self.port = port
        self.any_address = host in ("", "0.0.0.0", "::")
        address = _address(host)
        self.names = {host.strip("[]").lower()}
        if self.any_address or host == "localhost" or (address is not None and address.is_loopback):
            self.names |= {"localhost", "127.0.0.1", "::1"}
        if self.any_address:
            own = socket.gethostname().lower()
            self.names |= {own, own.partition(".")[0], f"{own.partition('.')[0]}.local"}
        self.more = [_parse(name) for name in more]
        for name, parsed in zip(more, self.more, strict=True):
            if parsed is None:
                raise InputError(
                    f"--allow-host takes a name, or name:port, as in a browser's address, got "
                    f"{name!r}; for example demo.example.org."
                )

    def accept(self, host: str) -> bool:
        """Whether a request with this Host is for us."""
        parsed = _parse(host)
        if parsed is None:
            return False
        name, port = parsed
        if (name, port) in self.more or (name, None) in self.more:
            return True
        ours = name in self.names or (self.any_address and _address(name) is not None)
        return ours and (port or 80) == self.port


def same_origin(origin: str, host: str) -> bool:
    """Whether an Origin ("http://name:port") is that of a page under `host`; "null" never is."""
    scheme, separator, place = origin.lower().partition("://")
    return bool(separator) and scheme in ("http", "https") and _bare(place) == _bare(host.lower())


def _bare(host: str) -> str:
    for port in _DEFAULT_PORTS:
        host = host.removesuffix(port)
    return host


def _parse(host: str) -> tuple[str, int | None] | None:
    """Name and port of a Host header; None if it is none."""
    match = _HOST.fullmatch(host.lower())
    if match is None:
        return None
    name = match["name"].strip("[]").removesuffix(".")
    return name, int(match["port"]) if match["port"] else None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
