"""The code that travels with weights: transformers runs it where this package is not installed.

It is made from the package's own modules when weights are published. transformers' loader takes
files that lie side by side and import each other as `from .name import ...`, so every module that
the classes need becomes one such file: `veca.attention.sdpa` is `veca_attention_sdpa.py`. Only the
kernels stay behind, which need Triton; torch's own attention computes the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from veca._util import files
from veca.version import __version__
from veca.weights.processor import CODE_FILE

_PREFIX = "veca_"
_HOME = "veca.integrations.transformers"
_CLASSES = {
    f"{_HOME}.configuration": ("VecaConfig",),
    f"{_HOME}.modeling": ("VecaBackbone", "VecaForImageClassification", "VecaModel"),
    f"{_HOME}.processing": ("VecaImageProcessor",),
}
_INSTEAD = {"veca.attention.fused": "veca.attention.without_kernels"}
_SOURCE = Path(__file__).resolve().parents[2]


def write_code(folder: Path) -> None:
    """Put the code beside weights, and away with that of another version."""
    code = source_files()
    for name, text in code.items():
        files.atomic_write_text(folder / name, text)
    for path in set(_code_in(folder)) - {folder / name for name in code}:
        path.unlink()


def remove_code(folder: Path) -> None:
    """Take away what `write_code` wrote."""
    for path in _code_in(folder):
        path.unlink()


def _code_in(folder: Path) -> Iterator[Path]:
    for path in (folder / CODE_FILE, *folder.glob(f"{_PREFIX}*.py")):
        if path.is_file():
            yield path


def source_files() -> dict[str, str]:
    """Every file of the code: name -> text."""
    found: dict[str, str] = {}
    todo = list(_CLASSES)
    while todo:
        module = todo.pop()
        if _file_name(module) not in found:
            found[_file_name(module)], needed = _flattened(module)
            todo += needed
    return {CODE_FILE: _entry(sorted(found)), **dict(sorted(found.items()))}


def _entry(names: list[str]) -> str:
    """The file that config.json names."""
    lines = [
        '"""VECA for transformers: the code of the model, beside its weights.',
        "",
        "    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)",
        "",
        "The package has the same classes, with kernels for GPUs, and asks for no trust:",
        "install veca with its extra hf, and import veca.integrations.transformers.",
        "",
        _origin(),
        f"The files {_PREFIX}*.py beside this one are its modules under flat names.",
        '"""',
        "",
        "# transformers copies the files that this one imports, so it imports all of them.",
        *(f"from .{name.removesuffix('.py')} import __name__ as _" for name in names),
    ]
    for module, classes in _CLASSES.items():
        lines += [f"from .{_flat(module)} import {name}" for name in classes]
    every = ", ".join(sorted(name for classes in _CLASSES.values() for name in classes))
    lines += [
        "",
        "# save_pretrained copies the file that a class is of and what that imports: this one.",
        f"for _class in ({every}):",
        "    _class.__module__ = __name__",
        "",
    ]
    return "\n".join(lines)


def _origin() -> str:
    return f"Written by veca {__version__} (Apache-2.0) from its own source; not to be edited."


def _flattened(module: str) -> tuple[str, list[str]]:
    """A module's text with flat imports, and the modules that it imports."""
    path = _path(module)
    assert path is not None
    text = path.read_text(encoding="utf-8")
    lines: list[str | None] = list(text.splitlines())
    needed: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not _is_ours(node.module):
            continue
        statements = []
        for base, names in _by_module(node).items():
            needed += [base or name for name, _ in names]
            statements += _statements(base, names)
        start, end = node.lineno - 1, node.end_lineno or node.lineno
        lines[start:end] = [None] * (end - start)
        lines[start] = "\n".join(" " * node.col_offset + one for one in statements)
    body = "\n".join(line for line in lines if line is not None)
    origin = path.relative_to(_SOURCE).as_posix()
    return f"# {origin}. {_origin()}\n{body}\n", needed


def _by_module(node: ast.ImportFrom) -> dict[str, list[tuple[str, str]]]:
    """(name, what it is called here) by module; under "" the modules that are names themselves."""
    found: dict[str, list[tuple[str, str]]] = {}
    for alias in node.names:
        full = f"{node.module}.{alias.name}"
        called = alias.asname or alias.name
        if _path(full) is not None:
            found.setdefault("", []).append((_INSTEAD.get(full, full), called))
        else:
            base = _INSTEAD.get(str(node.module), str(node.module))
            found.setdefault(base, []).append((alias.name, called))
    return found


def _statements(base: str, names: list[tuple[str, str]]) -> list[str]:
    if not base:
        return [f"from . import {_flat(module)} as {called}" for module, called in names]
    listed = [name if name == called else f"{name} as {called}" for name, called in names]
    return [f"from .{_flat(base)} import {', '.join(listed)}"]


def _is_ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "veca"


def _flat(module: str) -> str:
    return module.replace("._", ".").replace(".", "_")


def _file_name(module: str) -> str:
    return f"{_flat(module)}.py"


def _path(module: str) -> Path | None:
    """The source of a module, which need not be importable here."""
    path = _SOURCE.joinpath(*module.split("."))
    if (path / "__init__.py").is_file():
        return path / "__init__.py"
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None
