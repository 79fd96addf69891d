"""Exporting a model: one file a budget, each compared with the model before it takes its place."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from veca._util import files
from veca._util.numbers import count
from veca.checks import check_budget, check_keep, check_model
from veca.errors import ExportError, InputError, OutputError, check_choice
from veca.export import onnx_file, torch_file, verify
from veca.export.arranged import arrange
from veca.export.graph import TRACED_BATCH, TRACED_GRID, frozen_copy, report_of, trace
from veca.export.int8_graph import rounding_of
from veca.export.precision import (
    NAMES,
    check_gate,
    check_precisions,
)
from veca.merging import LEAST_OPEN_KEEP
from veca.model import Veca
from veca.quantization import Agreement, equalised
from veca.version import __version__
from veca.weights import weights_hash
from veca.weights.store import file_hash

FORMATS = {"onnx": ".onnx", "torch-export": ".pt2"}
"""Formats, and the suffixes of their files."""
ANY = "any"
"""In place of a budget or a share of tokens: one file that takes it as an input."""

Size = tuple[int, int]

_WRITERS = {"onnx": onnx_file.write, "torch-export": torch_file.write}
_RUNNERS: dict[str, Callable[[Path], verify.Runner]] = {
    "onnx": onnx_file.OnnxRunner,
    "torch-export": torch_file.TorchRunner,
}


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how far from the model it is."""

    path: Path
    report: Path
    """The JSON beside it: inputs, outputs, versions, every check."""
    format: str
    cores: int | str
    """The budget, or "any"."""
    keep: float | str
    """The share of patch tokens that go on, or "any"."""
    dtype: str
    """float32, float16, bfloat16 or int8."""
    size: Size | None
    """(height, width) in pixels, or None if any on the grid will do."""
    bytes: int
    checks: tuple[verify.FileCheck, ...]

    @property
    def max_difference(self) -> float:
        """Largest absolute difference from the float32 model, over all outputs and checks."""
        return max(check.max_difference for check in self.checks)

    @property
    def agreement(self) -> Agreement:
        """Agreement of CLS and patches with the float32 model, the mean over the photos.

        The least of all budgets and shares of tokens; in a file for any budget of those with 8
        cores or more: `checks` has the others.
        """
        points = verify.by_point(self.checks)
        many = [point for point in points if point.cores >= verify.FEW_CORES] or points
        found = [point.agreement for point in (many if self.cores == ANY else points)]
        return Agreement(*(min(one[name] for one in found) for name in ("cls", "patches")))


def export_model(
    model: Veca,
    out: str | os.PathLike[str],
    *,
    to: str = "onnx",
    cores: Sequence[int | str] | int | str = ANY,
    keep: float | str | None = None,
    size: Size | None = None,
    precision: str | Sequence[str] = "fp32",
    name: str = "veca",
    check_sizes: Sequence[Size] | None = None,
    data: verify.Photo | Sequence[verify.Photo] | None = None,
    gate: Agreement | tuple[float, float] | float | None = None,
    progress: Callable[[str], None] | None = None,
    widen: bool = False,
    dtype: str | None = None,
) -> list[Exported]:
    """Write a model as files that run without this package, each checked against it.

    Every file takes `images` [batch, 3, height, width], float32 and normalised, and gives `cls`
    [batch, D], `patches` [batch, N, D], `core_tokens` [batch, C, D] and `core_xy` [batch, C, 2],
    the parts of `VecaOutput`. The batch is open, and so are height and width unless `size` is
    given. Each file is compared with the float32 model on photos; one that fails is not written.

    Args:
        out: the folder to write to, made if need be.
        to: "onnx", or "torch-export" for a .pt2 file.
        cores: a budget or several, one file each; "any" makes one file with an input `cores`
            (int64, no axes).
        keep: the share of patch tokens that go on, as in `Veca.forward`; part of the file. "any"
            makes a file with an input `keep` (float32, no axes; 0.25 to 1).
        size: (height, width) in pixels, to fix them.
        precision: "fp32"; "fp16" to compute in half precision, features come out in it; "bf16",
            the same in a .pt2 file, while ONNX keeps the weights so and computes in float32;
            "int8" for the linear layers (ONNX only). Several: one file each.
        name: what the files' names begin with.
        check_sizes: (height, width) at which an open file is compared with the model.
        data: photos to compare on, and to prepare the weights of int8 with: files, folders,
            patterns. By default those of the package.
        gate: the least agreement, for a precision below fp32: (CLS, patches), or one for both.
            By default `veca.export.GATES`.
        progress: is told in words what is being done.
        widen: with fp16 in ONNX: keep the weights in half precision, but compute in float32, as
            runtimes can that have neither bfloat16 nor arithmetic in half precision.
        dtype: what 0.1 called the precision.
    """
    check_model(model, "export_model")
    precisions = check_precisions(precision, dtype)
    floors = {one: check_gate(gate, one) for one in precisions}
    share = ANY if keep == ANY else check_keep(keep)
    budgets = _check(model, to, cores, size, precisions, name, check_sizes)
    photos = verify.photos_for(data)
    folder = files.place_for(out)
    _require_writable(folder)
    say = progress or (lambda _: None)
    reference = frozen_copy(model, torch.float32)
    tensors = weights_hash(model)
    written = []
    for one, budget in itertools.product(precisions, budgets):
        facts = file_facts(model, to, budget, share, size, one, tensors, widen)
        path = folder / f"{_stem(name, budget, share, size, one)}{FORMATS[to]}"
        with files.temporary_beside(path) as temporary:
            say(f"tracing {path.name}")
            program = trace(
                _to_trace(model, to, one, photos, facts["computes_in"]),
                None if budget == ANY else int(budget),
                size,
                None if share == ANY else float(share),
            )
            with files.output_errors(path):
                _WRITERS[to](program, temporary, facts)
            del program  # it holds the weights, as does what comes next
            checks = []
            for check in verify.checks(
                _RUNNERS[to](temporary),
                reference,
                cores=_budgets_to_check(budget, model.config.num_cores),
                keeps=_OPEN_KEEPS if share == ANY else [float(share)],
                sizes=[size] if size else _sizes_to_check(model, check_sizes),
                photos=photos,
            ):
                say(
                    f"checking {path.name}: {check.batch} x {check.height} x {check.width}, "
                    f"{check.cores} cores, differs by {check.max_difference:.1e}"
                )
                floor = floors[one]
                _require_same(check, path, one, floor and verify.looser(floor))
                checks.append(check)
            for point in verify.by_point(checks):
                if budget != ANY or point.cores >= verify.FEW_CORES:
                    _require_same(point, path, one, floors[one])
            written.append(_keep(temporary, path, facts, size, checks, floors[one], data))
    return written


