"""The numbers behind the pictures, by layer and budget, and what they say of the published claims.

The paper shows how attention narrows, cores travel and states gather only as pictures. Here each
is a number with a definition, averaged over cores and photos:

    coverage    exp(entropy) of a core's attention over the number of patches: 1 when it looks at
                all patches alike, 1/N when at one
    radius      root mean square distance of what a core looks at from its middle, in half sides
                of the image; 0.82 when it looks everywhere alike
    roundness   short over long axis of what it looks at, in the model's coordinates: 1 is a
                circle, 0 a line
    overlap     share of their attention that two cores have in common, over all pairs: 1 is the
                same map, 0 is no patch in common
    path        how far a core has travelled up to this layer, in patches
    cosine      between the states of two cores, over all pairs: 1 is full redundancy
    directions  effective number of directions of the states around their mean, as a share of the
                most there could be: 1 is an even cloud, near 0 a few clusters
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from veca import rope
from veca._util.files import atomic_write
from veca.errors import InputError
from veca.viz.chart import chart
from veca.viz.figure import Figure
from veca.viz.view import View, check_budgets

MARGIN = 0.05
"""A number must change by this share of itself before a verdict calls it a change."""


@dataclass(frozen=True)
class Numbers:
    """One budget and layer; see the module's text for what each number means.

    NaN where there is nothing to measure: overlap, cosine and directions of a single core.
    """

    cores: int
    layer: int
    """1 for the first block."""
    coverage: float
    """exp(entropy) of a core's attention over the number of patches: 1 is everywhere alike."""
    radius: float
    """Root mean square distance of what a core looks at from its middle, in half sides."""
    roundness: float
    """Short over long axis of what a core looks at: 1 is a circle."""
    overlap: float
    """Attention that two cores have in common, mean over pairs: 1 is the same map."""
    path: float
    """How far a core has travelled so far, in patches."""
    cosine: float
    """Between the states of two cores, mean over pairs."""
    directions: float
    """Effective number of directions of the states, as a share of the most possible."""


MEASURES = tuple(field.name for field in fields(Numbers))[2:]


@dataclass(frozen=True)
class Verdict:
    """Whether measured numbers show a published behaviour."""

    claim: str
    holds: bool
    measure: str
    """The number that decides."""
    before: float
    after: float
    """The two values of it that are compared."""

    def __str__(self) -> str:
        answer = "yes" if self.holds else "no"
        return f"{self.claim}: {answer} ({self.measure} {self.before:.3g} -> {self.after:.3g})"


def measure(
    views: Sequence[View], cores: Sequence[int] | None = None, *, kind: str = "norm"
) -> list[Numbers]:
    """The numbers of every layer at each budget, averaged over photos."""
    if not views:
        raise InputError("no photos were given; the numbers need at least one.")
    return [
        row for budget in check_budgets(views[0].model, cores) for row in _rows(views, budget, kind)
    ]


def _rows(views: Sequence[View], budget: int, kind: str) -> list[Numbers]:
    photos = []
    for view in views:
        run = view.run(budget)
        maps = view.attention(budget, None, kind)
        layers = [
            (*attention_numbers(maps[i]), *state_numbers(run.states[i])) for i in range(len(maps))
        ]
        h, w = view.grid
        steps = (run.path.diff(dim=0) * torch.tensor([w / 2, h / 2])).norm(dim=-1).mean(dim=1)
        path = torch.cat([torch.zeros(1), steps.cumsum(dim=0)]).double()
        photos.append(torch.cat([torch.tensor(layers, dtype=torch.float64), path[:, None]], dim=1))
    mean = torch.stack(photos).mean(dim=0).tolist()
    return [
        Numbers(budget, layer, coverage, radius, roundness, overlap, path, cosine, directions)
        for layer, (coverage, radius, roundness, overlap, cosine, directions, path) in enumerate(
            mean, start=1
        )
    ]


def attention_numbers(maps: Tensor) -> tuple[float, float, float, float]:
    """Coverage, radius, roundness and overlap of maps [C, h, w] that sum to 1."""
    count, h, w = maps.shape
    weights = maps.double().flatten(1)
    entropy = -torch.xlogy(weights, weights).sum(dim=1)
    coverage = (entropy.exp() / (h * w)).mean().item()

    xy = rope.grid_coordinates(h, w).double()
    middle = weights @ xy
    away = xy[None] - middle[:, None]
    covariance = torch.einsum("cn,cni,cnj->cij", weights, away, away)
    axes = torch.linalg.eigvalsh(covariance).clamp_min(0)
    radius = axes.sum(dim=1).sqrt().mean().item()
    roundness = (axes[:, 0] / axes[:, 1].clamp_min(1e-30)).sqrt().mean().item()

    # Row by row: all pairs at once would be C x C x N numbers.
    shared = sum(torch.minimum(row, weights).sum().item() for row in weights)
    # A core shares all with itself.
    overlap = (shared - count) / (count * (count - 1)) if count > 1 else math.nan
    return coverage, radius, roundness, overlap


