"""VECA: vision features through a few elastic cores.

Names that need torch are imported at their first use, so that `veca --help` answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from veca.config import PRESETS, VecaConfig
from veca.cost import cost
from veca.errors import VecaError
from veca.version import __version__

if TYPE_CHECKING:
    from veca import attention, features
    from veca.core_memory import CoreMemory
    from veca.dense import DenseVit
    from veca.engine import InferenceEngine, compile_for_inference
    from veca.images import preprocess
    from veca.model import Veca
    from veca.outputs import VecaOutput
    from veca.weights import (
        create_model,
        export_official,
        import_official,
        list_models,
        load,
        save,
    )

__all__ = [
    "PRESETS",
    "CoreMemory",
    "DenseVit",
    "InferenceEngine",
    "Veca",
    "VecaConfig",
    "VecaError",
    "VecaOutput",
    "__version__",
    "attention",
    "compile_for_inference",
    "cost",
    "create_model",
    "export_official",
    "features",
    "import_official",
    "list_models",
    "load",
    "preprocess",
    "save",
]

_PLACES = {
    "CoreMemory": "core_memory",
    "DenseVit": "dense",
    "InferenceEngine": "engine",
    "Veca": "model",
    "VecaOutput": "model",
    "compile_for_inference": "engine",
    "create_model": "weights",
    "export_official": "weights",
    "import_official": "weights",
    "list_models": "weights",
    "load": "weights",
    "preprocess": "images",
    "save": "weights",
}
_MODULES = {
    *("attention", "bench", "calibrate", "collections", "content", "data", "dense", "distill"),
    *("embed", "engine", "export", "features", "images", "integrations", "large", "model"),
    *("points", "probe", "quickstart", "rope", "teachers", "tune", "viz", "weights"),
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"veca.{_PLACES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"veca.{name}")
    raise AttributeError(f"module 'veca' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
