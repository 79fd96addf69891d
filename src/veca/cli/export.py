"""`veca export`: weights as files that run without this package, each checked against the model."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import Threads, console, count, parse_keep, parse_numbers, parse_size
from veca.errors import InputError


class Format(str, Enum):
    onnx = "onnx"
    torch_export = "torch-export"


class FileDtype(str, Enum):
    float32 = "float32"
    float16 = "float16"


def export(
    weights: Annotated[
        str, typer.Argument(help="A name, a folder, a .safetensors file or a hub id.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the files and their reports.")],
    to: Annotated[Format, typer.Option(help="The format.")] = Format.onnx,
    cores: Annotated[
        str,
        typer.Option(
            help="Budgets such as 8,32,64, one file each; 'any' makes one file that takes the "
            "budget as its second input."
        ),
    ] = "any",
    keep: Annotated[
        str | None,
        typer.Option(
            help="The share of patch tokens that go on after merging, 0.2 to 1; part of the file.",
            show_default="1: all",
        ),
    ] = None,
    size: Annotated[
        str, typer.Option(help="dynamic (any on the patch grid), or HEIGHTxWIDTH to fix it.")
    ] = "dynamic",
    dtype: Annotated[
        FileDtype, typer.Option(help="What to compute in; images go in as float32 either way.")
    ] = FileDtype.float32,
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
    """Write weights as ONNX or torch.export files that run without this package.

    Batch, height and width stay open. Each file is compared with the model at sizes and batches
    that were not traced; one that differs is not kept. A JSON report lies beside each file.

    veca export my-weights --to onnx --cores 8,32,64 --out exported/
    """
    import torch

    from veca.export import ANY, export_model
    from veca.export.onnx_file import require_onnx
    from veca.weights import load

    share = parse_keep(keep)
    budgets: list[int | str] = [
        ANY if part == ANY else parse_numbers(part, "--cores")[0]
        for part in (p.strip() for p in cores.split(","))
        if part
    ]
    fixed = None if size == "dynamic" else _sides(size, "--size")
    parts = check_sizes.split(",") if check_sizes else []
    checked = [_sides(part, "--check-sizes") for part in parts] or None
    if to is Format.onnx:
        require_onnx()  # before the weights, which may be a download
    if threads is not None:
        torch.set_num_threads(threads)
    model = load(weights)
    with console.status("tracing") as status:
        written = export_model(
            model,
            out,
            to=to.value,
            cores=budgets,
            keep=share,
            size=fixed,
            dtype=dtype.value,
            name=name or _name(weights),
            check_sizes=checked,
            progress=status.update,
        )
    for entry in written:
        console.print(
            f"{entry.path}: {entry.bytes / 1e6:.1f} MB, differs from the model by at most "
            f"{entry.max_difference:.1e} in {count(len(entry.checks), 'check')} "
            f"(in {entry.report.name})",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _sides(text: str, what: str) -> tuple[int, int]:
    sides = parse_size(text.strip()) if "x" in text.lower() else None
    if not isinstance(sides, tuple):
        raise InputError(f"{what} takes HEIGHTxWIDTH in pixels, such as 256x384; got {text!r}.")
    return sides


def _name(weights: str) -> str:
    """Something to begin file names with, from a name, a path or owner/name@revision."""
    last = Path(weights.partition("@")[0]).name.removesuffix(".safetensors")
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "veca"
