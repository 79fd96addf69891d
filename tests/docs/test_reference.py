"""Every public name is in the API reference and says what it does. `make docs` builds the site."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import veca
from docs import pages

REFERENCE = pages.ROOT / "docs" / "reference"
MODULES = sorted(path.stem for path in REFERENCE.glob("veca*.md"))
ALIASES = {"veca.collections"}
"""Old places of things that have moved."""
SETTINGS = {"veca.distill.config", "veca.probe.protocol"}
"""Tables of settings, whose fields are described one by one."""


def public(name: str) -> list[tuple[str, object]]:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:  # a module without a list: what it defines and does not call private
        here = vars(module).items()
        return [(n, v) for n, v in here if n[0] != "_" and getattr(v, "__module__", "") == name]
    return [(n, getattr(module, n)) for n in names]


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
