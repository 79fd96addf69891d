"""The authors' checkpoints: into our layout and back, without loss.

Theirs is a torch-saved dict with the weights under `student` and the settings under `config`.
`official_layout` maps the tensors, `official_settings` the settings; here are the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from veca._util import files
from veca.checks import check_model
from veca.errors import OutputError, WeightsError, shown
from veca.model import Veca
from veca.weights import pickled, store
from veca.weights import tensors as ts
from veca.weights.official_layout import from_ours, to_ours
from veca.weights.official_settings import find_config, their_config

__all__ = [
    "OfficialCheckpoint",
    "build_model",
    "convert_official",
    "export_official",
    "from_ours",
    "import_official",
    "read_checkpoint",
    "to_ours",
]

_PREFIXES = ("module.", "student.")


@dataclass(frozen=True)
class OfficialCheckpoint:
    """What a file of the authors' holds that matters here."""

    path: Path
    state: dict[str, Tensor]
    """The weights in their naming, without prefixes."""
    config: dict[str, Any]
    """Their settings; empty if the file has none."""
    progress: dict[str, int]
    """How far training was, in their words: epoch, global_step."""


def import_official(
    path: str | os.PathLike[str],
    *,
    config_overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Veca:
    """A model with the weights of an authors' checkpoint, in eval mode.

    No code in the file is run: one that holds more than tensors and plain data is refused.

    Args:
        config_overrides: fields of `VecaConfig` that win over the file's settings, such as
            `{"heads": 6}` for a file without settings, whose tensors do not tell the heads.
        dtype: of the weights in memory; None keeps the stored one.
    """
    ts.check_dtype(dtype)
    return build_model(read_checkpoint(path), config_overrides=config_overrides, dtype=dtype)


def convert_official(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.float32,
) -> Veca:
    """Write an authors' checkpoint as weights that `veca.load` reads, and give the model.

    Unlike `import_official` and `save`, this keeps where the weights come from: the file, its
    hash, the teacher and how far training was.

    Args:
        out: a folder, or a name ending in `.safetensors`; weights that are there are replaced.
        dtype: to store in; None keeps the checkpoint's.
    """
    ts.check_dtype(dtype)
    found = read_checkpoint(checkpoint)
    model = build_model(found, dtype=None if dtype is None else torch.float32)
    store.save(model, out, provenance=provenance(found), dtype=dtype)
    return model


def export_official(model: Veca, path: str | os.PathLike[str], *, chunk: int | None = None) -> Path:
    """Write a model as a checkpoint in the authors' layout, in one step.

    Their code builds its four families only and refuses other sizes, which still import here.

    Args:
        chunk: cores in one chunk of the bank; 8 if the bank divides into such, as theirs does.
    """
    check_model(model, "export_official")
    path = Path(path).expanduser()
    state = {name: tensor.cpu() for name, tensor in from_ours(model, chunk=chunk).items()}
    ts.require_finite(state, "the tensors to save", "such a model is of no use, so it is not kept.")
    payload = {"student": state, "config": their_config(model.config, chunk=chunk)}
    with files.atomic_write(path) as file:
        try:
            torch.save(payload, file)
        except RuntimeError as error:  # how torch reports that it could not write
            raise OutputError(
                f"cannot write {path} ({error}); free some space or choose another place."
            ) from error
    return path


def read_checkpoint(path: str | os.PathLike[str]) -> OfficialCheckpoint:
    """The weights and settings in an authors' file, prefixes removed; nothing is executed."""
    path = Path(path).expanduser()
    content = _unpickle(path)
    if not isinstance(content, Mapping):
        raise WeightsError(
            f"{path} holds a {type(content).__name__}, not a checkpoint: a dict with the weights "
            "under 'student', or the weights themselves."
        )
    state = content.get("student", content)
    if not isinstance(state, Mapping):
        raise WeightsError(f"{path}: 'student' is a {type(state).__name__}, not a dict of tensors.")
    config = content.get("config") if state is not content else None
    if config is not None and not isinstance(config, Mapping):
        raise WeightsError(
            f"{path}: 'config' is a {type(config).__name__}, not a plain dict; save the checkpoint "
            "again with a dict, or without 'config'."
        )
    progress = {
        name: content[name] for name in ("epoch", "global_step") if _is_size(content.get(name))
    }
    return OfficialCheckpoint(path, _clean(state, path), dict(config or {}), progress)


def build_model(
    checkpoint: OfficialCheckpoint,
    *,
    config_overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Veca:
    """The model of a checkpoint that was read."""
    where = str(checkpoint.path)
    config = find_config(checkpoint.state, checkpoint.config, config_overrides, where=where)
    ts.require_floating({name: t.dtype for name, t in checkpoint.state.items()}, where)
    ts.require_finite(checkpoint.state, where, "the checkpoint is broken; fetch it again.")
    state = to_ours(checkpoint.state, config, where=where)
    return ts.fill(config, {name: t.to(dtype=dtype, copy=True) for name, t in state.items()})


def provenance(checkpoint: OfficialCheckpoint) -> dict[str, Any]:
    """Where a checkpoint's weights come from, as far as the file says; plain JSON."""
    said = {
        "teacher": checkpoint.config.get("teacher_id"),
        "budgets": checkpoint.config.get("nested_budgets"),
        "resolutions": checkpoint.config.get("resolutions"),
    }
    plain = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in said.items()
        if isinstance(value, str)
        or (isinstance(value, (list, tuple)) and all(_is_size(x) for x in value))
    }
    return {
        "source": "a checkpoint in the layout of the authors' code",
        "source_file": checkpoint.path.name,
        "source_sha256": store.file_hash(checkpoint.path),
        **plain,
        **checkpoint.progress,
    }


def _is_size(value: object) -> bool:
    """Whether a value is a whole number, and one that JSON can take."""
    return type(value) is int and abs(value) < 2**63


def _unpickle(path: Path) -> object:
    """What a torch-saved file holds, by torch's reader that takes tensors and plain data only."""
    if not path.exists() or path.is_dir():
        what = "is a folder, not" if path.is_dir() else "does not exist; give the path of"
        raise WeightsError(f"{path} {what} a torch-saved checkpoint of the authors'.")
    if path.name.endswith(store.SUFFIX):
        raise WeightsError(f"{path} is a {store.SUFFIX} file; veca.load reads it.")
    return pickled.read(path, "a checkpoint of the authors'", WeightsError)


def _clean(state: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    """The tensors without the prefixes that wrappers leave in their names."""
    cleaned: dict[str, Tensor] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise WeightsError(
                f"{path}: {shown(key)} among the weights is the name of nothing; the weights are "
                "expected under 'student', or as the whole file."
            )
        name = key.replace("_orig_mod.", "")
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        if not isinstance(value, Tensor):
            raise WeightsError(
                f"{path}: {shown(key)} among the weights is a {type(value).__name__}, not a "
                "tensor; the weights are expected under 'student', or as the whole file."
            )
        if name in cleaned:
            raise WeightsError(f"{path}: two tensors are called {name} once prefixes are removed.")
        cleaned[name] = value
    pickled.check_sizes(cleaned, path, WeightsError)
    return cleaned
