"""The API reference is what the docstrings say, and the docstrings say enough."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import sys

import pytest

from docs import pages


@pytest.fixture
def api(monkeypatch):
    spec = importlib.util.spec_from_file_location("build_api", pages.ROOT / "docs/build_api.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    # What other tests left is cleaned up at any moment, and its finalizers may parse source as
    # well; Python 3.11 answers with a SystemError if that happens in the middle of `ast.parse`.
    gc.disable()
    yield module
    gc.enable()


def test_reference_is_not_stale(api):
    assert not api.stale(api.build()), "run `make docs`"


def _fields_are_described(api, name) -> bool:
    """A table of settings may speak for itself."""
    body = name.node.body if isinstance(name.node, ast.ClassDef) else []
    return any(isinstance(part, ast.AnnAssign) and below for part, below in api.statements(body))


def test_every_public_name_has_a_docstring(api):
    poor = [
        f"{module.name}.{name.name}"
        for module in map(api.read, api.MODULES)
        if module is not None
        for name in (api.resolve(module, n) for n in api.public(module))
        if not name.doc and name.kind != "constant" and not _fields_are_described(api, name)
    ]
    assert not poor


@pytest.mark.parametrize("name", ["veca", "veca.weights", "veca.features", "veca.probe"])
def test_names_are_those_that_python_sees(api, name):
    module = importlib.import_module(name)
    assert api.public(api.read(name)) == list(module.__all__)
    for public in module.__all__:
        found, real = api.resolve(api.read(name), public), getattr(module, public)
        if found.kind in ("class", "function"):
            assert (found.module.name, found.name) == (real.__module__, real.__name__)
            assert found.doc.split() == (real.__doc__ or "").split()


def test_docstrings_become_markdown(api):
    doc = "First.\n\nArgs:\n    a, b: both\n        of them.\n    c: one.\n\n>>> f(1)\n2\n\nLast."
    assert api.markdown(doc) == (
        "First.\n\n**Args**\n\n- `a`, `b`: both of them.\n- `c`: one.\n\n"
        "```pycon\n>>> f(1)\n2\n```\n\nLast."
    )


def test_signatures_keep_defaults_and_stars(api):
    text = "def f(a, /, b: int = 1, *rest: str, c: dict[str, int] | None = None, **more) -> x: ..."
    module = api.Module("m", text, ast.parse(text))
    assert api.signature(module, module.tree.body[0], "f") == (
        "f(a, /, b: int = 1, *rest: str, c: dict[str, int] | None = None, **more) -> x"
    )


def test_a_changed_docstring_is_noticed(api):
    wanted = api.build()
    page = wanted["veca.md"]
    wanted["veca.md"] = page.replace("in eval mode", "in some mode")
    assert wanted["veca.md"] != page
    assert api.stale(wanted) == ["veca.md"]
    del wanted["veca.md"]
    assert api.stale(wanted) == ["veca.md"]
