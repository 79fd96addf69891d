"""Cosine maps: what is like the whole image, like one patch, or like itself at full budget."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from veca.viz.colour import heat
from veca.viz.figure import Dot, Figure, Panel
from veca.viz.view import View, check_budgets

Point = tuple[float, float]
_MARK = (255, 60, 60)
_WHITE = (255, 255, 255)


def cosine_map(features: Tensor, query: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cosines of dense features [N, D] with one vector [D], as a map [h, w] in -1..1."""
    return F.cosine_similarity(features.float(), query.float()[None], dim=1).view(grid)


def agreement_map(some: Tensor, full: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cosines of dense features [N, D] with the same patches' others [N, D], as a map [h, w]."""
    return F.cosine_similarity(some.float(), full.float(), dim=1).view(grid)


def cls_map(view: View, cores: int | None = None) -> Tensor:
    """Cosines of the global embedding with every patch, [h, w]."""
    run = view.run(cores)
    return cosine_map(run.patches, run.states[-1, 0], view.grid)


def point_map(view: View, point: Point, cores: int | None = None) -> Tensor:
    """Cosines of the patch under a point, (x, y) in 0..1 of the photo, with every patch, [h, w]."""
    row, column = view.patch_at(point)
    patches = view.run(cores).patches
    return cosine_map(patches, patches[row * view.grid[1] + column], view.grid)


def draw_similarity(
    view: View,
    points: Sequence[Point] = ((0.5, 0.5),),
    cores: Sequence[int] | None = None,
) -> Figure:
    """CLS-to-patch and patch-to-patch cosines for chosen points; a row a budget.

    `points` are (x, y) in 0..1 of the photo. A column has one scale of colours for all budgets.
    """
    budgets = check_budgets(view.model, cores)
    columns = [[cls_map(view, c) for c in budgets]]
    columns += [[point_map(view, point, c) for c in budgets] for point in points]
    scales = [_scale(maps) for maps in columns]
    width, height = view.photo.size
    rows = []
    for i, budget in enumerate(budgets):
        marks = [point_mark(point) for point in points]
        panels = [Panel(view.shown, f"{view.name}, {budget} cores", marks)]
        for column, (maps, scale) in enumerate(zip(columns, scales, strict=True)):
            if column == 0:
                title, mark = "CLS to patches", []
            else:
                x, y = points[column - 1]
                title = f"patch at ({round(x * width)}, {round(y * height)}) to patches"
                mark = [point_mark((x, y))]
            picture = heat(view.shown, maps[i], low=scale[0], high=scale[1], strength=1)
            panels.append(Panel(picture, title, mark, scale))
        rows.append(panels)
    caption = (
        "Cosines of the global embedding, and of the marked patches, with every patch. A column "
        "has one scale for all budgets."
    )
    arrays = {"cls": columns[0], "points": columns[1:]}
    return Figure(rows, caption, "similarity", arrays)


def draw_agreement(views: Sequence[View], cores: Sequence[int] | None = None) -> Figure:
    """How far each patch at small budgets agrees with itself at the full budget; a row a photo.

    The full budget has all tokens; where a view merges, it is a budget like the others.
    """
    model = views[0].model
    whole = model.config.num_cores
    budgets = check_budgets(model, cores)
    if not views[0].merges:
        budgets = [c for c in budgets if c != whole] or [whole]
    maps = []
    for view in views:
        full = view.merging(None).run(whole).patches
        maps.append([agreement_map(view.run(c).patches, full, view.grid) for c in budgets])
    low = min(m.min().item() for row in maps for m in row)
    scale = (min(low, 1 - 1e-3), 1.0)  # a full budget agrees with itself: not a scale of nothing
    rows = [
        [
            Panel(view.shown, view.name),
            *(
                Panel(
                    heat(view.shown, m, low=scale[0], high=scale[1], strength=1),
                    f"{c} cores, mean {m.mean().item():.3f}",
                    scale=scale,
                )
                for c, m in zip(budgets, row, strict=True)
            ),
        ]
        for view, row in zip(views, maps, strict=True)
    ]
    caption = (
        f"Agreement with the full budget of {whole} cores: the cosine of each patch with itself. "
        "One scale for all panels."
    )
    return Figure(rows, caption, "agreement", {"agreement": maps})


def point_mark(point: Point) -> Dot:
    return Dot(*point, _MARK, radius=5, outline=_WHITE)


def _scale(maps: Sequence[Tensor]) -> tuple[float, float]:
    low = min(m.min().item() for m in maps)
    high = max(m.max().item() for m in maps)
    return low, max(high, low + 1e-6)
