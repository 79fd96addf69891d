"""Every figure by its name, with one set of options: what the command line and the report draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from veca._util.files import place_for
from veca.checks import check_layers
from veca.errors import InputError, check_choice
from veca.images import EXTENSIONS
from veca.model import Veca
from veca.viz.attention import KINDS, draw_attention, draw_single_cores
from veca.viz.cores import draw_paths, draw_states
from veca.viz.features import SIZES, draw_features, draw_sizes
from veca.viz.figure import FORMATS, Figure, check_format
from veca.viz.merged import draw_merged
from veca.viz.numbers import draw_numbers, measure, write_csv
from veca.viz.project import METHODS
from veca.viz.similarity import Point, draw_agreement, draw_similarity
from veca.viz.view import View, check_budgets, unique_names

_WRITTEN = tuple(f".{name}" for name in FORMATS)
# Nobody means a folder by a name such as x.jpg, so it is refused where figures cannot be that.
_FILE_SUFFIXES = EXTENSIONS | {*_WRITTEN, ".htm", ".pdf", ".eps", ".ps", ".avif", ".heic"}


@dataclass(frozen=True)
class Options:
    """What figures can be asked for; None is a figure's own choice. A figure takes what fits it."""

    cores: Sequence[int] | None = None
    """Budgets."""
    layers: Sequence[int] | None = None
    """1..L."""
    sizes: Sequence[int] = SIZES
    """Short sides in pixels, for the figure `sizes`."""
    kind: str = "norm"
    """Of attention: "norm", as published, or "softmax"."""
    method: str = "pca"
    """Of projection: "pca" or "umap"."""
    seed: int = 0
    """For UMAP."""
    overlay: float = 0.0
    """The photo's share in feature pictures, 0..1."""
    which: Sequence[int] | None = None
    """Numbers of single cores, from 1."""
    points: Sequence[Point] = ((0.5, 0.5),)
    """For similarity: (x, y) in 0..1 of the photo."""

    def __post_init__(self) -> None:
        check_choice("kind of attention", self.kind, KINDS)
        check_choice("projection", self.method, METHODS)

    def check(self, model: Veca) -> None:
        """Refuse budgets and layers that a model does not have, before any work is done."""
        check_budgets(model, self.cores)
        check_layers(self.layers, model.config.depth)


class NamedFigure(NamedTuple):
    """A figure: what it shows, and how it is drawn from views."""

    text: str
    together: bool
    """Whether several photos share one figure; otherwise each has its own."""
    draw: Callable[[Sequence[View], Options], Figure]


FIGURES: dict[str, NamedFigure] = {
    "features": NamedFigure(
        "dense features as colours, by budget and layer",
        True,
        lambda views, o: draw_features(
            views, o.cores, o.layers, method=o.method, seed=o.seed, overlay=o.overlay
        ),
    ),
    "sizes": NamedFigure(
        "dense features at several image sizes",
        True,
        lambda views, o: draw_sizes(
            views, o.sizes, o.cores, method=o.method, seed=o.seed, overlay=o.overlay
        ),
    ),
    "agreement": NamedFigure(
        "agreement of each patch with the full budget",
        True,
        lambda views, o: draw_agreement(views, o.cores),
    ),
    "attention": NamedFigure(
        "which cores look at which patch, layers x budgets",
        False,
        lambda views, o: draw_attention(
            views[0], o.cores, o.layers, kind=o.kind, method=o.method, seed=o.seed
        ),
    ),
    "cores": NamedFigure(
        "what single cores look at",
        False,
        lambda views, o: draw_single_cores(views[0], o.cores, o.which, o.layers, kind=o.kind),
    ),
    "paths": NamedFigure(
        "where the cores travel over the layers",
        False,
        lambda views, o: draw_paths(views[0], o.cores),
    ),
    "states": NamedFigure(
        "the states of the cores layer by layer",
        False,
        lambda views, o: draw_states(views[0], o.cores, o.layers, method=o.method, seed=o.seed),
    ),
    "merged": NamedFigure(
        "which patches go on as one token, step by step",
        True,
        lambda views, o: draw_merged(views, o.cores),
    ),
    "similarity": NamedFigure(
        "what is like the whole image, and like a chosen patch",
        False,
        lambda views, o: draw_similarity(views[0], o.points, o.cores),
    ),
    "numbers": NamedFigure(
        "spread, overlap, ways and redundancy of the cores as curves",
        True,
        lambda views, o: draw_numbers(measure(views, o.cores, kind=o.kind)),
    ),
}


def draw(name: str, views: View | Sequence[View], options: Options | None = None) -> list[Figure]:
    """Draw a figure by its name: one for all views, or one a view, as `FIGURES` says."""
    several = [views] if isinstance(views, View) else list(views)
    if not several:
        raise InputError("no photos were given; a figure needs at least one.")
    entry, options = find_figure(name), options or Options()
    groups = [several] if entry.together else [[view] for view in several]
    figures = [entry.draw(group, options) for group in groups]
    return [_with_share(figure, several[0]) for figure in figures]


def _with_share(figure: Figure, view: View) -> Figure:
    """With a caption that names the share of tokens that went on, if not all did."""
    if not view.merges:
        return figure
    promise = "" if view.agreement is None else f" with an agreement of {view.agreement:g}"
    return replace(figure, caption=f"{figure.caption} Tokens: keep {view.keep}{promise}.")


def find_figure(name: str) -> NamedFigure:
    check_choice("figure", name, FIGURES)
    return FIGURES[name]


def save(
    name: str,
    views: Sequence[View],
    out: str | Path,
    options: Options | None = None,
    *,
    format: str | None = None,
    command: str = "",
) -> list[Path]:
    """Draw a figure by its name and write it; return the files.

    Args:
        out: a folder, for files called after the figure (and the photo, if each has its own); or
            a file ending in .png, .svg or .html.
        format: png, svg or html; by default what `out` says, or png.
        command: what made the figure, for the foot of a page.
    """
    target, entry = place_for(out), find_figure(name)
    kind = output_format(target, format)
    as_file = is_file_name(target)
    if as_file and len(views) > 1 and not entry.together:
        raise InputError(
            f"{name} draws a figure for each of {len(views)} photos; choose a folder, not "
            f"{target.name}."
        )
    written: list[Path] = []
    groups = (
        [("", list(views))]
        if entry.together
        else [(f"{stem}-", [view]) for stem, view in unique_names(views)]
    )
    for stem, group in groups:
        figure = draw(name, group, options)[0]
        path = target if as_file else target / f"{stem}{figure.name}.{kind}"
        written.append(figure.save(path, kind, command=command))
        if name == "numbers":
            written.append(path.with_suffix(".csv"))
            write_csv(written[-1], figure.arrays["rows"])
    return written


def is_file_name(out: Path) -> bool:
    """Whether an output names a picture's or a page's file, not a folder."""
    return out.suffix.lower() in _FILE_SUFFIXES and not out.is_dir()


def output_format(out: Path, format: str | None) -> str:
    """png, svg or html: as asked, or as the name of a file says, which has to be one of them."""
    suffix = out.suffix.lower()
    if is_file_name(out) and suffix not in _WRITTEN:
        raise InputError(
            f"a figure cannot be written as {suffix}; give a file that ends in "
            f"{', '.join(_WRITTEN[:-1])} or {_WRITTEN[-1]}, or a folder, in place of {out}."
        )
    if format is not None:
        return check_format(format)
    return suffix.lstrip(".") if is_file_name(out) else "png"
