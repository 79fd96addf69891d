"""Cores themselves: the paths they travel over the photo, and their states, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from veca.viz.colour import core_colour
from veca.viz.figure import Dot, Figure, Line, Mark, Panel
from veca.viz.project import project
from veca.viz.view import View, check_budgets, default_layers

_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)


def path_lengths(path: Tensor, grid: tuple[int, int]) -> Tensor:
    """How far cores travel in all, in patches: path [L, C, 2] in [-1, 1] -> [C]."""
    h, w = grid
    steps = path.diff(dim=0) * torch.tensor([w / 2, h / 2])
    return steps.norm(dim=-1).sum(dim=0)


def draw_paths(view: View, cores: Sequence[int] | None = None) -> Figure:
    """The ways of the cores over the layers, drawn on the photo; a panel a budget."""
    panels = [Panel(view.shown, view.name)]
    arrays = {}
    for budget in check_budgets(view.model, cores):
        path = view.run(budget).path
        arrays[f"{budget} cores"] = path
        mean = path_lengths(path, view.grid).mean().item()
        panels.append(path_panel(view, path, f"{budget} cores, mean way {mean:.2g} patches"))
    caption = (
        "The ways of the cores from the first layer to the last. A small white dot is where a core "
        "starts, a coloured one where it ends; a core has the same colour at every budget."
    )
    return Figure([panels], caption, "paths", arrays)


def path_panel(view: View, path: Tensor, title: str = "") -> Panel:
    """Paths [L, C, 2] in [-1, 1] over the paled photo."""
    pale = Image.blend(view.shown, Image.new("RGB", view.shown.size, "white"), 0.35)
    return Panel(pale, title, path_marks(path))


def path_marks(path: Tensor) -> list[Mark]:
    """Lines and dots for paths [L, C, 2] in [-1, 1]."""
    marks: list[Mark] = []
    for core in range(path.shape[1]):
        points = [((x + 1) / 2, (y + 1) / 2) for x, y in path[:, core].tolist()]
        if len(points) > 1:
            marks.append(Line(points, core_colour(core), 2))
        marks.append(Dot(*points[-1], core_colour(core), radius=4))
        if len(points) > 1:
            marks.append(Dot(*points[0], _WHITE, radius=1.5, outline=None))
    return marks


def draw_states(
    view: View,
    cores: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    *,
    method: str = "pca",
    seed: int = 0,
) -> Figure:
    """The states of the cores in one joint projection to the plane.

    A row a budget, a panel a layer. States are taken through the final norm, so that layers
    differ in direction, not in scale. For PCA the mean of each panel's states is taken off: what
    a layer adds to all cores alike would outweigh what tells them apart. `cores` are budgets, by
    default all the model has.
    """
    budgets = check_budgets(view.model, [view.model.config.num_cores] if cores is None else cores)
    depths = default_layers(view.model, 5) if layers is None else list(layers)
    cells = [(budget, depth) for budget in budgets for depth in depths]
    states = [view.states(budget, depth) for budget, depth in cells]
    if method == "pca":
        states = [state - state.mean(dim=0) for state in states]
    places = project(states, 2, method=method, seed=seed)
    joined = torch.cat(places)
    low, high = joined.amin(dim=0), joined.amax(dim=0)
    # One scale for both axes, or a round cloud would not look round.
    middle, reach = (low + high) / 2, ((high - low).max() / 2).clamp_min(1e-12)
    panels = [
        _state_panel(0.5 + 0.45 * (place - middle) / reach, f"{budget} cores, layer {depth}", view)
        for (budget, depth), place in zip(cells, places, strict=True)
    ]
    rows = [panels[i : i + len(depths)] for i in range(0, len(panels), len(depths))]
    caption = (
        f"The states of the cores layer by layer, in one {method.upper()} projection over all "
        "panels. Colours are those of the paths; the ringed dot is core 1, the global one."
    )
    return Figure(rows, caption, "states", {"places": places})


def _state_panel(places: Tensor, title: str, view: View) -> Panel:
    at = places.tolist()
    marks: list[Mark] = [
        Dot(x, 1 - y, core_colour(core), radius=4, outline=_WHITE) for core, (x, y) in enumerate(at)
    ]
    # The first core, the global one, on top with a dark ring.
    marks.append(Dot(at[0][0], 1 - at[0][1], core_colour(0), radius=6, outline=_BLACK))
    return Panel(Image.new("RGB", (view.height, view.height), (244, 244, 244)), title, marks)
