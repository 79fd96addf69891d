"""`veca import`: a checkpoint of the authors', turned into weights that `veca.load` reads."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import console
from veca.errors import OutputError


class StoredDtype(str, Enum):
    float16 = "float16"
    float32 = "float32"


def import_(
    checkpoint: Annotated[Path, typer.Argument(help="The authors' torch-saved file.")],
    out: Annotated[
        Path, typer.Option(help="Folder to write, or a name ending in .safetensors for one file.")
    ],
    dtype: Annotated[StoredDtype, typer.Option(help="How to store it.")] = StoredDtype.float32,
    force: Annotated[bool, typer.Option("--force", help="Replace weights that are there.")] = False,
) -> None:
    """Convert a checkpoint of the authors'; nothing inside the file is executed."""
    import torch

    from veca.weights import convert_official, store

    out = out.expanduser()
    taken = [path for path in (out / name for name in store.FILES) if path.exists()]
    if not force and (taken or out.is_file()):
        raise OutputError(
            f"{taken[0] if taken else out} is there already; add --force to replace it."
        )

    model = convert_official(checkpoint, out, dtype=getattr(torch, dtype.value))
    c = model.config
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{c.depth} layers, width {c.width}, {c.heads} heads, {c.num_cores} cores, "
        f"features of width {c.feature_width}, {parameters / 1e6:.1f} M parameters, "
        f"{dtype.value}.\n"
        f"Written to {out}; read it with veca.load({str(out)!r}).",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
