"""The documents say what the results files say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_results_files(tables):
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert tables.filled(text) == text, f"run python benchmarks/tables.py: {name} is stale"
        assert "<!-- table:" in text


def test_the_rooms_of_the_house_are_there():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    listing = text.split("```")[1].split("src/veca/\n")[1]
    rooms = re.findall(r"^  (\w+(?:\.py|/)) ", listing, flags=re.MULTILINE)
    package = ROOT / "src" / "veca"
    assert len(rooms) > 20
    assert [room for room in rooms if not (package / room).exists()] == []
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert sorted(folders - set(rooms)) == []


def test_numbers_keep_three_digits(tables):
    shown = [tables.number(x) for x in (1234.5, 123.4, 12.34, 1.234, 0.01234)]
    assert shown == ["1234", "123", "12.3", "1.23", "0.012"]
