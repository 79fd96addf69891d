"""The name that `veca.embed` had in 0.1."""

from veca._util.moved import moved

_NAMES = ("Collection", "EmbedReport", "Match", "Rows", "contact_sheet", "embed",
          "iter_embeddings", "read_embeddings", "search")  # fmt: skip
__all__ = list(_NAMES)
__getattr__ = moved(__name__, {name: f"veca.embed.{name}" for name in _NAMES})
