"""`veca publish`: weights made ready for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import console


def publish(
    weights: Annotated[str, typer.Argument(help="A name, a folder, a file or a hub id.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    name: Annotated[
        str, typer.Option(help="What readers of the card will call them.", show_default="folder's")
    ] = "",
    licence: Annotated[str, typer.Option(help="Of the weights, such as Apache-2.0.")] = "",
    data: Annotated[str, typer.Option(help="What they were trained on, in words.")] = "",
    data_licence: Annotated[str, typer.Option(help="Its licence or terms.")] = "",
    results: Annotated[
        Path | None, typer.Option(help="A Markdown file with what they reach, for the card.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    code: Annotated[
        bool,
        typer.Option(
            "--code/--no-code",
            help="With the model's code, for transformers' trust_remote_code=True without veca.",
        ),
    ] = True,
) -> None:
    """Write weights to ship: half precision, provenance without local paths, a model card."""
    import torch

    from veca.distill.export import publish as write
    from veca.errors import InputError, check_choice

    dtypes = {n: getattr(torch, n) for n in ("float16", "bfloat16", "float32")}
    check_choice("--dtype", dtype, dtypes)
    try:
        measured = "" if results is None else results.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {results} ({error}); --results takes Markdown.") from error
    folder = write(
        weights,
        out,
        name=name,
        licence=licence,
        data=data,
        data_licence=data_licence,
        results=measured,
        dtype=dtypes[dtype],
        code=code,
    )
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    console.print(f"wrote {folder}: {size:.1f} MB", highlight=False, markup=False, soft_wrap=True)
