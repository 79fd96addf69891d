"""The diary and the page beside it: tables from results files, links, the newest entry first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.test_links import test_links_lead_somewhere as links_lead_somewhere
from research import tables
from veca.weights import read_provenance

ROOT = Path(__file__).parents[1]
DIARY = ROOT / "diary.md"


def test_tables_are_those_of_the_results_files():
    text = DIARY.read_text(encoding="utf-8")
    assert tables.filled(text) == text, "run python -m research.tables"
    assert set(re.findall(r"<!-- table: (\S+) -->", text)) == set(tables.TABLES)
    assert tables.main(["--check"]) == 0


def test_the_newest_entry_comes_first():
    found = re.findall(r"^## (\d{4}-\d\d-\d\d) · (\d+)\. ", DIARY.read_text(), re.MULTILINE)
    numbers = [int(number) for _, number in found]
    assert numbers == list(range(numbers[0], 0, -1))
    dates = [date for date, _ in found]
    assert dates == sorted(dates, reverse=True)


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links(page):
    links_lead_somewhere(page)


@pytest.mark.parametrize("name", ["veca_tiny_patch16", "veca_small_patch16"])
def test_it_says_how_much_they_saw(name):
    assert f"{read_provenance(name)['samples_in_all'] / 1e6:.1f} M" in DIARY.read_text()


def test_paths_that_it_names_are_there():
    for path in re.findall(r"`((?:research|configs|benchmarks)/[\w./-]+\.\w+)`", DIARY.read_text()):
        assert (ROOT.parent / path).exists(), path
