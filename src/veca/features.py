"""Features of many images, written to disk: the short name of a part of `veca.embed`."""

from veca.embed.features import Summary, extract
from veca.embed.pipeline import DTYPES, WHAT
from veca.embed.writers.files import FORMATS, read_features

__all__ = ["DTYPES", "FORMATS", "WHAT", "Summary", "extract", "read_features"]
