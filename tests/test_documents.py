"""The documents say what the results files say."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import rows, tables
from benchmarks.__main__ import main

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_those_of_the_results_files():
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert tables.filled(text) == text, f"run python -m benchmarks tables: {name} is stale"
        assert "<!-- table:" in text


def test_the_command_tells_what_is_stale(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ("page.md",))
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- table: few -->\nold\n<!-- end table -->\nAfter\n")
    assert main(["tables", "--check"]) == 1 and "page.md: stale" in capsys.readouterr().out
    assert "old" in page.read_text()
    assert main(["tables"]) == 0 and main(["tables", "--check"]) == 0
    assert "| small | " in page.read_text() and "old" not in page.read_text()


def test_the_rooms_of_the_house_are_there():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    listing = text.split("```")[1].split("src/veca/\n")[1]
    rooms = re.findall(r"^  (\w+(?:\.py|/)) ", listing, flags=re.MULTILINE)
    package = ROOT / "src" / "veca"
    assert len(rooms) > 20
    assert [room for room in rooms if not (package / room).exists()] == []
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    files = {path.name for path in package.glob("[!_]*.py")} - {"version.py", "collections.py"}
    assert sorted((folders | files) - set(rooms)) == []


def test_numbers_keep_three_digits():
    shown = [rows.number(x) for x in (1234.5, 123.4, 12.34, 1.234, 0.01234)]
    assert shown == ["1234", "123", "12.3", "1.23", "0.012"]
