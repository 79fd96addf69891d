"""Exporting a model: one file a budget, each compared with the model before it takes its place."""

from __future__ import annotations

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
from veca.export.graph import OUTPUTS, TRACED_BATCH, TRACED_GRID, frozen_copy, report_of, trace
from veca.model import Veca
from veca.version import __version__
from veca.weights import weights_hash
from veca.weights.store import file_hash

FORMATS = {"onnx": ".onnx", "torch-export": ".pt2"}
"""Formats, and the suffixes of their files."""
DTYPES = {"float32": torch.float32, "float16": torch.float16}
"""What an exported file can compute in."""
ANY = "any"
"""In place of a budget: one file that takes the budget as its second input."""

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
    keep: float
    """The share of patch tokens that go on."""
    dtype: str
    size: Size | None
    """(height, width) in pixels, or None if any on the grid will do."""
    bytes: int
    checks: tuple[verify.FileCheck, ...]

    @property
    def max_difference(self) -> float:
        """Largest absolute difference from the float32 model, over all outputs and checks."""
        return max(check.max_difference for check in self.checks)


def export_model(
    model: Veca,
    out: str | os.PathLike[str],
    *,
    to: str = "onnx",
    cores: Sequence[int | str] | int | str = ANY,
    keep: float | str | None = None,
    size: Size | None = None,
    dtype: str = "float32",
    name: str = "veca",
    check_sizes: Sequence[Size] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Exported]:
    """Write a model as files that run without this package, each checked against it.

    Every file takes `images` [batch, 3, height, width], float32 and normalised, and gives `cls`
    [batch, D], `patches` [batch, N, D], `core_tokens` [batch, C, D] and `core_xy` [batch, C, 2],
    the parts of `VecaOutput`. The batch is open, and so are height and width unless `size` is
    given. A file that fails its checks is not kept.

    Args:
        out: the folder to write to, made if need be.
        to: "onnx", or "torch-export" for a .pt2 file.
        cores: a budget or several, one file each; "any" makes one file with a second input
            `cores` (int64, no axes).
        keep: the share of patch tokens that go on, as in `Veca.forward`; part of the file. Such a
            file is compared with the model on photos as well.
        size: (height, width) in pixels, to fix them.
        dtype: "float32", or "float16" to compute in half precision; features come out in it.
        name: what the files' names begin with.
        check_sizes: (height, width) at which an open file is compared with the model.
        progress: is told in words what is being done.
    """
    check_model(model, "export_model")
    budgets = _check(model, to, cores, size, dtype, name, check_sizes)
    share = check_keep(keep)
    folder = files.place_for(out)
    _require_writable(folder)
    say = progress or (lambda _: None)
    reference = frozen_copy(model, torch.float32)
    traced = reference if dtype == "float32" else frozen_copy(model, DTYPES[dtype])
    tensors = weights_hash(model)
    written = []
    for budget in budgets:
        facts = _facts(model, to, budget, share, size, dtype, tensors)
        path = folder / f"{_stem(name, budget, share, size, dtype)}{FORMATS[to]}"
        with files.temporary_beside(path) as temporary:
            say(f"tracing {path.name}")
            program = trace(traced, None if budget == ANY else int(budget), size, share)
            with files.output_errors(path):
                _WRITERS[to](program, temporary, facts)
            del program  # it holds the weights, as does what comes next
            checks = []
            for check in verify.checks(
                _RUNNERS[to](temporary),
                reference,
                cores=_budgets_to_check(budget, model.config.num_cores),
                keep=share,
                sizes=[size] if size else _sizes_to_check(model, check_sizes),
            ):
                say(
                    f"checking {path.name}: {check.batch} x {check.height} x {check.width}, "
                    f"{check.cores} cores, differs by {check.max_difference:.1e}"
                )
                _require_same(check, path, DTYPES[dtype])
                checks.append(check)
            written.append(_keep(temporary, path, facts, size, checks))
    return written


def _require_writable(folder: Path) -> None:
    """Let a folder that cannot be written to say so now, not after minutes of tracing."""
    try:
        with files.temporary_beside(folder / "test"):
            pass
    except OutputError as error:
        cause = error.__cause__
        raise files.cannot_write(folder, cause) if isinstance(cause, OSError) else error from cause


