"""A first look: bundled photos at every budget, with what it costs and what it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from veca import bench, viz
from veca._util.html import Page
from veca.config import DEFAULT_SIZE
from veca.cost import Cost, cost
from veca.images import target_size
from veca.images.bundled import bundled_photos as bundled_photos
from veca.model import Veca
from veca.precision import check_precision, choose, recorded
from veca.viz import numbers
from veca.viz.default_weights import DEFAULT_WEIGHTS, FRESH, load_or_fresh
from veca.viz.report import add_figure, add_numbers, draw_part
from veca.viz.view import unique_names

__all__ = [
    "BUDGETS",
    "DEFAULT_WEIGHTS",
    "FRESH",
    "BudgetRow",
    "Quickstart",
    "bundled_photos",
    "quickstart",
    "table",
]

BUDGETS = (8, 16, 24, 32, 40, 48, 56, 64)
"""What the first look runs at."""
# The figures of `veca viz report` that the page shows of every photo.
PARTS = ("features", "agreement", "similarity", "attention-norm", "cores", "paths")
_ENDS = ("similarity", "attention-norm")  # a row a budget: the smallest and the largest will do
ROUGH = 0.3
"""Times that scatter by more than this share are told to be rough."""
_HEIGHT = 200  # of the pictures, in pixels


@dataclass(frozen=True)
class BudgetRow:
    """One budget, over all photos."""

    cores: int
    cost: Cost
    """At the size of the timing."""
    ms: float
    """Median time of one image."""
    cls_agreement: float
    """Mean cosine with the same photo's embedding at the full budget."""
    patch_agreement: float
    """Mean cosine with the same patches at the full budget."""


@dataclass(frozen=True)
class Quickstart:
    """What a first look found."""

    weights: str
    trained: bool
    size: int
    """As it was used: a multiple of the patch size."""
    rows: list[BudgetRow]
    dense_ms: float
    page: Path
    precision: str = "fp32"
    """What the model and the dense ViT computed in."""
    reason: str = "asked for"
    """Why it was this one."""
    spread: float = 0.0
    """The largest interquartile range of the times, as a share of its median."""

    @property
    def rough(self) -> str:
        """What to know of times that scatter; empty where they do not."""
        if not self.spread > ROUGH:
            return ""
        return (
            f"The times are rough: repeats of one budget scatter by up to {self.spread:.0%} of "
            "their median. Something else keeps this machine busy; measure again when it is idle."
        )


def quickstart(
    out: Path,
    photos: Sequence[Path] | None = None,
    *,
    weights: str | None = None,
    size: int = DEFAULT_SIZE,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    progress: Callable[[str], None] = lambda line: None,
    command: str = "",
) -> Quickstart:
    """Run photos at budgets 8..64, draw them, time them beside a dense ViT; write a page to `out`.

    Args:
        photos: image files; by default the bundled ones.
        weights: what `veca.load` takes; by default the bundled tiny weights, or fresh ones where
            there are none.
        size: the short side of the photos and the side of the timed image, in pixels; the nearest
            multiple of the patch size is taken.
        precision: "fp32", "bf16", "fp16", "int8", or "auto": see `veca.precision.choose`.
        command: what made the page, for its foot.
    """
    check_precision(precision, "auto")
    name, plain, fresh = load_or_fresh(weights, device)
    budgets = viz.fitting_budgets(plain, BUDGETS)
    # Photos would be fitted to the patch grid anyway; the timed image has to be of the same size.
    size, _ = target_size(size, size, size, "resize", plain.config.patch_size)
    progress("choosing a precision")
    model, reason = choose(plain, precision, size)
    used = check_precision(recorded(model))

    views = []
    for path in photos or bundled_photos():
        progress(f"looking at {path.name}")
        view = viz.View(model, path, size, height=_HEIGHT)
        for budget in budgets:
            view.run(budget)
        views.append(view)

    progress("timing beside a dense ViT")
    times, spread = _times(plain, budgets, size, device, used)
    agreement = {c: _agreement(views, c, budgets[-1]) for c in budgets}
    rows = [
        BudgetRow(c, cost(model.config, size, c), times[f"veca {c}"], *agreement[c])
        for c in budgets
    ]
    result = Quickstart(
        name, not fresh, size, rows, times["dense"], out / "index.html", used, reason, spread
    )
    _write_page(result, views, device, progress, command)
    return result


