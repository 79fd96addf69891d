"""The cache: what is in it, how it stays below its limit, and how it is emptied."""

from __future__ import annotations

import os
import time

import pytest

from veca._util.cache import (
    cache_entries,
    cache_folder,
    cache_limit,
    mark_used,
    remove_entry,
    shrink_cache,
)
from veca._util.numbers import gigabytes, parse_bytes
from veca.cli.main import main
from veca.errors import InputError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Three entries of 1,000 bytes, used 30, 20 and 10 hours ago, and weights of the user's."""
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    now = time.time()
    for name, hours in (("probe/a", 30), ("probe/b", 20), ("index/c.npz", 10)):
        path = cache_folder() / name
        file = path if path.suffix else path / "part.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(1000))
        for one in {file, path}:
            os.utime(one, (now - hours * 3600,) * 2)
    (cache_folder() / "my-weights").mkdir()
    (cache_folder() / "my-weights" / "model.safetensors").write_bytes(bytes(5000))
    return cache_folder()


def names():
    return [entry.path.name for entry in cache_entries()]


def test_entries_are_those_that_can_be_made_again(cache):
    assert names() == ["a", "b", "c.npz"]
    assert [entry.bytes for entry in cache_entries()] == [1000] * 3
    assert [entry.path.name for entry in cache_entries("index")] == ["c.npz"]


def test_what_was_not_used_for_longest_goes_first(cache, monkeypatch):
    monkeypatch.setenv("VECA_CACHE_LIMIT", "2kB")
    mark_used(cache / "probe" / "a")
    assert [entry.path.name for entry in shrink_cache()] == ["b"]
    assert names() == ["c.npz", "a"]


def test_what_is_in_use_stays(cache):
    for name in ("a", "b"):
        mark_used(cache / "probe" / name)
    assert [e.path.name for e in shrink_cache(500, keep=[cache / "probe" / "a"])] == ["c.npz", "b"]
    assert names() == ["a"]


def test_what_was_used_a_moment_ago_stays_whatever_the_limit(cache, monkeypatch):
    monkeypatch.setenv("VECA_CACHE_LIMIT", "1")
    mark_used(cache / "probe" / "a")
    shrink_cache()
    assert names() == ["a"]


def test_an_entry_that_is_gone_is_no_error(cache):
    (entry, *_) = cache_entries()
    remove_entry(entry)
    remove_entry(entry)
    assert names() == ["b", "c.npz"]


def test_the_limit_is_the_users(monkeypatch):
    monkeypatch.delenv("VECA_CACHE_LIMIT", raising=False)
    assert cache_limit() == 50 * 10**9
    monkeypatch.setenv("VECA_CACHE_LIMIT", "1.5GiB")
    assert cache_limit() == 3 * 2**29
    monkeypatch.setenv("VECA_CACHE_LIMIT", "much")
    with pytest.raises(InputError, match="VECA_CACHE_LIMIT"):
        cache_limit()


def test_the_command_shows_and_clears(cache, capsys):
    assert main(["cache"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 kB of at most 50 GB in" in said and str(cache) in said
    assert "probe features for probes 2 2 kB" in said
    assert main(["cache", "--shrink", "2.5kB"]) == 0
    assert "removed 1 entry, 1 kB" in capsys.readouterr().out and names() == ["b", "c.npz"]
    assert main(["cache", "--clear", "probe"]) == 0
    assert names() == ["c.npz"]
    assert main(["cache", "--clear", "all"]) == 0
    assert names() == [] and (cache / "my-weights" / "model.safetensors").is_file()
    assert main(["cache", "--clear", "weights"]) == 2
    assert "'weights'" in capsys.readouterr().err


def test_sizes_as_people_write_and_read_them():
    shown = [gigabytes(n) for n in (0, 999, 1500, 12_345_678, 340e6, 12.34e9, 2e12)]
    assert shown == ["0 bytes", "999 bytes", "1.5 kB", "12.3 MB", "340 MB", "12.3 GB", "2 TB"]
    assert parse_bytes("0", least=0) == 0
    with pytest.raises(InputError, match="0"):
        parse_bytes("0")
