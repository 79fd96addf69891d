"""Links inside the documents lead somewhere, and every page can be found from the index."""

from __future__ import annotations

import re

import pytest

from docs import pages

DOCUMENTS = [
    *pages.pages(),
    *sorted((pages.ROOT / "docs" / "reference").glob("*.md")),
    pages.ROOT / "CHANGELOG.md",
]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    """What GitHub makes of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCED.sub("", text), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: p.relative_to(pages.ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in _LINK.findall(_FENCED.sub("", text)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in _anchors(target.read_text(encoding="utf-8")), f"{link}: no such part"


def test_pages_install_from_the_clone():
    """The package is on no index: pip would find nothing, or something else, under its name."""
    recipes = sorted((pages.ROOT / "src" / "veca" / "distill" / "recipes").rglob("*.toml"))
    for page in [*pages.pages(), *recipes]:
        found = re.findall(r"pip install.*\bveca\b.*", page.read_text(encoding="utf-8"))
        assert not found, f"{page.name}: in a clone it is pip install '.[extra]'"


def test_every_page_is_in_the_index():
    index = (pages.ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {link.partition("#")[0] for link in _LINK.findall(index)}
    found = {p.name for p in (pages.ROOT / "docs").glob("*.md")} - {"index.md"}
    assert not found - linked
    assert "reference/index.md" in linked
