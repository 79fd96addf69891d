"""Whole collections of images as vectors in Parquet files, and search over them.

`embedding` is the way in: `settings` says what decides the numbers, `plan` which image lies in
which shard, `compute` turns a shard's images into rows, `table` is the Parquet format,
`engine_local` and `engine_ray` do the work, `searching` finds neighbours in the result.
"""

from veca.collections.embedding import EmbedReport, embed
from veca.collections.searching import Collection, Match, contact_sheet, search
from veca.collections.table import Rows, iter_embeddings, read_embeddings

__all__ = [
    "Collection",
    "EmbedReport",
    "Match",
    "Rows",
    "contact_sheet",
    "embed",
    "iter_embeddings",
    "read_embeddings",
    "search",
]
