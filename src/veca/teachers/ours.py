"""VECA models and their dense control as teachers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from veca._util import files
from veca.checks import check_budget
from veca.config import VecaConfig
from veca.dense import DenseVit
from veca.errors import ConfigError, WeightsError
from veca.model import Veca
from veca.teachers.base import UNKNOWN_LICENCE, Teacher, TeacherError, weight_and_bias
from veca.weights import load, read_provenance
from veca.weights.tensors import content_hash, opened, read_file, write_file

DENSE_TYPE = "dense-vit"
TENSORS = "model.safetensors"
_HEADER = "dense_vit_config"
_PROVENANCE = "dense_vit_provenance"


class OurTeacher(Teacher):
    """A `Veca` (at one budget) or a `DenseVit`: its first core or CLS, and its patches.

    The model itself is frozen by this; pass a copy of one that is to be trained on.
    """

    def __init__(
        self,
        model: Veca | DenseVit,
        *,
        name: str,
        cores: int | None = None,
        licence: str = UNKNOWN_LICENCE,
        source: str | None = None,
    ) -> None:
        if cores is not None and not isinstance(model, Veca):
            raise TeacherError("cores= sets the budget of a VECA model; a dense ViT has none.")
        config = model.config
        super().__init__(
            name=name,
            width=config.feature_width,
            stride=config.patch_size,
            licence=licence,
            image_mean=config.image_mean,
            image_std=config.image_std,
            source=source,
        )
        self.model = model
        self.cores = check_budget(cores, config.num_cores) if isinstance(model, Veca) else None
        self._hash = content_hash(model.state_dict())
        self.freeze()

    def _extract(self, images: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(images) if self.cores is None else self.model(images, cores=self.cores)
        return out.cls, out.patches

    def _patch_convolution(self) -> tuple[Tensor, Tensor] | None:
        return weight_and_bias(self.model.patch_embed)

    def _compilable(self) -> list[nn.Module]:
        return list(self.model.blocks)

    def _weights_sha256(self) -> str | None:
        return self._hash

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "cores": self.cores, "config": self.model.config.to_dict()}


def load_veca(weights: str, *, cores: int | None = None) -> OurTeacher:
    """Any weights that `veca.load` takes, at the budget `cores` (default: all)."""
    try:
        model = load(weights)
        provenance = read_provenance(weights)
    except WeightsError as error:
        raise TeacherError(str(error)) from error
    licence = _licence(provenance)
    name = f"veca:{weights}"
    return OurTeacher(model, name=name, cores=cores, licence=licence, source=name)


def save_dense_vit(
    model: DenseVit,
    path: str | os.PathLike[str],
    *,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a `DenseVit` as one `.safetensors` file, or into a folder as `model.safetensors`.

    Its configuration and `provenance` (plain JSON values) travel in the file's header.
    """
    target = files.place_for(path)
    if target.suffix != ".safetensors":
        target = target / TENSORS
    state = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    fields = {"model_type": DENSE_TYPE, **model.config.to_dict()}
    metadata = {"format": "pt", _HEADER: json.dumps(fields)}
    metadata[_PROVENANCE] = files.to_json(dict(provenance or {}))
    write_file(state, target, metadata)
    return target


def is_dense_vit(path: Path) -> bool:
    """Whether `save_dense_vit` wrote this file, or one in this folder."""
    file = path / TENSORS if path.is_dir() else path
    try:
        with opened(file) as tensors:
            return _HEADER in (tensors.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return False


def read_dense_vit(path: str | os.PathLike[str]) -> tuple[DenseVit, dict[str, Any]]:
    """The model that `save_dense_vit` wrote, in eval mode, and its provenance."""
    place = Path(path).expanduser()
    file = place / TENSORS if place.is_dir() else place
    if not file.is_file():
        raise TeacherError(f"there is no {file}; save_dense_vit writes such a file.")
    state, metadata = read_file(file, TeacherError)
    fields = files.parse_json(metadata.get(_HEADER, "{}"), file, TeacherError)
    provenance = files.parse_json(metadata.get(_PROVENANCE, "{}"), file, TeacherError)
    if fields.pop("model_type", None) != DENSE_TYPE:
        raise TeacherError(f"{file} holds no dense ViT; save_dense_vit writes such a file.")
    try:
        config = VecaConfig.from_dict(fields)
        if config.depth > len(state):
            raise ConfigError(f"{len(state)} tensors are too few for {config.depth} blocks")
        with torch.device("meta"):  # a silly width must not be built
            model = DenseVit(config)
        model.load_state_dict({name: t.float() for name, t in state.items()}, assign=True)
    except (ConfigError, RuntimeError) as error:
        raise TeacherError(
            f"{file}: the tensors do not fit its configuration ({error}); write it again."
        ) from error
    bad = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise TeacherError(f"{file}: NaN or infinite numbers in {bad[0]}; write it again.")
    return model.eval(), provenance


def load_dense_vit(path: str) -> OurTeacher:
    """The dense ViT in a file or a folder."""
    model, provenance = read_dense_vit(path)
    name = f"{DENSE_TYPE}:{path}"
    return OurTeacher(model, name=name, licence=_licence(provenance), source=name)


def _licence(provenance: Mapping[str, Any]) -> str:
    for key in ("licence", "license"):
        if provenance.get(key):
            return str(provenance[key])
    teacher = provenance.get("teacher")
    if isinstance(teacher, Mapping) and teacher.get("licence"):
        return f"unknown (its teacher's: {teacher['licence']})"
    return UNKNOWN_LICENCE