def _keep(
    temporary: Path, path: Path, facts: dict[str, Any], size: Size | None, checks: list[Any]
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
        "verification": _verification(entry),
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
    dtype: str,
    name: str,
    check_sizes: Sequence[Size] | None,
) -> list[int | str]:
    """Refuse what cannot be exported, before any work; return the budgets, each once."""
    check_choice("export format", to, FORMATS)
    check_choice("dtype", dtype, DTYPES)
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
        number = torch.finfo(DTYPES[dtype]).bits // 8
        onnx_file.check_fits(number * sum(p.numel() for p in model.parameters()))
    return list(dict.fromkeys(budgets))


def _budget(cores: int | str | None, num_cores: int) -> int:
    if cores is None or isinstance(cores, str):
        raise InputError(
            f"a budget is a whole number from 1 to {num_cores}, or 'any'; got {cores!r}."
        )
    return check_budget(cores, num_cores)


def _stem(name: str, budget: int | str, keep: float, size: Size | None, dtype: str) -> str:
    parts = [name, "anycores" if budget == ANY else f"cores{budget}"]
    parts += [f"keep{keep:g}"] if keep < 1 else []
    parts += [f"{size[0]}x{size[1]}"] if size else []
    parts += [dtype] if dtype != "float32" else []
    return "_".join(parts)


def _facts(
    model: Veca,
    to: str,
    budget: int | str,
    keep: float,
    size: Size | None,
    dtype: str,
    tensors: str,
) -> dict[str, Any]:
    c = model.config
    budget_input = {"cores": f"int64 [], from 1 to {c.num_cores}"} if budget == ANY else {}
    height, width = size or (f"{c.patch_size}*rows", f"{c.patch_size}*columns")
    patches = "rows*columns" if size is None else size[0] * size[1] // c.patch_size**2
    count = "cores" if budget == ANY else budget
    d = c.feature_width
    packages = ("torch", "onnx", "onnxscript", "onnxruntime") if to == "onnx" else ("torch",)
    return {
        "format": to,
        "cores": budget,
        **({"keep": keep} if keep < 1 else {}),
        "size": "dynamic" if size is None else list(size),
        "dtype": dtype,
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


def _require_same(check: verify.FileCheck, path: Path, dtype: torch.dtype) -> None:
    if check.passes(dtype):
        return
    allowed = check.allowed(dtype)
    worst = max(OUTPUTS, key=lambda name: check.differences[name] / max(allowed[name], 1e-30))
    advice = (
        "its values may be out of the range of float16; export as float32"
        if dtype == torch.float16
        else "please report this with the versions of torch and onnxruntime"
    )
    raise ExportError(
        f"{path.name} is not kept: with {count(check.cores, 'core')} and "
        f"{count(check.batch, 'image')} of {check.height} x {check.width} pixels its {worst} "
        f"differ from the model's by {check.differences[worst]:.2g}, more than "
        f"{allowed[worst]:.2g}; {advice}."
    )


def _turned(entry: Exported) -> dict[str, Any]:
    """How many tokens came out otherwise because other windows merged, and how many may."""
    found = max(share for check in entry.checks for share in check.turned.values())
    return {"turned": found, "turned_allowed": verify.TURNED if entry.dtype == "float16" else 0}


def _verification(entry: Exported) -> dict[str, Any]:
    return {
        "against": "the model in float32 on a CPU, on images of normal noise"
        + (" and on photos" if entry.keep < 1 else ""),
        "runtime": "onnxruntime" if entry.format == "onnx" else "torch",
        "traced": {
            "batch": TRACED_BATCH,
            "patches": "the size of the file" if entry.size else list(TRACED_GRID),
        },
        "allowed": (
            f"{verify.ABSOLUTE} absolute"
            if entry.dtype == "float32"
            else f"{verify.RELATIVE} of the largest value of an output"
        ),
        **(_turned(entry) if entry.keep < 1 else {}),
        "max_difference": entry.max_difference,
        "checks": [check.to_dict() for check in entry.checks],
    }
