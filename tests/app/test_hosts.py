"""Which names a page answers to."""

from __future__ import annotations

import socket

import pytest

from veca.app.hosts import AllowedHosts, same_origin
from veca.errors import InputError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_a_local_page_answers_to_local_names_at_its_port(host):
    names = AllowedHosts(host, 7860)
    for good in ("127.0.0.1:7860", "localhost:7860", "LOCALHOST:7860", "[::1]:7860"):
        assert names.accept(good), good
    assert names.accept(f"[{host}]:7860" if ":" in host else f"{host}:7860")
    for bad in (
        "evil.example:7860",
        "evil.example",
        "localhost",
        "localhost:80",
        "localhost.evil.example:7860",
        "127.0.0.1.evil.example:7860",
        "127.0.0.1:7861",
        "192.168.1.5:7860",
        "0.0.0.0:7860",
        "user@127.0.0.1:7860",
        "127.0.0.1:7860/",
        "127.0.0.1:7860 evil.example",
        "",
        ":7860",
    ):
        assert not names.accept(bad), bad


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_open_page_answers_to_addresses_and_the_machines_name(host):
    names = AllowedHosts(host, 7860)
    own = socket.gethostname().lower()
    for good in ("192.168.1.5:7860", "[fe80::1]:7860", "localhost:7860", f"{own}:7860"):
        assert names.accept(good), good
    for bad in ("evil.example:7860", "192.168.1.5", "192.168.1.5.evil.example:7860"):
        assert not names.accept(bad), bad


def test_a_page_on_one_address_answers_to_it_alone():
    names = AllowedHosts("192.168.1.5", 80)
    assert names.accept("192.168.1.5") and names.accept("192.168.1.5:80")
    assert not names.accept("192.168.1.6") and not names.accept("localhost")


def test_further_names_have_any_port_or_the_one_given():
    names = AllowedHosts("127.0.0.1", 7860, ["demo.example.org", "localhost:8000", "[fd00::1]:9"])
    for good in ("demo.example.org", "Demo.Example.org.:443", "localhost:8000", "[fd00::1]:9"):
        assert names.accept(good), good
    for bad in ("x.demo.example.org", "localhost:8001", "[fd00::1]:10"):
        assert not names.accept(bad), bad
    for wrong in ("https://demo.example.org", "demo.example.org/x", "", "a b"):
        with pytest.raises(InputError, match="allow-host"):
            AllowedHosts("127.0.0.1", 7860, [wrong])


def test_an_origin_is_that_of_the_host():
    assert same_origin("http://localhost:7860", "LOCALHOST:7860")
    assert same_origin("https://demo.example.org", "demo.example.org")
    assert same_origin("https://demo.example.org", "demo.example.org:443")
    for origin in ("null", "", "http://localhost:9999", "http://evil.example", "file://", "a://h"):
        assert not same_origin(origin, "localhost:7860"), origin
