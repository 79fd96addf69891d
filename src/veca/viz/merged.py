"""Which windows of patches merged, and what is left of a photo then, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from veca.viz.figure import Figure, Panel
from veca.viz.view import MergeStep, View, check_budgets

USUAL_KEEP = 0.5
"""What is shown of a view that merges nothing."""
_TINT = 0.8  # of a merged window, how much is its mean colour
_EDGE = 0.75  # how much of the edge of one is white


def draw_merged(views: Sequence[View], cores: Sequence[int] | None = None) -> Figure:
    """The tokens that go on over the photo: a row a photo and budget, a panel a step.

    Patches that became one token have their mean colour and one white edge; the others are shown
    as they are. Of views that merge nothing, half the tokens are kept.
    """
    whole = views[0].model.config.num_cores
    budgets = check_budgets(views[0].model, [whole] if cores is None else cores)
    rows, arrays = [], []
    for view in (view if view.merges else view.merging(USUAL_KEEP) for view in views):
        for budget in budgets:
            steps = view.run(budget).steps
            title = view.name if len(budgets) == 1 else f"{view.name}, {budget} cores"
            rows.append([Panel(view.shown, title), *(step_panel(view, step) for step in steps)])
            arrays.append([step.token_of.view(view.grid) for step in steps])
    caption = (
        "Patches that have become one token have their mean colour and one edge; the others go on "
        "alone. Cores see a token as often as it has patches, and at the end each patch takes its "
        "token's features."
    )
    return Figure(rows, caption, "merged", {"tokens": arrays})


def step_panel(view: View, step: MergeStep) -> Panel:
    """What one step leaves, over the photo."""
    patches = step.token_of.numel()
    title = f"before layer {step.layer}: {step.tokens} of {patches} tokens"
    return Panel(merged_picture(view.shown, step.token_of, view.grid), title)


def merged_picture(photo: Image.Image, token_of: Tensor, grid: tuple[int, int]) -> Image.Image:
    """A photo in which the patches of each token of several have their mean colour and one edge.

    Args:
        token_of: [N] the token of each patch.
        grid: patches down and across.
    """
    pixels = np.asarray(photo.convert("RGB"), dtype=np.float64)
    height, width = pixels.shape[:2]
    tokens = token_of.view(grid).numpy()
    rows, columns = np.arange(height) * grid[0] // height, np.arange(width) * grid[1] // width
    token = tokens[rows[:, None], columns]  # [height, width]
    merged = (np.bincount(tokens.ravel()) > 1)[token]

    area = np.bincount(token.ravel()).clip(1)
    sums = [np.bincount(token.ravel(), pixels[..., c].ravel()) for c in range(3)]
    mean = np.stack([one / area for one in sums], axis=-1)[token]
    shown = np.where(merged[..., None], _TINT * mean + (1 - _TINT) * pixels, pixels)

    edge = np.zeros_like(merged)
    edge[1:] |= token[1:] != token[:-1]
    edge[:, 1:] |= token[:, 1:] != token[:, :-1]
    beside = merged.copy()  # an edge lies between two tokens, one of them of several patches
    beside[1:] |= merged[:-1]
    beside[:, 1:] |= merged[:, :-1]
    shown[edge & beside] = (1 - _EDGE) * shown[edge & beside] + _EDGE * 255
    return Image.fromarray(shown.round().astype(np.uint8))
