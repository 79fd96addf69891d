"""From images to features: one engine for folders of files, Parquet shards and search.

`extract` writes files of features, `embed` Parquet shards of a whole collection. Both take images
from the same `sources`, send them through the same `pipeline` and hand the results to one of the
`writers`; the probes' cache is filled the same way. `settings`, `plan` and `shards` say what lies
where in a folder of embeddings, `cluster` fills one with Ray, `searching` finds neighbours in it
and `sheet` shows them.
"""

from veca.embed.embedding import EmbedReport, embed
from veca.embed.features import Summary, extract
from veca.embed.pipeline import DTYPES, WHAT
from veca.embed.searching import Collection, Match, search
from veca.embed.sheet import contact_sheet
from veca.embed.writers.files import FORMATS, read_features
from veca.embed.writers.parquet import Rows, iter_embeddings, read_embeddings

__all__ = [
    "DTYPES",
    "FORMATS",
    "WHAT",
    "Collection",
    "EmbedReport",
    "Match",
    "Rows",
    "Summary",
    "contact_sheet",
    "embed",
    "extract",
    "iter_embeddings",
    "read_embeddings",
    "read_features",
    "search",
]
