"""Data flows one way: who may import whom, read from the source without running it.

A room is a folder or a file right below `src/veca`. Imports inside functions count too; those
under `if TYPE_CHECKING` do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "veca"

TRAINING = {"data", "teachers", "distill", "finetune"}
FACES = {"cli", "app", "research"}
"""Nobody imports these, but for the entries below."""
ENTRIES = {("__main__", "cli"), ("cli", "app")}

USERS = {"bench", "collections", "embed", "export", "features", "integrations", "large",
         "probe", "quickstart", "serve", "viz", *FACES}  # fmt: skip
ABOVE = {
    "attention": {"model", "dense", "cost", "weights", "engine", *USERS},
    "model": {"engine", *USERS},
    "engine": USERS,
}
"""What comes later on the way from an image to an answer."""

INFERENCE_FROM_TRAINING = {
    ("embed", "data"),  # folders, lists and shards are found and read by one code
    ("probe", "teachers"),  # a teacher is probed beside its student
}
"""The only exceptions."""


def room(module: str) -> str:
    name = module.split(".")[1]
    return "model" if name == "checks" else name  # its input checks, in a file of their own


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of this package that a file imports, as `veca.room...`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("veca."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "veca":
                yield from (f"veca.{name.name}" for name in node.names)
            elif node.module and node.module.startswith("veca."):
                yield node.module
        yield from imported(node)


def edges() -> dict[tuple[str, str], list[str]]:
    """(importer, imported) between rooms, with the files where it is done."""
    found: dict[tuple[str, str], list[str]] = {}
    rooms = {path.stem for path in SOURCE.iterdir()}
    for path in sorted(SOURCE.rglob("*.py")):
        here = room(f"veca.{path.relative_to(SOURCE).parts[0].removesuffix('.py')}")
        if here == "__init__":  # the front door shows names of every room
            continue
        for module in imported(ast.parse(path.read_text())):
            if room(module) in rooms - {here}:
                file = path.relative_to(SOURCE).as_posix()
                found.setdefault((here, room(module)), []).append(file)
    return found


EDGES = edges()


def test_the_reader_sees_imports() -> None:
    assert ("model", "attention") in EDGES and ("engine", "model") in EDGES


@pytest.mark.parametrize("lower", ABOVE)
def test_nothing_imports_what_is_built_on_it(lower: str) -> None:
    wrong = {e: files for e, files in EDGES.items() if e[0] == lower and e[1] in ABOVE[lower]}
    assert not wrong


def test_inference_never_imports_training() -> None:
    allowed = INFERENCE_FROM_TRAINING
    free = TRAINING | FACES
    wrong = {
        e: files
        for e, files in EDGES.items()
        if e[1] in TRAINING and e[0] not in free and e not in allowed
    }
    assert not wrong


def test_nobody_imports_the_faces() -> None:
    wrong = {e: files for e, files in EDGES.items() if e[1] in FACES and e not in ENTRIES}
    assert not wrong


def test_no_cycles_between_rooms() -> None:
    after: dict[str, set[str]] = {}
    for importer, other in EDGES:
        after.setdefault(importer, set()).add(other)
    while after:
        leaves = {other for others in after.values() for other in others} - set(after)
        free = {name for name, others in after.items() if others <= leaves}
        assert free, f"rooms that import each other: {sorted(after)}"
        for name in free:
            del after[name]
        for others in after.values():
            others -= free | leaves


@pytest.mark.slow
def test_the_package_never_imports_the_laboratory() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {n.split(".")[0] for n in names} & {
                "research",
                "benchmarks",
                "tests",
                "attack",
            }, path


def test_no_two_classes_of_one_name() -> None:
    places: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(path.relative_to(SOURCE).as_posix())
    twice = {name for name, files in places.items() if len(files) > 1}
    assert twice == {"VecaConfig"}  # transformers wants its own, under this name
