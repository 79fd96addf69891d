"""`veca info`: what a model is made of and what it costs, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from veca.cli.common import Device, console, parse_keeps, parse_numbers, pick_device, say

if TYPE_CHECKING:
    from veca.config import VecaConfig

_SIZES, _BUDGETS = "256,384,512,768,1024", "8,16,32,64"


def info(
    model: Annotated[
        str | None,
        typer.Argument(help="A preset or weights: a name, a folder, a file or a hub id."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Image sides in pixels, such as 256,512,1024.", show_default=_SIZES),
    ] = None,
    cores: Annotated[
        str | None, typer.Option(help="Budgets, such as 8,64.", show_default=_BUDGETS)
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Shares of patch tokens that go on after merging, such as 0.35,0.5,1.",
            show_default="1: all",
        ),
    ] = None,
    half: Annotated[bool, typer.Option(help="Memory for 16-bit numbers instead of 32.")] = False,
    device: Device = "auto",
) -> None:
    """Interactions, FLOPs, parameters and memory at each size, budget and share of tokens.

    They stand beside those of a dense ViT.

    Without a model: the presets, the weights at hand and the attention backend of this machine;
    with a size or budgets, what each preset costs.
    """
    if model is None and not (size or cores or keep or half):
        _overview(device)
        return
    sizes = parse_numbers(_SIZES if size is None else size, "--size")
    budgets = None if cores is None else parse_numbers(cores, "--cores")
    shares = [1.0] if keep is None else parse_keeps(keep)
    _costs(model, sizes, budgets, shares, 2 if half else 4)


def _overview(device: str) -> None:
    import torch

    from veca import PRESETS, __version__, cost, native, onnx_files
    from veca.attention import default_backend
    from veca.precision import expected
    from veca.weights import available

    presets = Table(title=f"veca {__version__}, torch {torch.__version__}: presets")
    for name in ("preset", "layers", "width", "heads", "cores", "parameters"):
        presets.add_column(name, justify="left" if name == "preset" else "right")
    for name, c in PRESETS.items():
        parameters = cost(name).veca.parameters
        presets.add_row(
            name,
            str(c.depth),
            str(c.width),
            str(c.heads),
            str(c.num_cores),
            f"{parameters / 1e6:.1f} M",
        )
    console.print(presets)
    console.print(f"Weights at hand: {', '.join(available()) or 'none'}")
    place = pick_device(device)
    choice = default_backend(place)
    console.print(f"Attention on {place}: {choice.backend} ({choice.reason})")
    precision, reason = expected(place)
    say(f"Precision auto on {place}: most likely {precision} ({reason})")
    if place.type == "cpu":
        by = "torch, or onnxruntime where its file is made" if onnx_files.installed() else "torch"
        say(f"int8: steps between products {native.compiled().reason}; engine auto: {by}")


def _costs(
    model: str | None,
    sizes: list[int],
    asked: list[int] | None,
    shares: Sequence[float | str],
    number: int,
) -> None:
    """A table for a model, or for each preset where none is given."""
    from veca import PRESETS, cost
    from veca.weights import describe_config

    models = [(name, config) for name, config in PRESETS.items()]
    if model is not None:
        models = [describe_config(model)]
    budgets = {name: asked or _usual_budgets(config.num_cores) for name, config in models}
    for name, config in models:  # before the first table: nothing is shown of what cannot be
        for size in sizes:
            for budget, share in product(budgets[name], shares):
                cost(config, size, budget, keep=share)
    for name, config in models:
        console.print(_table(name, config, sizes, budgets[name], shares, number))
    console.print(
        "For one image. N: patches. "
        + ("Keep: the share of them that go on as tokens after merging. " * (shares != [1]))
        + "Pairs: interactions of one layer over N². Attn GF: GFLOPs of "
        "one block's q, k, v and output projections and attention. MiB: activations of "
        f"{number} bytes a number, to run and to train (without gradient checkpointing), fused "
        "attention, not compiled.",
        style="dim",
    )


def _usual_budgets(num_cores: int) -> list[int]:
    """Those of the default that a model has, or all that it has."""
    usual = parse_numbers(_BUDGETS, "--cores")
    return [budget for budget in usual if budget <= num_cores] or [num_cores]


def _table(
    name: str,
    config: VecaConfig,
    sizes: list[int],
    budgets: list[int],
    shares: Sequence[float | str],
    number: int,
) -> Table:
    from veca import cost

    first = cost(config, sizes[0], budgets[0])
    table = Table(
        title=f"{escape(name)}: {first.veca.parameters / 1e6:.1f} M parameters "
        f"(dense ViT {first.dense.parameters / 1e6:.1f} M)",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    with_share = [*shares] != [1]
    dials = ("cores", "keep") if with_share else ("cores",)
    columns = ("pixels", "N", *dials, "pairs", "attn GF", "/ dense", "GFLOPs", "/ dense")
    for column in (*columns, "MiB run", "MiB train"):
        table.add_column(column, justify="right", no_wrap=True)
    for size in sizes:
        for budget, share in product(budgets, shares):
            c = cost(config, size, budget, keep=share, bytes_per_number=number)
            table.add_row(
                *(str(size), str(c.grid[0] * c.grid[1]), str(budget)),
                *([f"{c.keep:g}"] if with_share else []),
                f"{c.interaction_ratio:.1%}",
                f"{c.veca.attention_flops / 1e9:.4g}",
                f"{c.attention_ratio:.3f}",
                f"{c.veca.flops / 1e9:.4g}",
                f"{c.flops_ratio:.3f}",
                f"{c.veca.inference_bytes / 2**20:.4g}",
                f"{c.veca.training_bytes / 2**20:.4g}",
            )
        c = cost(config, size, bytes_per_number=number)
        table.add_row(
            *(str(size), str(c.grid[0] * c.grid[1]), "dense"),
            *([""] if with_share else []),
            "100.0%",
            f"{c.dense.attention_flops / 1e9:.4g}",
            "1.000",
            f"{c.dense.flops / 1e9:.4g}",
            "1.000",
            f"{c.dense.inference_bytes / 2**20:.4g}",
            f"{c.dense.training_bytes / 2**20:.4g}",
            end_section=True,
        )
    return table
