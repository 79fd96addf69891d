"""From what a user writes to a teacher that is ready to run."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch

from veca._util.device import usable_device
from veca.dense import DenseVit
from veca.errors import suggest
from veca.model import Veca
from veca.teachers.base import Teacher, TeacherError
from veca.teachers.efficientnet import VARIANTS, load_efficientnet
from veca.teachers.folder import CONFIG, OPEN_CLIP_CONFIG, ModelFolder
from veca.teachers.huggingface import load_transformers
from veca.teachers.openclip import load_open_clip
from veca.teachers.ours import DENSE_TYPE, OurTeacher, is_dense_vit, load_dense_vit, load_veca
from veca.teachers.registry import KNOWN, KnownTeacher
from veca.teachers.timm_models import load_timm
from veca.weights import hub, names

SCHEMES = ("transformers", "open_clip", "timm", "veca", DENSE_TYPE)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_teacher(
    spec: str | os.PathLike[str] | Teacher | Veca | DenseVit,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    feature: str = "cls",
    cores: int | None = None,
    autocast: bool = False,
    allow_remote_code: bool = False,
    compile: bool = False,
) -> Teacher:
    """A frozen teacher, on `device` (by default the CPU), computing in `dtype` (float32).

    Args:
        spec: one of

            - a short name: `dinov3-vitb16`, `clip-vitb16`, `efficientnet-lite2`, ...
              (`list_teachers()` has them all);
            - a hub id, `owner/name` or `owner/name@revision`, or a local folder, of a model of
              transformers (`transformers:...` says so outright) or of OpenCLIP (`open_clip:...`);
            - `timm:NAME`;
            - `veca:WEIGHTS`, whatever `veca.load` takes, or `dense-vit:PATH`;
            - a `Veca` or a `DenseVit` that is in memory already, of which a copy is taken; or a
              teacher, which stays as and where it is unless told otherwise.
        dtype: of the weights and the computation; features come out as float32 in any case.
        feature: the global feature, for models of transformers and OpenCLIP: "cls" is the model's
            own (see `veca.teachers.huggingface`), "mean" the mean of its dense features, and
            "projected" CLIP's joint space with texts.
        cores: the budget of a VECA teacher.
        autocast: keep the weights in float32 and compute under autocast to `dtype`: more exact.
        allow_remote_code: run Python code that comes with a hub repository (RADIO needs that).
            Only for repositories you trust.
        compile: compile its blocks with torch.compile; falls back to running them as they are.

    Raises:
        TeacherError: it cannot be found, fetched or loaded; the message says why and what to do.
        MissingExtraError: it needs a package that is not installed.
    """
    if dtype is not None and dtype not in _DTYPES:
        known = ", ".join(str(x) for x in _DTYPES)
        raise TeacherError(f"a teacher's dtype must be one of {known}, got {dtype!r}.")
    if autocast and dtype is None:
        raise TeacherError("autocast=True needs a dtype to compute in, such as torch.bfloat16.")
    place = None if device is None else usable_device(device)
    options: dict[str, Any] = {"feature": feature, "allow_remote_code": allow_remote_code}
    teacher = _find(spec, cores, options)
    if cores is not None and not (isinstance(teacher, OurTeacher) and teacher.cores == cores):
        raise TeacherError(f"cores= is the budget of a VECA teacher; {teacher.name} has none.")
    if feature != "cls" and getattr(teacher, "feature", "cls") != feature:
        raise TeacherError(
            f"feature={feature!r} can be chosen for models of transformers and OpenCLIP only; "
            f"{teacher.name} has one global feature."
        )
    if place is not None:
        teacher.to(place)
    if dtype is not None:
        teacher.to(torch.float32 if autocast else dtype)
        teacher.autocast(dtype if autocast and dtype != torch.float32 else None)
    if compile:
        teacher.compile()
    return teacher


def _find(spec: object, cores: int | None, options: dict[str, Any]) -> Teacher:
    if isinstance(spec, Teacher):
        return spec
    if isinstance(spec, (Veca, DenseVit)):
        return OurTeacher(copy.deepcopy(spec), name=type(spec).__name__.lower(), cores=cores)
    if isinstance(spec, os.PathLike):
        return _from_path(Path(spec).expanduser(), str(spec), cores, options)
    if not isinstance(spec, str) or not spec.strip():
        raise TeacherError(
            "a teacher is named by a short name, a hub id, a folder or scheme:name, got "
            f"{spec!r}; list_teachers() has the short names."
        )
    if spec in KNOWN:
        return _known(KNOWN[spec], options)
    scheme, colon, rest = spec.partition(":")
    if colon and scheme in SCHEMES:
        return _by_scheme(scheme, rest, spec, cores, options)
    path = Path(spec).expanduser()
    if names.exists(path):
        names.say_shadowed(spec)
        return _from_path(path, spec, cores, options)
    if hub.is_repo(spec):
        return _from_folder(ModelFolder.from_hub(spec), spec, options)
    if names.find(spec) is not None:
        return load_veca(spec, cores=cores)
    if colon and len(scheme) > 1 and "/" not in scheme:
        raise TeacherError(f"unknown kind of teacher {suggest(scheme, SCHEMES)}")
    if path.is_absolute() or len(path.parts) > 1:
        raise TeacherError(
            f"there is no folder {spec}, and it is no hub id (owner/name); check the path."
        )
    raise TeacherError(
        f"unknown teacher {suggest(spec, KNOWN)} Or give a hub id (owner/name), a folder, or one "
        f"of {', '.join(f'{scheme}:...' for scheme in SCHEMES)}."
    )


def _known(known: KnownTeacher, options: dict[str, Any]) -> Teacher:
    if known.name in VARIANTS:
        return load_efficientnet(known.name)
    scheme, _, rest = known.spec.partition(":")
    if known.remote_code and not options["allow_remote_code"]:
        raise TeacherError(
            f"the teacher {known.name} runs Python code from the hub's {known.hub_id}, which is "
            "never done unasked; if you trust that repository, pass allow_remote_code=True."
        )
    teacher = _by_scheme(scheme, rest, known.name, None, {**options, "licence": known.licence})
    width = known.width if options["feature"] == "cls" else teacher.width
    if (teacher.width, teacher.stride) != (width, known.stride):
        raise TeacherError(
            f"the hub's {known.hub_id} should be {known.width} wide with patches of {known.stride} "
            f"pixels, but is {teacher.width} wide with {teacher.stride}; it is not the model that "
            f"{known.name} stands for."
        )
    return teacher


def _by_scheme(
    scheme: str, rest: str, spec: str, cores: int | None, options: dict[str, Any]
) -> Teacher:
    if not rest:
        raise TeacherError(f"{spec!r} names no model; write {scheme}:NAME.")
    if scheme == "timm":
        return load_timm(rest)
    if scheme == "veca":
        return load_veca(rest, cores=cores)
    if scheme == DENSE_TYPE:
        return load_dense_vit(rest)
    path = Path(rest).expanduser()
    if names.exists(path):
        names.say_shadowed(rest)
        _require_folder(path)
        folder = ModelFolder.local(path)
    elif hub.is_repo(rest):
        folder = ModelFolder.from_hub(rest)
    else:
        raise TeacherError(
            f"there is no folder {rest}, and it is no hub id (owner/name); check the name."
        )
    source = f"{scheme}:{rest}"
    if scheme == "open_clip":
        return load_open_clip(folder, name=spec, source=source, **_without_code(options))
    return load_transformers(folder, name=spec, source=source, **options)


def _from_path(path: Path, spec: str, cores: int | None, options: dict[str, Any]) -> Teacher:
    """A folder or a file, by what it holds."""
    if not names.exists(path):
        raise TeacherError(f"there is no folder {path}; check the path.")
    if is_dense_vit(path):
        return load_dense_vit(str(path))
    if path.is_file():
        return load_veca(str(path), cores=cores)
    folder = ModelFolder.local(path)
    if (folder.read_json(CONFIG) or {}).get("model_type") == "veca":
        return load_veca(str(path), cores=cores)
    return _from_folder(folder, spec, options)


def _from_folder(folder: ModelFolder, spec: str, options: dict[str, Any]) -> Teacher:
    if not folder.has(CONFIG) and folder.has(OPEN_CLIP_CONFIG):
        return load_open_clip(folder, name=spec, source=spec, **_without_code(options))
    return load_transformers(folder, name=spec, source=spec, **options)


def _without_code(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "allow_remote_code"}


def _require_folder(path: Path) -> None:
    if not path.is_dir():
        raise TeacherError(f"{path} is a file; give the folder with {CONFIG} and the weights.")
