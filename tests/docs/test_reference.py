"""Every public name is in the API reference and says what it does. `make docs` builds the site."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import pkgutil
import sys
import types
from pathlib import Path

import pytest

import veca
from docs import pages

_SPEC = importlib.util.spec_from_file_location("site_hooks", pages.ROOT / "docs/site_hooks.py")
site_hooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(site_hooks)

REFERENCE = pages.ROOT / "docs" / "reference"
MODULES = sorted(path.stem for path in REFERENCE.glob("veca*.md"))
ALIASES = {"veca.collections"}
"""Old places of things that have moved."""
SETTINGS = {"veca.distill.config", "veca.probe.protocol"}
"""Tables of settings, whose fields are described one by one."""


def public(name: str) -> list[tuple[str, object]]:
    return list(site_hooks.public_names(name).items())


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring(name: str) -> None:
    if name.startswith("veca.integrations."):
        library = name.rpartition(".")[2]
        pytest.importorskip(library, reason=f"needs {library}")
    found = public(name)
    assert found
    poor = [
        n
        for n, thing in found
        if (inspect.isclass(thing) or inspect.isroutine(thing))
        and not own_docstring(thing)
        and not (name in SETTINGS and dataclasses.is_dataclass(thing))
    ]
    assert not poor


def own_docstring(thing: object) -> bool:
    text = inspect.getdoc(thing) or ""
    # What `dataclass` and `NamedTuple` write by themselves is a signature.
    return bool(text) and not text.startswith(f"{getattr(thing, '__name__', '')}(")


def test_every_package_with_public_names_has_a_page() -> None:
    root = Path(veca.__file__).parent
    rooms = {f"veca.{m.name}" for m in pkgutil.iter_modules([str(root)]) if m.ispkg}
    rooms -= {"veca._util", "veca.app", "veca.cli", "veca.integrations"} | ALIASES
    assert rooms <= set(MODULES)


def test_every_page_of_the_reference_is_on_the_site() -> None:
    site = (pages.ROOT / "mkdocs.yml").read_text()
    index = (REFERENCE / "index.md").read_text()
    for name in MODULES:
        assert f"reference/{name}.md" in site and f"({name}.md)" in index, name
        assert f"::: {name}\n" in (REFERENCE / f"{name}.md").read_text()


PAGE = """<h1 id="top">A</h1><a href="../b/">b</a><a href="../b/#part">part</a>
<a href="#top">top</a><a href="https://example.org/x">away</a><img src="../p.png">"""


def _site(folder: Path, page: str) -> Path:
    for name, text in (("a", page), ("b", '<h2 id="part">P</h2>')):
        (folder / name).mkdir()
        (folder / name / "index.html").write_text(text)
    (folder / "p.png").write_bytes(b"")
    return folder


def test_a_site_without_broken_links_passes(tmp_path: Path) -> None:
    assert site_hooks.broken_links(_site(tmp_path, PAGE)) == []


@pytest.mark.parametrize(
    ("good", "bad"),
    [("../b/", "../c/"), ("#part", "#parts"), ("#top", "#bottom"), ("p.png", "q.png")],
)
def test_broken_links_anchors_and_pictures_are_told(tmp_path: Path, good: str, bad: str) -> None:
    problems = site_hooks.broken_links(_site(tmp_path, PAGE.replace(good, bad)))
    assert problems and all(bad in problem for problem in problems)


def test_names_that_no_page_shows_or_that_say_nothing_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("veca_room")
    module.__all__ = ["shown", "hidden", "silent"]
    for name in module.__all__:
        exec(f"def {name}():\n    {'pass' if name == 'silent' else repr('Works.')}", vars(module))
    monkeypatch.setitem(sys.modules, "veca_room", module)
    page = tmp_path / "reference" / "veca_room" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text('<h2 id="veca_room.shown"></h2><h2 id="veca_room.silent"></h2>')
    hidden, silent = site_hooks.undocumented(tmp_path)
    assert "hidden" in hidden and "silent" in silent


def test_commands_are_listed_in_full_and_examples_are_code() -> None:
    from veca.cli.main import app

    text = site_hooks._commands()
    listed, _, rest = text.partition("\n## ")
    names = [command.name for command in app.registered_commands]
    lines = [line for line in listed.splitlines() if "](#veca-" in line]
    assert [line.split("`")[1] for line in lines] == names
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)
    assert all(f"## `veca {name}`" in text for name in names)
    assert "```bash\nveca viz report photo.jpg" in rest
