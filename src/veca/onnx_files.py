"""Files for `engine="onnxruntime"`: `veca.export` writes each once a machine, into the cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from veca._util.cache import cache_folder, mark_used
from veca._util.extras import require
from veca.errors import InputError, MissingExtraError
from veca.model import Veca
from veca.version import __version__
from veca.weights import weights_hash

if TYPE_CHECKING:
    from veca.export import ExportedModel

PRECISIONS = ("fp32", "int8")
"""What onnxruntime is asked to compute in: in others it is slow on CPUs."""


def require_onnxruntime(precision: str) -> None:
    from veca.export.onnx_file import require_onnx

    if precision not in PRECISIONS:
        raise InputError(
            f"onnxruntime is slow in {precision} on CPUs; choose {' or '.join(PRECISIONS)}, or "
            "engine='torch'."
        )
    try:
        require_onnx()
    except MissingExtraError as error:
        raise MissingExtraError(f"engine='onnxruntime': {error}") from error


def installed() -> bool:
    """Whether all is there that the engine needs."""
    names = ("onnx", "onnxscript", "onnxruntime")
    return all(importlib.util.find_spec(name) is not None for name in names)


def version() -> str:
    """That of onnxruntime."""
    return str(require("onnxruntime", "ONNX").__version__)


def opened(model: Veca, precision: str, keep: float) -> ExportedModel:
    """The file of a model, ready to run with as many threads as torch has now."""
    from veca.export import load_exported

    return load_exported(file_for(model, precision, keep))


def is_prepared(model: Veca, precision: str, keep: float = 1.0) -> bool:
    """Whether the file for a model is in the cache, so that nothing is to be made."""
    return _place(model, precision, keep) is not None


def file_for(model: Veca, precision: str, keep: float = 1.0) -> Path:
    """The file of a model for any budget, size and batch, made if it is not in the cache yet."""
    from veca.export import export_model

    there = _place(model, precision, keep)
    if there is not None:
        for path in (there.parent, there):
            mark_used(path)
        return there
    folder = _folder(model, precision, keep)
    side = 4 * model.config.patch_size
    sizes = [(side, side), (side, 2 * side)]
    (made,) = export_model(model, folder, precision=precision, keep=keep, check_sizes=sizes)
    return made.path


def _place(model: Veca, precision: str, keep: float) -> Path | None:
    with contextlib.suppress(OSError):
        return next(iter(sorted(_folder(model, precision, keep).glob("*.onnx"))), None)
    return None


def _folder(model: Veca, precision: str, keep: float) -> Path:
    facts = [weights_hash(model), model.config.to_dict(), precision, keep, __version__]
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder("onnx") / name
