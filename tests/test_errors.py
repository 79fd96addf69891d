"""Every error of the package is defined in `veca.errors` and derives from `VecaError`."""

from __future__ import annotations

import ast
import builtins
import pickle
from pathlib import Path

import pytest

import veca
from veca import errors

SOURCE = Path(veca.__file__).parent


def _names(node: ast.ClassDef) -> set[str]:
    """The last part of the name of each base."""
    return {
        base.attr if isinstance(base, ast.Attribute) else base.id
        for base in node.bases
        if isinstance(base, (ast.Attribute, ast.Name))
    }


def _exceptions() -> set[str]:
    """The names of exceptions, Python's and ours."""
    known = {
        name
        for name, value in {**vars(builtins), **vars(errors)}.items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert {"VecaError", "DatasetError", "KeyboardInterrupt", "UserWarning"} <= known
    return known


def test_no_other_module_defines_an_exception() -> None:
    """The source is parsed: importing every module would need every optional library.

    A private one may be how a module talks to itself; it never leaves.
    """
    known = _exceptions()
    elsewhere = [
        f"{path.relative_to(SOURCE)}: {node.name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path != SOURCE / "errors.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and (_names(node) & known or any(n.endswith(("Error", "Warning")) for n in _names(node)))
    ]
    assert elsewhere == []


def test_every_exception_is_a_veca_error() -> None:
    ours = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(ours) > 10
    kinds = (errors.VecaError, Warning)
    assert [v for v in ours if not issubclass(v, kinds)] == []


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("veca.data", "DataError BadImageError TooManyBadError"),
        ("veca.errors", "DataError BadImageError TooManyBadError"),
        ("veca.data.faults", "TooManyBadError"),
        ("veca.distill", "DistillError DivergedError"),
        ("veca.errors", "DistillError DivergedError"),
        ("veca.export", "ExportError"),
        ("veca.errors", "ExportError"),
        ("veca.probe", "ProbeError"),
        ("veca.errors", "ProbeError"),
        ("veca.probe.datasets", "DatasetError"),
        ("veca.teachers", "TeacherError"),
        ("veca.teachers.base", "TeacherError"),
    ],
)
def test_the_places_of_0_1_still_work(module: str, names: str) -> None:
    import importlib

    for name in names.split():
        assert getattr(importlib.import_module(module), name) is getattr(errors, name)


def test_a_bad_image_survives_the_way_between_processes() -> None:
    again = pickle.loads(pickle.dumps(errors.BadImageError("a.jpg", "cut short")))
    assert (again.name, again.reason, str(again)) == ("a.jpg", "cut short", "a.jpg: cut short")


def test_of_very_many_known_names_the_section_is_listed() -> None:
    known = [f"{part}.{i}" for part in ("knn", "linear") for i in range(50)]
    assert "knn.49" in errors.suggest("knn.x", known) and "linear" not in errors.suggest(
        "knn.x", known
    )
    assert errors.suggest("data.x", known).endswith("Known: knn.*, linear.*.")
    assert errors.suggest("knn.x", known[:2]).endswith("Known: knn.0, knn.1.")
