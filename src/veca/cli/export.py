"""`veca export`: weights as files that run without this package, each checked against the model."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veca.cli.common import (
    Threads,
    console,
    count,
    parse_keep,
    parse_numbers,
    parse_size,
    renamed,
    say,
)
from veca.errors import InputError

if TYPE_CHECKING:
    from veca.export import Exported


class Format(str, Enum):
    onnx = "onnx"
    torch_export = "torch-export"
    web = "web"


def export(
    weights: Annotated[
        str, typer.Argument(help="A name, a folder, a .safetensors file or a hub id.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the files and their reports, or for the page.")
    ],
    to: Annotated[Format, typer.Option(help="The format.")] = Format.onnx,
    cores: Annotated[
        str,
        typer.Option(
            help="Budgets such as 8,32,64, one file each; 'any' makes one file that takes the "
            "budget as an input."
        ),
    ] = "any",
    keep: Annotated[
        str | None,
        typer.Option(
            help="The share of patch tokens that go on after merging, 0.2 to 1; part of the file. "
            "'any' makes it an input, 0.25 to 1.",
            show_default="1: all",
        ),
    ] = None,
    size: Annotated[
        str, typer.Option(help="dynamic (any on the patch grid), or HEIGHTxWIDTH to fix it.")
    ] = "dynamic",
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, fp16, bf16 or int8; several such as fp32,int8, one file each.",
            show_default="fp32; int8 for a page",
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(hidden=True)] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Photos to compare on: a file, folder or pattern; may be given several times.",
            show_default="those of the package",
        ),
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(
            help="The least agreement with the float32 model, CLS,PATCHES or one for both.",
            show_default="by precision; .998,.996 for int8",
        ),
    ] = None,
    ort: Annotated[
        Path | None,
        typer.Option(
            help="With --to web: the npm package onnxruntime-web, a folder or its .tgz.",
            show_default="from npm",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Begins the files' names.", show_default="the weights' name")
    ] = None,
    check_sizes: Annotated[
        str | None,
        typer.Option(
            help="HEIGHTxWIDTH, ... at which a dynamic file is compared with the model.",
            show_default="224x224,256x384",
        ),
    ] = None,
    threads: Threads = None,
) -> None:
    """Write weights as ONNX or torch.export files that run without this package, or as a page.

    Batch, height and width stay open. Each file is compared with the float32 model on photos, at
    sizes and batches that were not traced; one that fails is not written. A JSON report lies beside
    each file.

    veca export my-weights --to onnx --precision int8 --out exported/

    With --to web OUT becomes a page that runs the network in the visitor's browser, for any file
    server; nothing is sent anywhere.

    veca export my-weights --to web --out site/
    """
    import torch

    from veca.export import ANY, export_model, export_web
    from veca.export.onnx_file import require_onnx
    from veca.export.precision import check_precisions
    from veca.weights import load

    floors = _gate(gate)
    checked = [_sides(part, "--check-sizes") for part in (check_sizes or "").split(",") if part]
    shared: dict[str, Any] = {"check_sizes": checked or None, "data": data or None, "gate": floors}
    if dtype is not None:
        renamed("--dtype", "--precision")
        precision = {"float32": "fp32", "float16": "fp16"}.get(dtype, dtype)
    if to is not Format.torch_export:
        require_onnx()  # before the weights, which may be a download
    if threads is not None:
        torch.set_num_threads(threads)
    shared["name"] = name or _name(weights)
    if to is Format.web:
        if (cores, keep, size) != (ANY, None, "dynamic"):
            raise InputError("a page takes any cores, keep and size; leave these options out.")
        model = load(weights)
        with console.status("exporting") as status:
            site = export_web(
                model, out, precision=precision or "int8", ort=ort, progress=status.update, **shared
            )
        _tell(site.models)
        say(
            f"{site.path}: a page of {site.bytes / 1e6:.0f} MB; see it with: "
            f"python -m http.server --directory {shlex.quote(str(site.path))}"
        )
        return
    if ort is not None:
        raise InputError("--ort is the runtime of a page; use it with --to web.")
    share = ANY if keep == ANY else parse_keep(keep)
    budgets: list[int | str] = [
        ANY if part == ANY else parse_numbers(part, "--cores")[0]
        for part in (p.strip() for p in cores.split(","))
        if part
    ]
    fixed = None if size == "dynamic" else _sides(size, "--size")
    precisions = [part.strip() for part in (precision or "fp32").split(",") if part.strip()]
    check_precisions(precisions)
    model = load(weights)
    with console.status("tracing") as status:
        written = export_model(
            model,
            out,
            to=to.value,
            cores=budgets,
            keep=share,
            size=fixed,
            precision=precisions,
            progress=status.update,
            **shared,
        )
    _tell(written)


def _tell(written: Sequence[Exported]) -> None:
    for entry in written:
        cls, patches = entry.agreement
        how = (
            f"differs from the model by at most {entry.max_difference:.1e}"
            if entry.dtype == "float32"
            else f"agrees with the float32 model (CLS {cls:.4f}, patches {patches:.4f})"
        )
        say(
            f"{entry.path}: {entry.bytes / 1e6:.1f} MB, {how} in "
            f"{count(len(entry.checks), 'check')} (in {entry.report.name})"
        )


def _gate(text: str | None) -> tuple[float, float] | float | None:
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise InputError(
            f"--gate takes CLS,PATCHES such as .998,.996, or one number; got {text!r}."
        )
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _sides(text: str, what: str) -> tuple[int, int]:
    sides = parse_size(text.strip()) if "x" in text.lower() else None
    if not isinstance(sides, tuple):
        raise InputError(f"{what} takes HEIGHTxWIDTH in pixels, such as 256x384; got {text!r}.")
    return sides


def _name(weights: str) -> str:
    """Something to begin file names with, from a name, a path or owner/name@revision."""
    last = Path(weights.partition("@")[0]).name.removesuffix(".safetensors")
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "veca"