_OPEN_KEEPS = (1.0, 0.5, LEAST_OPEN_KEEP)
"""Where a file for any share is compared with the model."""


def _to_trace(
    model: Veca, to: str, precision: str, photos: Sequence[Path], computes_in: str
) -> Veca:
    """What is traced for a precision. Files of int8, too, begin in float32."""
    if precision == "int8" and model.config.in_channels == 3 and model.quantization is None:
        model = equalised(model, photos)
    frozen = frozen_copy(
        model, torch.float32 if precision == "int8" else getattr(torch, computes_in)
    )
    return arrange(frozen) if to == "onnx" else frozen


def _require_writable(folder: Path) -> None:
    """Let a folder that cannot be written to say so now, not after minutes of tracing."""
    try:
        with files.temporary_beside(folder / "test"):
            pass
    except OutputError as error:
        cause = error.__cause__
        raise files.cannot_write(folder, cause) if isinstance(cause, OSError) else error from cause


def _keep(
    temporary: Path,
    path: Path,
    facts: dict[str, Any],
    size: Size | None,
    checks: list[Any],
    gate: Agreement | None,
    data: object,
) -> Exported:
    """Put a file that passed its checks in place, and the report beside it."""
    report = report_of(path)
    entry = Exported(
        path=path,
        report=report,
        format=facts["format"],
        cores=facts["cores"],
        keep=facts.get("keep", 1.0),
        dtype=facts["dtype"],
        size=size,
        bytes=temporary.stat().st_size,
        checks=tuple(checks),
    )
    content = {
        "file": path.name,
        "bytes": entry.bytes,
        "sha256": file_hash(temporary),
        **facts,
        "verification": _verification(entry, gate, data),
    }
    with files.output_errors(report):
        report.unlink(missing_ok=True)  # never an old report beside a new file
    files.commit(temporary, path)
    files.atomic_write_json(report, content)
    return entry


def _check(
    model: Veca,
    to: str,
    cores: Sequence[int | str] | int | str,
    size: Size | None,
    precisions: Sequence[str],
    name: str,
    check_sizes: Sequence[Size] | None,
) -> list[int | str]:
    """Refuse what cannot be exported, before any work; return the budgets, each once."""
    check_choice("export format", to, FORMATS)
    if model.precision != "fp32":
        raise InputError(
            f"this model computes in {model.precision}, which no file can take over; export the "
            f"float32 model, with precision={model.precision!r} for such a file."
        )
    if "int8" in precisions and to != "onnx":
        raise InputError(f"int8 files are ONNX; for {to!r} take fp16 or bf16, or to='onnx'.")
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise InputError(
            f"name must be of letters, digits, '.', '_' and '-', to begin file names; got {name!r}."
        )
    patch = model.config.patch_size
    for height, width in [*([size] if size is not None else []), *(check_sizes or [])]:
        if height < patch or width < patch or height % patch or width % patch:
            raise InputError(
                f"a size must be in multiples of the patch size {patch}, got {height} x {width}."
            )
    listed = [cores] if isinstance(cores, (int, str)) else list(cores)
    if not listed:
        raise InputError("cores is empty; give budgets such as 8 and 64, or 'any'.")
    budgets = [b if b == ANY else _budget(b, model.config.num_cores) for b in listed]
    if to == "onnx":
        onnx_file.require_onnx()
        number = (
            2 if list(precisions) == ["fp16"] else 4
        )  # also where a smaller one is made of a larger
        onnx_file.check_fits(number * sum(p.numel() for p in model.parameters()))
    return list(dict.fromkeys(budgets))


