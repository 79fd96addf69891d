"""Where cores look: all of them as colours, layers x budgets; single ones as heat."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from veca.errors import InputError
from veca.viz.colour import core_colour, heat
from veca.viz.features import colour_panel
from veca.viz.figure import Dot, Figure, Panel
from veca.viz.project import joint_colours
from veca.viz.view import View, check_budgets, default_layers

KINDS = {"norm": "norm-based attention", "softmax": "softmax attention"}


def draw_attention(
    view: View,
    cores: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    *,
    kind: str = "norm",
    method: str = "pca",
    seed: int = 0,
) -> Figure:
    """Core-to-patch attention in one grid: a row a budget, a column a layer.

    A patch is described by how much each core takes from it; those C numbers become a colour, by
    one projection over the layers of a row, as published. Patches that the same cores look at
    have the same colour. Rows are projected apart, since their cores are not the same.
    """
    budgets = check_budgets(view.model, cores)
    depths = default_layers(view.model) if layers is None else list(layers)
    rows, arrays = [], {}
    for budget in budgets:
        maps = view.attention(budget, depths, kind)
        arrays[f"{budget} cores"] = maps
        colours = joint_colours([m.flatten(1).T for m in maps], method=method, seed=seed)
        rows.append(
            [
                Panel(view.shown, f"{view.name}, {budget} cores"),
                *(
                    Panel(colour_panel(view, colour), f"layer {depth}")
                    for depth, colour in zip(depths, colours, strict=True)
                ),
            ]
        )
    caption = (
        f"Which cores look at which patch ({KINDS[kind]}, {method.upper()} joint over the layers "
        "of a row): patches that the same cores look at have the same colour."
    )
    return Figure(rows, caption, f"attention-{kind}", arrays)


def draw_single_cores(
    view: View,
    cores: Sequence[int] | None = None,
    which: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    *,
    kind: str = "norm",
) -> Figure:
    """What single cores look at, as heat on the photo: a row a budget and layer, a column a core.

    Args:
        cores: budgets, by default 8 (or all the model has).
        which: numbers of cores from 1, by default the first five. Core 1 is the global one.
    """
    whole = view.model.config.num_cores
    budgets = check_budgets(view.model, [min(8, whole)] if cores is None else cores)
    chosen = list(range(1, min(5, *budgets, whole) + 1)) if which is None else list(which)
    most = min(budgets)
    if not chosen or not all(isinstance(i, int) and 1 <= i <= most for i in chosen):
        raise InputError(f"cores are numbered 1 to {most} at a budget of {most}, got {chosen}.")
    depths = default_layers(view.model, 3) if layers is None else list(layers)
    rows, arrays = [], {}
    for budget in budgets:
        maps = view.attention(budget, depths, kind)
        path = view.run(budget).path
        arrays[f"{budget} cores"] = maps[:, [i - 1 for i in chosen]]
        for row, depth in enumerate(depths):
            rows.append(
                [
                    core_panel(view, maps[row, i - 1], path[depth - 1, i - 1], i, depth, budget)
                    for i in chosen
                ]
            )
    caption = (
        f"What single cores look at ({KINDS[kind]}); each map's largest value is its brightest. "
        "The dot is where the core stands."
    )
    return Figure(rows, caption, "cores", arrays)


def core_panel(
    view: View, weights: Tensor, xy: Tensor, core: int, layer: int, budget: int
) -> Panel:
    """One core's attention [h, w] in one layer as heat; `xy` is where the core stands."""
    x, y = ((value + 1) / 2 for value in xy.tolist())
    return Panel(
        heat(view.shown, weights),
        f"core {core} of {budget}, layer {layer}",
        [Dot(x, y, core_colour(core - 1), radius=4, outline=(255, 255, 255))],
    )
