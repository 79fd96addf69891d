"""The optional libraries of this package, or an error that says how to get them."""

from __future__ import annotations

import importlib
from typing import Any

from veca.errors import MissingExtraError

_EXTRAS = {"pyarrow": "embed", "usearch": "search"}


def require(name: str, purpose: str, extra: str | None = None) -> Any:
    """The module called `name`, which `purpose` needs.

    Args:
        extra: the one that brings all that `purpose` needs; by default the library's own.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise MissingExtraError(
            f"{purpose} needs {library}, which cannot be imported ({error}); install it with: "
            f"pip install 'veca[{extra or _EXTRAS.get(library, library)}]'"
        ) from error