def state_numbers(states: Tensor) -> tuple[float, float]:
    """Mean cosine between states [C, D], and their effective directions."""
    count = len(states)
    if count < 2:
        return math.nan, math.nan
    unit = F.normalize(states.double(), dim=1)
    cosine = ((unit @ unit.T).sum().item() - count) / (count * (count - 1))
    centred = states.double() - states.double().mean(dim=0)
    spectrum = torch.linalg.svdvals(centred).square()
    share = spectrum / spectrum.sum().clamp_min(1e-300)
    most = min(count - 1, states.shape[1])
    directions = (-torch.xlogy(share, share).sum()).exp().item() / most
    return cosine, directions


def verdicts(rows: Sequence[Numbers]) -> list[Verdict]:
    """Whether the numbers show what the paper shows as pictures.

    Early is the first third of the layers, late the last third; changes over layers are judged
    at the largest budget measured, changes with the budget over all layers.
    """
    budgets = sorted({row.cores for row in rows})
    layers = sorted({row.layer for row in rows})
    third = max(1, len(layers) // 3)
    early, late = layers[:third], layers[-third:]
    small, large = budgets[0], budgets[-1]

    def mean(name: str, budget: int, depths: Sequence[int]) -> float:
        values = [getattr(r, name) for r in rows if r.cores == budget and r.layer in depths]
        return sum(values) / len(values)

    def falls(claim: str, name: str, before: float, after: float) -> Verdict:
        # False for NaN as well: what cannot be measured is not shown.
        return Verdict(claim, after <= before * (1 - MARGIN), name, before, after)

    found = []
    if small < large:
        found.append(
            falls(
                f"attention gets narrower from {small} to {large} cores",
                "coverage",
                mean("coverage", small, layers),
                mean("coverage", large, layers),
            )
        )
    if len(layers) > 1:
        for claim, name in (
            ("attention focuses from early to late layers", "coverage"),
            ("attention is round early and shaped by the image late", "roundness"),
            ("states of the cores are an even cloud early and clustered late", "directions"),
        ):
            found.append(falls(claim, name, mean(name, large, early), mean(name, large, late)))
    last = mean("path", large, layers[-1:])
    found.append(Verdict("cores travel by a patch or more", last >= 1, "patches", 0.0, last))
    return found


def summary(found: Sequence[Verdict], fresh: bool) -> str:
    """One sentence: how many of the published behaviours the numbers show, by which weights."""
    shown = sum(verdict.holds for verdict in found)
    if fresh:
        return (
            f"Fresh random weights: {shown} of {len(found)} published behaviours show in these "
            "numbers. Nothing has been learned, so none is expected to."
        )
    if shown == len(found):
        return f"These weights show all {shown} published behaviours."
    return f"These weights show {shown} of {len(found)} published behaviours."


def text_table(
    rows: Sequence[Numbers], layers: Sequence[int] | None = None
) -> tuple[list[str], list[list[str]]]:
    """A header and rows of text; `layers` picks some."""
    chosen = [row for row in rows if layers is None or row.layer in layers]
    body = [
        [str(row.cores), str(row.layer), *(_cell(getattr(row, name)) for name in MEASURES)]
        for row in chosen
    ]
    return ["cores", "layer", *MEASURES], body


def write_csv(path: str | Path, rows: Sequence[Numbers]) -> None:
    """One line a budget and layer; NaN is an empty cell."""
    with atomic_write(path, "w") as file:
        writer = csv.DictWriter(
            file, [field.name for field in fields(Numbers)], lineterminator="\n"
        )
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _exact(value) for name, value in asdict(row).items()})


def read_csv(path: str | Path) -> list[Numbers]:
    """What `write_csv` wrote."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return [
            Numbers(
                int(row.pop("cores")),
                int(row.pop("layer")),
                **{name: float(cell) if cell else math.nan for name, cell in row.items()},
            )
            for row in csv.DictReader(file)
        ]


def draw_numbers(
    rows: Sequence[Numbers],
    names: Sequence[str] = ("coverage", "roundness", "overlap", "path", "directions"),
) -> Figure:
    """The numbers over the layers, a line a budget, a panel a measure."""
    budgets = sorted({row.cores for row in rows})
    panels = []
    for name in names:
        lines = {
            f"{c} cores": [(row.layer, getattr(row, name)) for row in rows if row.cores == c]
            for c in budgets
        }
        panels.append(chart(lines, title=name, x_label="layer", zero=name != "directions"))
    half = (len(panels) + 1) // 2
    caption = "The numbers of the table over the layers, a line a budget."
    rows_of_panels = [panels[:half], panels[half:]]
    return Figure(rows_of_panels, caption, "numbers", {"rows": list(rows)}, charts=True)


def _exact(value: float) -> float | str:
    if isinstance(value, int):
        return value
    return "" if math.isnan(value) else f"{value:.9g}"


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"
