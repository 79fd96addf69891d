"""Weights: saved and loaded as safetensors, found by name, and exchanged with the authors' files.

`store` is the format, `names` and `hub` find weights, `models` makes models of them, `official` is
for the authors' files.
"""

from __future__ import annotations

import os
from typing import Any

from veca.config import PRESETS, VecaConfig, preset
from veca.errors import ConfigError
from veca.model import Veca
from veca.weights import names, store
from veca.weights import tensors as ts
from veca.weights.models import create_model, list_models, load
from veca.weights.names import NAMED, available, find
from veca.weights.official import convert_official, export_official, import_official
from veca.weights.store import save

__all__ = [
    "NAMED",
    "available",
    "convert_official",
    "create_model",
    "describe_config",
    "export_official",
    "find",
    "import_official",
    "list_models",
    "load",
    "read_config",
    "read_provenance",
    "save",
    "weights_hash",
]


def read_config(source: str | os.PathLike[str]) -> VecaConfig:
    """The configuration of stored weights, without reading the tensors."""
    return store.read_config(names.locate(source, (store.CONFIG,)))


def describe_config(name: str) -> tuple[str, VecaConfig]:
    """What a name is, in words, and its configuration: weights at hand, or else a preset."""
    held = names.at_hand(name)
    if held is not None:
        return f"weights {held.name}", store.read_config(held)
    try:
        config = preset(name)
    except ConfigError:
        return name, read_config(name)
    known = next(known for known, other in PRESETS.items() if other is config)
    return f"preset {known}, without an output projection", config


def read_provenance(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Where stored weights come from: teacher, data, code version and hashes, as saved."""
    return store.read_provenance(names.locate(source, (store.CONFIG, store.PROVENANCE)))


def weights_hash(source: str | os.PathLike[str] | Veca) -> str:
    """sha256 over the names, dtypes, shapes and bytes of the tensors: a key for caches.

    The dtype counts: weights stored as float16 and the float32 model loaded from them differ.
    """
    if isinstance(source, Veca):
        return ts.content_hash(source.state_dict())
    return store.read_hash(names.locate(source))
