"""VECA: vision features through a few elastic cores."""

from veca import attention
from veca.config import PRESETS, VecaConfig
from veca.cost import cost
from veca.dense import DenseVit
from veca.engine import InferenceEngine, compile_for_inference
from veca.errors import VecaError
from veca.images import preprocess
from veca.model import Veca, VecaOutput, create_model
from veca.version import __version__
from veca.weights import export_official, import_official, load, save

__all__ = [
    "PRESETS",
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
    "import_official",
    "load",
    "preprocess",
    "save",
]
