"""All the figures of photos as one page, with the numbers behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from veca._util.files import atomic_write, place_for
from veca._util.html import Page
from veca.cost import cost
from veca.viz import numbers
from veca.viz.catalogue import Options, draw
from veca.viz.default_weights import FRESH, is_fresh
from veca.viz.figure import Figure
from veca.viz.view import View, check_budgets, default_layers, unique_names

# What a report shows of a photo, in order: a figure's name, its heading, and options of its own.
_PARTS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("features", "Dense features by budget", {"layers": None}),
    ("features-overlay", "The same over the photo", {"layers": None, "overlay": 0.5}),
    ("features-layers", "Dense features by layer", {}),
    ("sizes", "Dense features by image size", {"cores": None}),
    ("agreement", "Agreement with the full budget", {}),
    ("similarity", "What is like the image, and like a patch", {}),
    ("attention-norm", "What the cores look at: norm-based attention", {"kind": "norm"}),
    ("attention-softmax", "What the cores look at: softmax attention", {"kind": "softmax"}),
    ("cores", "Single cores", {"cores": None}),
    ("paths", "Where the cores travel", {}),
    ("states", "The states of the cores", {"cores": None}),
    ("merged", "What was merged", {"cores": None}),
)
_OF_MERGING = ("merged",)
"""Parts of views that merge only."""
PARTS = tuple(name for name, _, _ in _PARTS if name not in _OF_MERGING)


@dataclass(frozen=True)
class WrittenReport:
    """A written page, and what it found."""

    page: Path
    pictures: list[Path]
    rows: list[numbers.Numbers]
    verdicts: list[numbers.Verdict]
    fresh: bool


def report(
    views: Sequence[View],
    out: str | Path,
    options: Options | None = None,
    *,
    weights: str = "",
    progress: Callable[[str], None] = lambda line: None,
    command: str = "",
) -> WrittenReport:
    """Draw every figure of photos and write them to the folder `out` as `index.html`.

    Pictures (PNG) and `numbers.csv` lie beside the page.

    Args:
        options: budgets, layers and so on for all figures.
        weights: what the page calls the weights.
        progress: called with a line of text as the work goes on.
        command: what made the page, for its foot.
    """
    folder, options = place_for(out), options or Options()
    model = views[0].model
    fresh = is_fresh(model)
    whole = model.config.num_cores
    page = Page(
        "What the cores see",
        f"{weights + ': ' if weights else ''}{model.config.depth} layers, width "
        f"{model.config.width}, up to {whole} cores. Photos: "
        f"{', '.join(f'{view.name} ({_pixels(view)} px)' for view in views)}.",
    )
    if fresh:
        page.text(FRESH, "note")
    pictures = []
    for stem, view in unique_names(views):
        if len(views) > 1:
            page.heading(stem)
        for name in (*PARTS, *(_OF_MERGING if view.merges else ())):
            progress(f"{stem}: {name}")
            title, figure = draw_part(view, name, options)
            path = folder / f"{stem}-{name}.png"
            pictures.append(add_figure(page, figure, path, title, level=2 + (len(views) > 1)))
    progress("numbers")
    budgets = check_budgets(model, options.cores)
    rows = numbers.measure(views, budgets, kind=options.kind)
    pictures.append(add_numbers(page, rows, folder, fresh, options.layers))
    _add_costs(page, views[0], budgets)
    page.made_by(command)
    return WrittenReport(
        page.write(folder / "index.html"), pictures, rows, numbers.verdicts(rows), fresh
    )


def draw_part(view: View, name: str, options: Options | None = None) -> tuple[str, Figure]:
    """The heading and the figure of a part of a report, one of `PARTS`."""
    title, changes = next((title, changes) for part, title, changes in _PARTS if part == name)
    wanted = replace(options or Options(), **changes)  # type: ignore[arg-type]
    if name == "features-layers" and wanted.layers is None:
        wanted = replace(wanted, layers=default_layers(view.model))
    return title, draw(name.split("-")[0], view, wanted)[0]


def add_figure(page: Page, figure: Figure, path: Path, title: str, level: int = 2) -> Path:
    """Write a figure beside a page, and show it there under a title."""
    with atomic_write(path) as file:
        file.write(figure.png())
    page.heading(title, level)
    figure.add_to(page, quote(path.name))
    return path


def add_numbers(
    page: Page,
    rows: Sequence[numbers.Numbers],
    folder: Path,
    fresh: bool,
    layers: Sequence[int] | None = None,
) -> Path:
    """Verdicts, curves and a table of the numbers; `numbers.csv` holds every layer."""
    found = numbers.verdicts(rows)
    page.heading("Do these weights show what the paper shows?")
    page.text(numbers.summary(found, fresh), "note" if fresh else "")
    page.table(
        ["published behaviour", "shown", "measure", "from", "to"],
        [
            [
                v.claim,
                "yes" if v.holds else "no",
                v.measure,
                f"{v.before:.3g}",
                f"{v.after:.3g}",
            ]
            for v in found
        ],
    )
    page.text(
        f"A change counts from {numbers.MARGIN:.0%} on. Early and late are the first and the last "
        "third of the layers, at the largest budget.",
        "small",
    )
    picture = add_figure(
        page, numbers.draw_numbers(rows), folder / "numbers.png", "Numbers behind the pictures"
    )
    page.table(*numbers.text_table(rows, layers))
    page.text(
        "Means over cores and photos. Coverage: effective share of the patches that a core looks "
        "at. Radius: of what it looks at, in half sides of the image. Roundness: short over long "
        "axis. Overlap: attention that two cores share. Path: travelled so far, in patches. "
        "Cosine: between two states. Directions: effective number of directions of the states, "
        "as a share of the most there could be.",
        "small",
    )
    numbers.write_csv(folder / "numbers.csv", rows)
    return picture


def _add_costs(page: Page, view: View, budgets: Sequence[int]) -> None:
    size = (view.pixels.shape[2], view.pixels.shape[3])
    if isinstance(view.keep, str):
        return  # each photo has its own
    costs = [cost(view.model.config, size, c, keep=view.keep) for c in budgets]
    page.heading("What a budget costs")
    rows = [
        [
            str(c.cores),
            f"{c.veca.interactions:,}",
            f"{c.interaction_ratio:.1%}",
            f"{c.veca.flops / 1e9:.2f}",
            f"{c.flops_ratio:.2f}",
        ]
        for c in costs
    ]
    dense = costs[0].dense
    rows.append(
        ["dense ViT", f"{dense.interactions:,}", "100.0%", f"{dense.flops / 1e9:.2f}", "1.00"]
    )
    page.table(["cores", "pairs", "pairs / N²", "GFLOPs", "GFLOPs / dense"], rows)
    page.text(
        f"Counted for {view.name} at {_pixels(view)} px; pairs are the interactions of one layer. "
        "`veca bench` measures time and memory.",
        "small",
    )


def _pixels(view: View) -> str:
    return f"{view.pixels.shape[2]} x {view.pixels.shape[3]}"
