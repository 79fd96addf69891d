"""Dense features as colours: three joint directions become red, green and blue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from veca.errors import InputError
from veca.viz.figure import Figure, Panel
from veca.viz.project import joint_colours, layer_colours
from veca.viz.view import View, check_budgets

SIZES = (256, 512, 768, 1024)
MOST_PATCHES = 65_536
"""Of one size of a photo: 4096 x 4096 pixels in patches of 16."""


def feature_pictures(
    maps: Sequence[Tensor],
    size: tuple[int, int] | None = None,
    *,
    method: str = "pca",
    seed: int = 0,
) -> list[Image.Image]:
    """Pictures of feature maps [D, h, w], coloured together so that colours compare.

    The directions and the range of each colour are found over all maps at once: equal features
    get equal colours in every picture. `size` is (height, width) in pixels; by default one pixel
    a patch. `method` and `seed` as in `project`.
    """
    colours = joint_colours([m.flatten(1).T for m in maps], method=method, seed=seed)
    pictures = []
    for colour, m in zip(colours, maps, strict=True):
        small = colour_picture(colour, (m.shape[-2], m.shape[-1]))
        pictures.append(
            small if size is None else small.resize((size[1], size[0]), Image.Resampling.NEAREST)
        )
    return pictures


def colour_picture(colours: Tensor, grid: tuple[int, int]) -> Image.Image:
    """Colours [N, 3] in 0..1 as a picture, one pixel a patch."""
    array = (colours.view(*grid, 3) * 255).round().byte().numpy()
    return Image.fromarray(np.ascontiguousarray(array))


def draw_features(
    views: Sequence[View],
    cores: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    *,
    method: str = "pca",
    seed: int = 0,
    overlay: float = 0.0,
) -> Figure:
    """Dense features of photos at several budgets and layers, coloured together.

    A row a photo with budgets across; with several `layers`, a row a photo and budget with layers
    across, each layer in its full contrast (`layer_colours`). `overlay` (0..1) is how much of the
    photo shines through.
    """
    budgets = check_budgets(views[0].model, cores)
    depths = [views[0].model.config.depth] if layers is None else list(layers)
    runs = [(view, budget) for view in views for budget in budgets]
    by_run = [view.features(budget, depths) for view, budget in runs]
    by_layer = layer_colours(list(zip(*by_run, strict=True)), method=method, seed=seed)
    cells = [(view, budget, layer) for view, budget in runs for layer in depths]
    colours = [colour for run in zip(*by_layer, strict=True) for colour in run]
    panels = [
        _panel(view, colour, _title(budget, layer if len(depths) > 1 else None), overlay)
        for (view, budget, layer), colour in zip(cells, colours, strict=True)
    ]
    across = len(depths) if len(depths) > 1 else len(budgets)
    rows = []
    for start in range(0, len(panels), across):
        view = cells[start][0]
        rows.append([Panel(view.shown, view.name), *panels[start : start + across]])
    joint = [
        word for word, count in (("photos", len(views)), ("budgets", len(budgets))) if count > 1
    ]
    how = f"Dense features as colours ({method.upper()}, {_joint(joint)})"
    if len(depths) > 1:
        caption = (
            f"{how}. Each layer has colours of its own: in a column equal features have equal "
            f"colours. Those of other layers are rotated towards those of layer {depths[-1]}, so "
            "that a patch keeps its colour where layers group patches alike."
        )
    else:
        caption = f"{how}: equal features have equal colours in every panel."
    return Figure(rows, caption, "features", {"colours": _on_grids(colours, [c[0] for c in cells])})


def draw_sizes(
    views: Sequence[View],
    sizes: Sequence[int] = SIZES,
    cores: Sequence[int] | None = None,
    *,
    method: str = "pca",
    seed: int = 0,
    overlay: float = 0.0,
) -> Figure:
    """Dense features of photos at several sizes (short side in pixels), coloured together.

    A row a photo and budget, sizes across; by default at all the cores the model has.
    """
    if not sizes:
        raise InputError("no sizes were given; a figure needs at least one, such as 512.")
    model = views[0].model
    for view in views:
        _check_patches(view, max(sizes))
    budgets = check_budgets(model, [model.config.num_cores] if cores is None else cores)
    sized = [[view.at(size) for size in sizes] for view in views]
    cells = [(view, budget) for row in sized for budget in budgets for view in row]
    features = [view.features(budget)[0] for view, budget in cells]
    colours = joint_colours(features, method=method, seed=seed)
    panels = [
        _panel(v, colour, f"{v.pixels.shape[2]} x {v.pixels.shape[3]} px", overlay)
        for (v, _), colour in zip(cells, colours, strict=True)
    ]
    rows = []
    for start in range(0, len(panels), len(sizes)):
        view, budget = cells[start]
        rows.append(
            [
                Panel(view.shown, f"{view.name}, {_title(budget)}"),
                *panels[start : start + len(sizes)],
            ]
        )
    caption = (
        f"Dense features at several image sizes (height x width; {method.upper()}, joint over all "
        "panels): equal features have equal colours."
    )
    return Figure(rows, caption, "sizes", {"colours": _on_grids(colours, [c[0] for c in cells])})


def _check_patches(view: View, size: int) -> None:
    """Refuse a photo so long and thin that a short side of `size` makes it enormous."""
    width, height = view.photo.size
    scale = size / view.model.config.patch_size
    patches = scale * scale * max(width, height) / min(width, height)
    if patches > MOST_PATCHES:
        raise InputError(
            f"{view.name} has {width} x {height} pixels: with a short side of {size} it would have "
            f"{patches:,.0f} patches, more than the {MOST_PATCHES:,} that this figure takes; "
            "choose smaller sizes (--sizes)."
        )


def colour_panel(view: View, colours: Tensor, overlay: float = 0.0) -> Image.Image:
    """Colours of patches [N, 3] at the size of the view's pictures, the photo shining through."""
    picture = colour_picture(colours, view.grid).resize(view.shown.size, Image.Resampling.NEAREST)
    return Image.blend(picture, view.shown, overlay) if overlay else picture


def _panel(view: View, colours: Tensor, title: str, overlay: float) -> Panel:
    if not 0 <= overlay <= 1:
        raise InputError(f"overlay is the photo's share from 0 to 1, got {overlay}.")
    return Panel(colour_panel(view, colours, overlay), title)


def _title(budget: int, layer: int | None = None) -> str:
    cores = f"{budget} core{'s' * (budget != 1)}"
    return cores if layer is None else f"{cores}, layer {layer}"


def _joint(words: Sequence[str]) -> str:
    return f"joint over {' and '.join(words)}" if words else "of one map"


def _on_grids(colours: Sequence[Tensor], views: Sequence[View]) -> list[Tensor]:
    return [c.view(*view.grid, 3) for c, view in zip(colours, views, strict=True)]
