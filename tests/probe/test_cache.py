"""Cached parts are whole, checked, and found again."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from veca.probe import ProbeError
from veca.probe.cache import Entry, default_folder


def part(entry: Entry, number: int, seed: int = 0):
    random = np.random.default_rng([seed, number])
    rows = len(entry.members(number))
    return {"x": random.normal(size=(rows, 4)).astype(np.float16), "n": np.arange(rows)}


@pytest.fixture
def entry(tmp_path):
    made = Entry(tmp_path, {"weights": "abc"}, 10, 4)
    for number in made.parts:
        made.write(number, part(made, number))
    return made


def test_parts_and_members(entry):
    assert list(entry.parts) == [0, 1, 2]
    assert [len(entry.members(number)) for number in entry.parts] == [4, 4, 2]
    assert entry.missing() == []


def test_what_was_written_is_read(entry):
    for number in entry.parts:
        expected = part(entry, number)
        assert (entry.read(number, "x") == expected["x"]).all()
        assert (entry.read_rows(number, "x", 1, 2) == expected["x"][1:2]).all()


def test_another_run_finds_it_and_other_facts_do_not(entry, tmp_path):
    assert Entry(tmp_path, {"weights": "abc"}, 10, 4).missing() == []
    for other in (
        Entry(tmp_path, {"weights": "abd"}, 10, 4),
        Entry(tmp_path, {"weights": "abc"}, 11, 4),
        Entry(tmp_path, {"weights": "abc", "size": 1}, 10, 4),
    ):
        assert other.missing() == list(other.parts)


def test_the_entry_says_what_it_is(entry):
    facts = json.loads((entry.folder / "entry.json").read_text())
    assert facts["weights"] == "abc" and facts["count"] == 10


def damage_cut(path):
    os.truncate(path, path.stat().st_size // 2)


def damage_empty(path):
    path.write_bytes(b"")


def damage_bit(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def damage_swap(path):
    path.write_bytes((path.parent / "part-00000.safetensors").read_bytes())


def damage_garbage(path):
    path.write_bytes(b"not a file of tensors" * 10)


@pytest.mark.parametrize(
    "damage", [damage_cut, damage_empty, damage_bit, damage_swap, damage_garbage]
)
def test_damage_is_found(entry, tmp_path, damage):
    damage(entry.path(1))
    again = Entry(tmp_path, {"weights": "abc"}, 10, 4)
    assert again.missing() == [1]
    assert len(again.damaged) == 1 and "part-00001" in again.damaged[0]
    again.write(1, part(again, 1))
    assert Entry(tmp_path, {"weights": "abc"}, 10, 4).missing() == []


def test_a_missing_part(entry, tmp_path):
    entry.path(2).unlink()
    again = Entry(tmp_path, {"weights": "abc"}, 10, 4)
    assert again.missing() == [2] and not again.damaged


def test_a_crash_while_writing_leaves_nothing(entry, monkeypatch):
    before = sorted(p.name for p in entry.folder.iterdir())

    def crash(*_):
        raise RuntimeError("the power failed")

    monkeypatch.setattr("veca._util.files.os.replace", crash)
    with pytest.raises(RuntimeError):
        entry.write(1, part(entry, 1, seed=9))
    assert sorted(p.name for p in entry.folder.iterdir()) == before
    assert (entry.read(1, "x") == part(entry, 1)["x"]).all()


def test_reading_what_vanished(entry):
    fresh = Entry(entry.folder.parent, {"weights": "abc"}, 10, 4)
    entry.path(0).unlink()
    with pytest.raises(ProbeError, match="part-00000"):
        fresh.read(0, "x")


def test_many_parts_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("veca.probe.cache._OPEN_PARTS", 2)
    made = Entry(tmp_path, {}, 5, 1)
    for number in made.parts:
        made.write(number, part(made, number))
    for number in [0, 1, 2, 3, 4, 0, 4]:
        assert (made.read(number, "x") == part(made, number)["x"]).all()
    assert len(made._files) == 2


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VECA_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "probe"


def test_a_part_that_is_written_again_is_read_anew(tmp_path):
    entry = Entry(tmp_path, {"weights": "abc"}, 2, 4)
    for value in (1.0, 2.0):
        entry.write(0, {"x": np.full(2, value)})
        assert entry.read(0, "x").tolist() == [value, value]