def _budget(cores: int | str | None, num_cores: int) -> int:
    if cores is None or isinstance(cores, str):
        raise InputError(
            f"a budget is a whole number from 1 to {num_cores}, or 'any'; got {cores!r}."
        )
    return check_budget(cores, num_cores)


def _stem(
    name: str, budget: int | str, keep: float | str, size: Size | None, precision: str
) -> str:
    parts = [name, "anycores" if budget == ANY else f"cores{budget}"]
    parts += ["anykeep"] if keep == ANY else [f"keep{keep:g}"] if float(keep) < 1 else []
    parts += [f"{size[0]}x{size[1]}"] if size else []
    parts += [NAMES[precision]] if precision != "fp32" else []
    return "_".join(parts)


def file_facts(
    model: Veca,
    to: str,
    budget: int | str,
    keep: float | str,
    size: Size | None,
    precision: str,
    tensors: str,
    widen: bool,
) -> dict[str, Any]:
    c = model.config
    budget_input = {"cores": f"int64 [], from 1 to {c.num_cores}"} if budget == ANY else {}
    if keep == ANY:
        budget_input["keep"] = f"float32 [], from {LEAST_OPEN_KEEP} to 1"
    # onnxruntime has no bfloat16 on CPUs.
    wide = to == "onnx" and (widen or precision != "fp16")
    computes_in = "float32" if wide and precision != "int8" else NAMES[precision]
    dtype = "float32" if wide else NAMES[precision]  # of what comes out
    height, width = size or (f"{c.patch_size}*rows", f"{c.patch_size}*columns")
    patches = "rows*columns" if size is None else size[0] * size[1] // c.patch_size**2
    count = "cores" if budget == ANY else budget
    d = c.feature_width
    packages = ("torch", "onnx", "onnxscript", "onnxruntime") if to == "onnx" else ("torch",)
    return {
        "format": to,
        "cores": budget,
        **({"keep": keep} if keep != 1 else {}),
        "size": "dynamic" if size is None else list(size),
        "dtype": NAMES[precision],
        "computes_in": computes_in,
        **({"left_in_float32": list(rounding_of(model).leave)} if precision == "int8" else {}),
        "patch_size": c.patch_size,
        "image_mean": list(c.image_mean),
        "image_std": list(c.image_std),
        "inputs": {
            "images": f"float32 [batch, {c.in_channels}, {height}, {width}], normalised",
            **budget_input,
        },
        "outputs": {
            "cls": f"{dtype} [batch, {d}]",
            "patches": f"{dtype} [batch, {patches}, {d}], row by row",
            "core_tokens": f"{dtype} [batch, {count}, {d}]",
            "core_xy": f"float32 [batch, {count}, 2], (x, y) in [-1, 1]",
        },
        "config": c.to_dict(),
        "weights_sha256": tensors,
        "versions": {"veca": __version__, **{name: _version(name) for name in packages}},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _budgets_to_check(budget: int | str, num_cores: int) -> list[int]:
    if budget != ANY:
        return [int(budget)]
    return sorted({1, min(8, num_cores), num_cores})


def _sizes_to_check(model: Veca, sizes: Sequence[Size] | None) -> list[Size]:
    return verify.sizes_on_grid(model.config.patch_size, sizes or verify.SIZES)


_ADVICE = {
    "fp32": "please report this with the versions of torch and onnxruntime",
    "fp16": "it may need a wider range of numbers: take bf16 or fp32, or give a lower gate",
    "bf16": "take fp16 or fp32, or give a lower gate",
    "int8": "take fp16 or bf16, give a lower gate, or export weights of which `veca quantize "
    "--leave` left layers in float32",
}


def _require_same(
    check: verify.FileCheck, path: Path, precision: str, gate: Agreement | None
) -> None:
    wrong = check.wrong(gate)
    if wrong is None:
        return
    keep = f", keep {check.keep:g}" if check.keep < 1 else ""
    raise ExportError(
        f"{path.name} is not written: with {count(check.cores, 'core')}{keep} and "
        f"{count(check.batch, 'photo')}, the first of {check.height} x {check.width}, {wrong}; "
        f"{_ADVICE[precision]}."
    )


def _verification(entry: Exported, gate: Agreement | None, data: object) -> dict[str, Any]:
    limits = (
        {"allowed": f"{verify.ABSOLUTE} absolute"}
        if gate is None
        else {"gate": gate._asdict(), "gate_of_a_check": verify.looser(gate)._asdict()}
    )
    return {
        "against": "the model in float32 on a CPU",
        "on": "photos of the package" if data is None else "photos of the user",
        "runtime": "onnxruntime" if entry.format == "onnx" else "torch",
        "traced": {
            "batch": TRACED_BATCH,
            "patches": "the size of the file" if entry.size else list(TRACED_GRID),
        },
        **limits,
        "max_difference": entry.max_difference,
        "agreement": entry.agreement._asdict(),
        "checks": [check.to_dict() for check in entry.checks],
    }
