"""Runs the code cells of a notebook in order, as Jupyter would, without Jupyter.

python tests/docs/notebooks.py examples/notebooks/first_features.ipynb

All cells share one namespace. What the last line of a cell gives is shown as Jupyter shows it: made
into a picture where it can be one, else printed.
"""

from __future__ import annotations

import ast
import json
import linecache
import sys
from pathlib import Path
from typing import Any


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def run(path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(path)):
        if cell["cell_type"] == "code":
            run_cell("".join(cell["source"]), f"{path.name}[{number}]", namespace)


def run_cell(code: str, place: str, namespace: dict[str, Any]) -> None:
    linecache.cache[place] = (len(code), None, code.splitlines(True), place)
    body = ast.parse(code, place).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), place, "exec"), namespace)
    if last is not None:
        show(eval(compile(ast.Expression(last.value), place, "eval"), namespace))


def show(value: object) -> None:
    picture = getattr(value, "_repr_png_", None)
    if picture is not None:
        print(f"[picture, {len(picture())} bytes]")
    elif value is not None:
        print(value)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
