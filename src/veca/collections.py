"""The name that `veca.embed` had in 0.1."""

from __future__ import annotations

import warnings
from typing import Any

_NAMES = ("Collection", "EmbedReport", "Match", "Rows", "contact_sheet", "embed",
          "iter_embeddings", "read_embeddings", "search")  # fmt: skip
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"veca.collections.{name} is now veca.embed.{name}", DeprecationWarning, stacklevel=2
    )
    import veca.embed

    return getattr(veca.embed, name)
