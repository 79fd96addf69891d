"""Backbones by name, as a user asks for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch

from veca._util.numbers import parse_numbers
from veca.checks import asked_keep, check_agreement
from veca.config import AUTO
from veca.errors import InputError
from veca.precision import check_precision, in_precision
from veca.probe.backbone import (
    BASELINE,
    TEACHER,
    Backbone,
    DenseBackbone,
    ElasticBackbone,
    TeacherBackbone,
)
from veca.probe.blind import NAME as BLIND
from veca.probe.blind import BlindBackbone
from veca.weights import load
from veca.weights.names import public_name


def load_backbones(
    weights: Sequence[str] = (),
    *,
    teacher: str | None = None,
    baselines: Sequence[str] = (),
    budgets: Sequence[int] | None = None,
    keep: Sequence[float | str] | None = None,
    agreement: float | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: str | Sequence[str] | None = None,
    allow_remote_code: bool = False,
) -> list[Backbone]:
    """The rows of a table: the teacher, the baselines, then the weights at every budget.

    Args:
        weights: VECA weights (a name, path or hub id) or the path of a dense control; "NAME=PATH"
            gives the row another name than the last part of the path.
        teacher, baselines: names as `veca.teachers.load_teacher` takes them; a baseline may be
            "blind", which sees no image.
        budgets: of VECA weights; by default those of `probe_budgets`.
        keep: shares of patch tokens that go on, for each of the budgets; by default all.
        agreement: with "auto", the promised cosine with the full pass.
        precision: of VECA weights, as `veca.precision.in_precision` takes it, in place of `dtype`;
            of several each has rows of its own, and the first is what the others are compared with.
        allow_remote_code: for teachers that need it.
    """
    from veca.teachers import load_teacher, read_dense_vit
    from veca.teachers.ours import is_dense_vit

    if not weights and not teacher and not baselines:
        raise InputError("nothing to probe; give --weights, --teacher or --baseline.")
    if budgets and not weights:
        raise InputError("--cores are budgets of VECA weights; give --weights.")
    if (keep or agreement) and not weights:
        raise InputError("--keep and --agreement are of VECA weights; give --weights.")
    shares: list[float | str] = [asked_keep(share) for share in keep or [1.0]]
    check_agreement(agreement, None, next((s for s in shares if s == AUTO), None))
    found: list[Backbone] = []
    for spec, role in [(teacher, TEACHER), *((one, BASELINE) for one in baselines)]:
        if spec == BLIND and role == BASELINE:
            found.append(BlindBackbone(device=device))
        elif spec is not None:
            network = load_teacher(
                spec, device=device, dtype=dtype, allow_remote_code=allow_remote_code
            )
            found.append(TeacherBackbone(network, name=public_name(network.name), role=role))
    for source in weights:
        name, path = name_and_path(source)
        if is_dense_vit(Path(path).expanduser()):
            control, _ = read_dense_vit(path)
            found.append(DenseBackbone(control.to(device, dtype), name=name))
            continue
        model = load(path, device=device, dtype=dtype if precision is None else torch.float32)
        at = budgets or probe_budgets(model.config.num_cores)
        if isinstance(precision, str | None):
            model = model if precision is None else in_precision(model, precision)
            found += ElasticBackbone(model, name=name).at(at, shares, agreement)
            continue
        for each in precision:
            # On a GPU a precision changes the model itself.
            one = in_precision(copy.deepcopy(model), each)
            found += ElasticBackbone(one, name=name, precision=each).at(at, shares, agreement)
    return found


def name_and_path(source: str) -> tuple[str, str]:
    """ "NAME=PATH" -> (NAME, PATH); otherwise the last part of the path is the name."""
    name, equals, path = source.partition("=")
    if equals and "/" not in name and not Path(source).exists():
        return name, path
    last = Path(source).name if Path(source).expanduser().exists() else source
    return last.removesuffix(".safetensors"), source


def probe_budgets(num_cores: int) -> list[int]:
    """What a probe measures unless told otherwise: 8, 16, ... and all cores."""
    return sorted({*range(8, num_cores + 1, 8), num_cores})


def parse_precisions(text: str) -> list[str]:
    """'fp32,int8' -> ["fp32", "int8"], by their names of today."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError(f"--precision is a name or several, such as fp32,int8; got {text!r}.")
    return list(dict.fromkeys(check_precision(part) for part in parts))


def parse_budgets(text: str) -> list[int]:
    """'8,16,64' -> [8, 16, 64]; '8,16,...,64' counts on in equal steps."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not any(set(part) <= {".", "…"} for part in parts):
        return list(dict.fromkeys(parse_numbers(text, "--cores")))
    at = next(i for i, part in enumerate(parts) if set(part) <= {".", "…"})
    numbers = parse_numbers(",".join(parts[:at] + parts[at + 1 :]), "--cores")
    if at < 2 or at != len(parts) - 2:
        raise InputError(f"--cores with '...' reads FIRST,SECOND,...,LAST; got {text!r}.")
    step, last = numbers[at - 1] - numbers[at - 2], numbers[-1]
    if step < 1 or (last - numbers[at - 1]) % step:
        raise InputError(f"--cores {text!r}: {last} is not reached in equal steps.")
    return [*numbers[: at - 1], *range(numbers[at - 1], last + 1, step)]
