"""A first look: bundled photos at every budget, with what it costs and what it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from veca import bench, viz
from veca.cost import Cost, cost
from veca.files import atomic_write
from veca.html import Page
from veca.images import preprocess, read_image
from veca.model import Veca, VecaOutput, create_model
from veca.weights import find, load

BUDGETS = (8, 16, 24, 32, 40, 48, 56, 64)
PICTURED = (8, 16, 32, 64)
DEFAULT_WEIGHTS = "veca_tiny_patch16"
FRESH = (
    "These are fresh random weights, not trained ones: costs and times are real, but the features "
    "and the pictures mean nothing yet."
)


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
    rows: list[BudgetRow]
    dense_ms: float
    page: Path


def bundled_photos() -> list[Path]:
    """The photos that come with the package; their credits lie beside them."""
    return sorted((Path(__file__).parent / "assets" / "photos").glob("*.jpg"))


def quickstart(
    out: Path,
    photos: Sequence[Path] | None = None,
    *,
    weights: str | None = None,
    size: int = 512,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] = lambda line: None,
) -> Quickstart:
    """Run photos at budgets 8..64, draw them, time them beside a dense ViT; write a page to `out`.

    Args:
        photos: image files; by default the bundled ones.
        weights: what `veca.load` takes; by default the bundled tiny weights, or fresh ones where
            there are none.
        size: the short side of the photos and the side of the timed image, in pixels.
    """
    name, model, trained = _model(weights, device)
    budgets = [c for c in BUDGETS if c <= model.config.num_cores] or [model.config.num_cores]
    out.mkdir(parents=True, exist_ok=True)

    seen: list[tuple[float, float]] = []
    sheets: list[tuple[str, str]] = []
    for path in photos or bundled_photos():
        progress(f"looking at {path.name}")
        photo = read_image(path)
        outputs = _outputs(model, photo, size, budgets, device)
        seen += [_agreement(outputs[c], outputs[budgets[-1]]) for c in budgets]
        sheets += _draw(model, photo, path.stem, outputs, size, device, out)

    progress("timing beside a dense ViT")
    times = _times(model, budgets, size, device)
    by_budget = torch.tensor(seen).view(-1, len(budgets), 2).mean(dim=0).tolist()
    rows = [
        BudgetRow(c, cost(model.config, size, c), times[f"veca {c}"], *by_budget[i])
        for i, c in enumerate(budgets)
    ]
    result = Quickstart(name, trained, size, rows, times["dense"], out / "index.html")
    _write_page(result, sheets, device)
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


def _model(weights: str | None, device: torch.device | str) -> tuple[str, Veca, bool]:
    if weights is None and find(DEFAULT_WEIGHTS) is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return DEFAULT_WEIGHTS, create_model(DEFAULT_WEIGHTS).to(device).eval(), False
    name = weights or DEFAULT_WEIGHTS
    return name, load(name, device=device), True


def _pixels(model: Veca, photo: Image.Image, size: int, device: torch.device | str) -> Tensor:
    c = model.config
    batch = preprocess(photo, size, patch_size=c.patch_size, mean=c.image_mean, std=c.image_std)
    return batch.pixels.to(device)


@torch.inference_mode()
def _outputs(
    model: Veca, photo: Image.Image, size: int, budgets: Sequence[int], device: torch.device | str
) -> dict[int, VecaOutput]:
    pixels = _pixels(model, photo, size, device)
    return {c: model(pixels, cores=c) for c in budgets}


def _agreement(some: VecaOutput, full: VecaOutput) -> tuple[float, float]:
    cosine = torch.nn.functional.cosine_similarity
    return (
        cosine(some.cls, full.cls, dim=-1).mean().item(),
        cosine(some.patches, full.patches, dim=-1).mean().item(),
    )


@torch.inference_mode()
def _draw(
    model: Veca,
    photo: Image.Image,
    name: str,
    outputs: dict[int, VecaOutput],
    size: int,
    device: torch.device | str,
    out: Path,
) -> list[tuple[str, str]]:
    """Write a photo's pictures; return (file name, what it shows) of each."""
    pictured = [c for c in PICTURED if c in outputs] or list(outputs)
    maps = [outputs[c].feature_map()[0] for c in pictured]
    features = viz.feature_pictures(maps, (photo.height, photo.width))
    pixels = _pixels(model, photo, size, device)
    most = max(outputs)

    path = [o.core_xy[0] for o in model.forward_intermediates(pixels, most)]
    attention = model.attention_maps(pixels, 8 if 8 in outputs else most, kind="norm")[0, -1]
    sheets = {
        f"{name}-features.png": (
            viz.strip([photo, *features], [name, *(f"{c} cores" for c in pictured)]),
            f"{name}: dense features as colours, one scale of colours for all budgets",
        ),
        f"{name}-cores.png": (
            viz.strip(
                [viz.draw_cores(photo, path), *(viz.heat(photo, a) for a in attention[:4])],
                [
                    f"{most} cores and their ways",
                    *(f"core {i + 1} of 8 looks at" for i in range(4)),
                ],
            ),
            f"{name}: where the cores travel, and what the first four of eight look at in the "
            "last layer",
        ),
    }
    for file_name, (picture, _) in sheets.items():
        with atomic_write(out / file_name) as file:
            picture.save(file, format="PNG")
    return [(file_name, text) for file_name, (_, text) in sheets.items()]


def _times(
    model: Veca, budgets: Sequence[int], size: int, device: torch.device | str
) -> dict[str, float]:
    plan = bench.Plan(sizes=(size,), device=str(device), repeats=5, seconds=3.0, limit=30.0)
    rows = bench.bench(model, plan, cores=budgets)
    return {"dense" if r.model == bench.DENSE else f"veca {r.cores}": r.ms for r in rows}


def _write_page(
    result: Quickstart, sheets: Sequence[tuple[str, str]], device: torch.device | str
) -> None:
    where = bench.machine(device)
    page = Page("VECA: one set of weights, any budget")
    page.text(
        "Every patch of the image lives through the whole network, but patches talk only through "
        "a few cores. How many is chosen at inference: fewer cores, less work."
    )
    if not result.trained:
        page.text(FRESH, "note")
    page.heading("What a budget costs, and what it changes")
    page.table(*table(result))
    page.text(
        f"{result.weights}, one image of {result.size} x {result.size} pixels, timed in turns with "
        f"a dense ViT of the same width and depth on {where.gpu or where.cpu}, torch "
        f"{where.torch}. Pairs: "
        "interactions of one layer. The last two columns are cosines with the full budget, over "
        "the photos below.",
        "small",
    )
    page.heading("What it sees")
    for source, text in sheets:
        page.picture(source, text)
        page.text(text, "small")
    page.write(result.page)
