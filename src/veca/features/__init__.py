"""Features of many images, written to disk."""

from veca.features.extract import DTYPES, WHAT, Summary, extract
from veca.features.files import FORMATS, read_features

__all__ = ["DTYPES", "FORMATS", "WHAT", "Summary", "extract", "read_features"]
