"""Examples in docstrings, `>>> ...`, as blocks of code on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Fences them; Markdown would take them for quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            value = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(lambda m: f"```pycon\n{m[0]}\n```", value)
