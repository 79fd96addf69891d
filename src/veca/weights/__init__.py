"""Weights: saved and loaded as safetensors, found by name, and exchanged with the authors' files.

`store` is the format, `names` and `hub` find weights, `official` is for the authors' files.
"""

from veca.weights.api import load, read_config, read_provenance, weights_hash
from veca.weights.names import NAMED, available, find
from veca.weights.official import export_official, import_official
from veca.weights.store import save

__all__ = [
    "NAMED",
    "available",
    "export_official",
    "find",
    "import_official",
    "load",
    "read_config",
    "read_provenance",
    "save",
    "weights_hash",
]