def table(result: Quickstart) -> tuple[list[str], list[list[str]]]:
    """The result as a header and rows of text, for the terminal and the page alike."""
    header = [
        "cores",
        "pairs / N²",
        "GFLOPs",
        "ms",
        "ms / dense",
        "cls agrees",
        "patches agree",
    ]
    rows = [
        [
            str(row.cores),
            f"{row.cost.interaction_ratio:.1%}",
            f"{row.cost.veca.flops / 1e9:.2f}",
            f"{row.ms:.1f}",
            f"{row.ms / result.dense_ms:.2f}",
            f"{row.cls_agreement:.3f}",
            f"{row.patch_agreement:.3f}",
        ]
        for row in result.rows
    ]
    dense = result.rows[0].cost.dense
    rows.append(
        [
            "dense ViT",
            "100.0%",
            f"{dense.flops / 1e9:.2f}",
            f"{result.dense_ms:.1f}",
            "1.00",
            "",
            "",
        ]
    )
    return header, rows


def _agreement(views: Sequence[viz.View], cores: int, full: int) -> tuple[float, float]:
    """Mean cosines with the full budget, over photos: of embeddings, and of patches."""
    cls, patches = [], []
    for view in views:
        some, whole = view.run(cores), view.run(full)
        cls.append(F.cosine_similarity(some.states[-1, 0], whole.states[-1, 0], dim=-1))
        patches.append(F.cosine_similarity(some.patches, whole.patches, dim=-1).mean())
    return torch.stack(cls).mean().item(), torch.stack(patches).mean().item()


def _times(
    model: Veca, budgets: Sequence[int], size: int, device: torch.device | str, precision: str
) -> tuple[dict[str, float], float]:
    """Median times, and their largest relative spread."""
    plan = bench.BenchPlan(
        sizes=(size,),
        device=str(device),
        precisions=(precision,),
        repeats=5,
        seconds=3.0,
        limit=30.0,
    )
    rows = bench.bench(model, plan, cores=budgets)
    times = {"dense" if r.model == bench.DENSE else f"veca {r.cores}": r.ms for r in rows}
    return times, max((r.spread_ms / r.ms for r in rows if r.repeats > 1), default=0.0)


def _write_page(
    result: Quickstart,
    views: Sequence[viz.View],
    device: torch.device | str,
    progress: Callable[[str], None],
    command: str,
) -> None:
    where = bench.machine(device)
    page = Page(
        "One set of weights, any budget",
        "Every patch of the image lives through the whole network, but patches talk only through "
        "a few cores. How many is chosen at inference: fewer cores, less work.",
    )
    page.facts(_facts(result))
    if not result.trained:
        page.text(FRESH, "note")
    page.heading("What a budget costs, and what it changes")
    page.table(*table(result))
    page.text(
        f"{result.weights}, one image of {result.size} x {result.size} pixels, timed in turns with "
        f"a dense ViT of the same width and depth, both in {result.precision}, on "
        f"{where.gpu or where.cpu}, torch {where.torch}. Pairs: "
        "interactions of one layer. The last two columns are cosines with the full budget, over "
        "the photos below.",
        "small",
    )
    if result.rough:
        page.text(result.rough, "note")
    folder = result.page.parent
    model = views[0].model
    budgets = viz.fitting_budgets(model)
    ends = viz.Options(cores=sorted({budgets[0], budgets[-1]}))
    for stem, view in unique_names(views):
        page.heading(stem)
        for part in PARTS:
            progress(f"drawing {stem}: {part}")
            title, figure = draw_part(view, part, ends if part in _ENDS else None)
            add_figure(page, figure, folder / f"{stem}-{part}.png", title, level=3)
    progress("measuring what the cores do")
    rows = numbers.measure(views, budgets)
    add_numbers(page, rows, folder, not result.trained, viz.default_layers(model))
    page.heading("Where to go from here")
    page.text("More figures, of any photo, and the same live, with sliders:")
    page.code("veca viz report PHOTO\nveca demo")
    page.made_by(command)
    page.write(result.page)


def _facts(result: Quickstart) -> list[tuple[str, str]]:
    """What the smallest budget costs and keeps."""
    row, full = result.rows[0], result.rows[-1]
    cores = f"{row.cores} core{'s' * (row.cores != 1)}"
    return [
        (f"{row.cost.interaction_ratio:.1%}", f"of full attention's interactions, with {cores}"),
        (f"{row.cost.flops_ratio:.0%}", "of a dense ViT's FLOPs"),
        (f"{row.ms / result.dense_ms:.0%}", "of a dense ViT's time, measured here"),
        (f"{row.patch_agreement:.3f}", f"cosine of its patches with those of {full.cores} cores"),
    ]
