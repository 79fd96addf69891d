"""Models by name: which there are, one with its weights, one with fresh ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from veca import model as models
from veca._util.device import usable_device
from veca.config import AUTO, PRESETS, VecaConfig
from veca.errors import ConfigError, check_choice
from veca.images.find import natural_key
from veca.model import Veca
from veca.points import OperatingPoint, machine_name, read_point
from veca.precision import in_precision
from veca.weights import hub, names, store
from veca.weights import tensors as ts

TRAINING_ONLY = ("dropout", "rope_shift", "rope_jitter", "rope_rescale")
"""Fields that change nothing in what weights compute once they are trained."""


def list_models(filter: str | Iterable[str] = "", *, pretrained: bool = False) -> list[str]:
    """Names that `create_model` takes.

    >>> veca.list_models("*small*", pretrained=True)

    Args:
        filter: a pattern with the wildcards * and ?, or several; without a wildcard, a part of the
            name.
        pretrained: only those that there are weights of, on this machine or on the hub.
    """
    found = {*names.available(), *names.NAMED}
    if not pretrained:
        found |= set(PRESETS)
    patterns = [filter] if isinstance(filter, str) else list(filter)
    whole = [p if any(sign in p for sign in "*?[") else f"*{p}*" for p in patterns]
    matching = [name for name in found if any(fnmatchcase(name, pattern) for pattern in whole)]
    return sorted(matching, key=natural_key)


def load(
    source: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = AUTO,
    backend: str = "auto",
    revision: str | None = None,
    point: str | os.PathLike[str] | OperatingPoint | None = None,
) -> Veca:
    """A model with stored weights, in eval mode. Nothing in a file is ever executed.

    Args:
        source: a name (`veca_small_patch16`, or `small`), a folder, a `.safetensors` file, or a
            repository of the Hugging Face hub, `owner/name` or `owner/name@revision`. What exists
            on this machine comes first.
        dtype: of the weights in memory; None keeps the stored one. By default that of the point,
            or float32.
        backend: the attention backend, as in `create_model`.
        revision: of a repository: a branch, a tag or, to pin it, the hash of a commit. The same as
            `owner/name@revision`.
        point: the point.json of `veca tune`. Calls that say neither `cores` nor `keep` work there,
            and `model.preprocess` takes its size. A point of other weights or of another machine
            is a warning that names both.
    """
    if revision is not None:
        source = hub.at_revision(source, revision)
    chosen = None if point is None else read_point(point)
    precision = None
    if isinstance(dtype, str):
        check_choice("dtype", dtype, [AUTO])
        dtype = torch.float32
        precision = chosen.precision if chosen else None
    ts.check_dtype(dtype)
    place = usable_device(device)
    path = names.locate(source, (*store.FILES, *store.BESIDE))
    model = store.load_local(path, device=place, dtype=dtype, backend=backend)
    model.name = names.called(source, path)
    if chosen is not None:
        chosen.warn_of_others(
            weights=model.name or os.fspath(source),
            sha256=store.read_hash(path),
            machine=machine_name(place),
        )
        model.point = chosen
    return model if precision is None else in_precision(model, precision)


def create_model(
    name: str | VecaConfig,
    pretrained: bool = False,
    *,
    num_classes: int = 0,
    backend: str = "auto",
    **changes: object,
) -> Veca:
    """A model: with fresh weights, or with stored ones.

    >>> veca.create_model("tiny", pretrained=True)      # as veca.load("tiny")
    >>> veca.create_model("small", output_width=768)    # fresh

    Args:
        name: a preset's name or a configuration; with `pretrained`, what `veca.load` takes.
        pretrained: take the weights of that name. They are in evaluation mode.
        num_classes: 0, as timm calls a model without a head; there is no other here.
        backend: the attention backend: "auto" takes the fastest that fits the input.
        changes: fields of the configuration. Stored weights keep all of theirs but those of
            `TRAINING_ONLY`, such as the dropout.
    """
    if num_classes:
        raise ConfigError(
            f"a model gives features and has no head for num_classes={num_classes}; put a linear "
            "layer on model(images).cls, or let timm.create_model add one after import "
            "veca.integrations.timm."
        )
    if not pretrained:
        return models.create_model(name, backend=backend, **changes)
    if isinstance(name, VecaConfig):
        raise ConfigError(
            "a configuration has no weights of its own; give the name of weights, or leave out "
            "pretrained=True."
        )
    model = load(name, backend=backend)
    config = model.config.replace(**changes)
    for field in changes:
        stored, asked = getattr(model.config, field), getattr(config, field)
        if field not in TRAINING_ONLY and stored != asked:
            raise ConfigError(
                f"the weights {name!r} have {field}={stored!r}, got {asked!r}; leave it out, or "
                "leave out pretrained=True for fresh weights."
            )
    if config == model.config:
        return model
    changed = ts.fill(config, model.state_dict(), backend=backend)
    changed.name = model.name
    changed.take_origin(model)
    return changed
