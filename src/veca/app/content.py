"""What the page shows, as plain functions: a photo and settings in, pictures and numbers out.

Nothing here knows of the web or keeps anything between calls; what belongs to one visitor is a
`Look`, which the caller keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from veca import bench
from veca._util.html import html_table
from veca.app.model_cache import LoadedModel
from veca.checks import check_budget, dial
from veca.cost import Cost, cost
from veca.embed.writers.files import write_features
from veca.errors import ImageError
from veca.images import pixel_limit, read_image, target_size
from veca.viz.attention import core_panel
from veca.viz.colour import heat
from veca.viz.cores import path_lengths, path_panel
from veca.viz.features import colour_panel
from veca.viz.figure import Panel
from veca.viz.merged import merged_picture as draw_merged_picture
from veca.viz.project import Palette
from veca.viz.similarity import Point, cls_map, point_map, point_mark
from veca.viz.view import View, file_stem, inference

_QUICK_MS = 1500.0  # a dense network expected to be slower is timed when asked for alone
_ENDLESS_MS = 60_000.0  # and one expected to be slower than this, never
_PATCH = 16  # pixels; what a photo is kept for does not change with other weights


@dataclass(frozen=True)
class Limits:
    """What an upload may be."""

    file_bytes: int = 25 * 2**20
    pixels: int = field(default_factory=partial(pixel_limit, 50_000_000))
    patches: int = 16_384
    """Of the image that the model sees: a long thin photo has many at any short side."""
    size: int = 1024
    """Short side in pixels at which the page shows a photo, at most."""
    height: int = 384
    """Of the pictures, in pixels."""


@dataclass(frozen=True)
class Photo:
    """An upright RGB photo, and what the visitor calls it."""

    name: str
    image: Image.Image
    """Scaled down to what the page can show of it."""
    original: tuple[int, int]
    """(height, width) of the file's."""


@dataclass(frozen=True)
class Look:
    """A photo seen by some weights at a size: what one visitor is looking at."""

    photo: Photo
    weights: str
    fresh: bool
    size: int
    view: View
    palette: Palette
    """Fitted at the full budget, so that colours do not change their meaning with the slider."""


class Times(NamedTuple):
    """Measured milliseconds of one image, the fastest of up to three runs."""

    veca: float
    dense: float | None
    """None where it was not timed."""
    expected: float
    """What the dense network should take, from VECA's time and the counts of both."""


def open_photo(path: str | Path, limits: Limits | None = None, name: str | None = None) -> Photo:
    """Read a photo, and keep no more of it than the page can show.

    Args:
        name: what the visitor calls the file; by default its name.

    Raises:
        ImageError: with a message for the visitor, in which the file has its own name.
    """
    limits, file = limits or Limits(), Path(path)
    name = name or file.name
    try:
        size = file.stat().st_size
        if size > limits.file_bytes:
            raise ImageError(
                f"it has {size / 2**20:.1f} MiB, more than the {limits.file_bytes / 2**20:.0f} MiB "
                "this page takes"
            )
        # From bytes, so that messages do not tell where the server keeps its files.
        image = read_image(file.read_bytes(), max_pixels=limits.pixels)
    except (ImageError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        # The library's advice, after the semicolon, is for programmers.
        short = (reason or "it cannot be read").removeprefix("<bytes>: ").split(";")[0]
        raise ImageError(
            f"{name} cannot be used: {short.rstrip('.')}. Try another photo, a JPEG or a PNG."
        ) from error
    return Photo(Path(name).stem, _shrunk(image, limits), (image.height, image.width))


def _shrunk(image: Image.Image, limits: Limits) -> Image.Image:
    """An image with the pixels that the largest size of the page needs."""
    most = limits.patches * _PATCH**2
    scale = min(limits.size / min(image.size), math.sqrt(most / (image.width * image.height)))
    if scale >= 1:
        return image
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)


def look(entry: LoadedModel, photo: Photo, size: int, limits: Limits | None = None) -> Look:
    """See a photo at a size (short side in pixels) with some weights."""
    limits, model = limits or Limits(), entry.model
    image, patch = photo.image, model.config.patch_size
    height, width = target_size(image.height, image.width, size, "resize", patch)
    patches = (height // patch) * (width // patch)
    if patches > limits.patches:
        raise ImageError(
            f"{photo.name} is {photo.original[1]} x {photo.original[0]} pixels: at {size} px it "
            f"would be {patches:,} patches, more than the {limits.patches:,} this page takes. "
            "Choose a smaller size, or a less elongated photo."
        )
    view = View(model, image, size, name=photo.name, height=limits.height)
    palette = Palette.fit([view.run().patches])
    return Look(photo, entry.name, entry.fresh, size, view, palette)


def merging(seen: Look, keep: float) -> Look:
    """The same with another share of patch tokens that go on; the colours stay what they are."""
    _ = seen.view.shown  # made once, for all shares
    share = round(keep, 2) if isinstance(keep, float) else keep  # a slider counts in float steps
    return replace(seen, view=seen.view.merging(share))


def budget_of(seen: Look, cores: int) -> int:
    """A slider's value as a budget of these weights, whose bank may be smaller."""
    whole = seen.view.model.config.num_cores
    return check_budget(min(int(cores), whole), whole)


def photo_picture(seen: Look, point: Point | None = None) -> Image.Image:
    """The photo, with the chosen point on it."""
    return Panel(seen.view.shown, marks=[point_mark(point)] if point else []).image()


def features_picture(seen: Look, cores: int) -> Image.Image:
    """Dense features as colours; the same features have the same colour at every budget."""
    patches = seen.view.run(budget_of(seen, cores)).patches
    return colour_panel(seen.view, seen.palette(patches))


def merged_picture(seen: Look, cores: int) -> tuple[Image.Image, int, int]:
    """What has merged in the end, over the photo; the tokens that are left, and the patches."""
    view, steps = seen.view, seen.view.run(budget_of(seen, cores)).steps
    patches = view.grid[0] * view.grid[1]
    if not steps:
        return view.shown, patches, patches
    return draw_merged_picture(view.shown, steps[-1].token_of, view.grid), steps[-1].tokens, patches


def attention_picture(seen: Look, cores: int, layer: int, core: int, kind: str) -> Image.Image:
    """What one core looks at in one layer; numbers beyond the weights' own count as the last."""
    budget = budget_of(seen, cores)
    layer = min(int(layer), seen.view.model.config.depth)
    core = min(int(core), budget)
    weights = seen.view.attention(budget, [layer], kind)[0, core - 1]
    xy = seen.view.run(budget).path[layer - 1, core - 1]
    return core_panel(seen.view, weights, xy, core, layer, budget).image()


def paths_picture(seen: Look, cores: int) -> tuple[Image.Image, float]:
    """The ways of the cores on the photo, and their mean length in patches."""
    path = seen.view.run(budget_of(seen, cores)).path
    return path_panel(seen.view, path).image(), path_lengths(path, seen.view.grid).mean().item()


def similarity_picture(
    seen: Look, cores: int, point: Point | None
) -> tuple[Image.Image, tuple[float, float]]:
    """Cosines with the patch under a point, or with the whole image where none is chosen.

    Also the least and the largest, which are the darkest and the brightest colour.
    """
    budget = budget_of(seen, cores)
    if point is None:
        values, marks = cls_map(seen.view, budget), []
    else:
        values, marks = point_map(seen.view, point, budget), [point_mark(point)]
    low, high = values.min().item(), values.max().item()
    picture = heat(seen.view.shown, values, low=low, high=high, strength=1)
    return Panel(picture, marks=marks).image(), (low, high)


def point_at(pixel: tuple[int, int], size: tuple[int, int]) -> Point:
    """A clicked pixel (x, y) of a picture of `size` (width, height) as a point in 0..1."""
    x, y = ((p + 0.5) / side for p, side in zip(pixel, size, strict=True))
    return min(max(x, 0.0), 1.0), min(max(y, 0.0), 1.0)


def measure_times(seen: Look, entry: LoadedModel, cores: int) -> Times:
    """Time this photo at a budget; the dense ViT once for each image size, if that is quick.

    Its time does not depend on the budget. Where it is expected to take long, it is timed only
    when `time_dense` is called: the visitor waits for the pictures.
    """
    budget, size = budget_of(seen, cores), _size(seen)
    pixels = seen.view.pixels.to(next(entry.model.parameters()).device)
    # Drawing was the warm-up.
    share = dial(seen.view.keep)
    veca = _milliseconds(entry, lambda: entry.model(pixels, cores=budget, **share), warm_up=False)
    counted = photo_cost(seen, budget)
    expected = veca * counted.dense.flops / counted.veca.flops
    if size not in entry.dense_ms and expected < _QUICK_MS:
        entry.dense_ms[size] = _milliseconds(entry, lambda: entry.dense(pixels), warm_up=True)
    return Times(veca, entry.dense_ms.get(size), expected)


def time_dense(seen: Look, entry: LoadedModel, cores: int) -> Times:
    """As `measure_times`, and the dense ViT even where it is slow.

    Raises:
        ImageError: it is expected to take minutes, and other visitors wait.
    """
    times, size = measure_times(seen, entry, cores), _size(seen)
    if times.dense is not None:
        return times
    if times.expected > _ENDLESS_MS:
        raise ImageError(
            f"The dense ViT would take about {times.expected / 1000:.0f} s at {size[0]} x "
            f"{size[1]} px. Choose a smaller size to time it."
        )
    pixels = seen.view.pixels.to(next(entry.model.parameters()).device)
    entry.dense_ms[size] = _milliseconds(entry, lambda: entry.dense(pixels), warm_up=False)
    return times._replace(dense=entry.dense_ms[size])


def _milliseconds(entry: LoadedModel, call: Callable[[], object], *, warm_up: bool) -> float:
    """The fastest of up to three runs; of a slow call there is one."""
    plan = bench.BenchPlan(
        sizes=(entry.model.config.patch_size,),  # not used: the call brings its own image
        device=str(next(entry.model.parameters()).device),
        repeats=3,
        seconds=0.0,
        limit=0.2,
    )
    with inference(entry.model):
        return min(bench.take_turns({"": call}, plan, warm_up=warm_up)[""])


def _size(seen: Look) -> tuple[int, int]:
    """(height, width) in pixels of what the model sees."""
    return seen.view.pixels.shape[2], seen.view.pixels.shape[3]


def photo_cost(seen: Look, cores: int) -> Cost:
    """Interactions and FLOPs of this photo at a budget, beside the dense ViT's."""
    view = seen.view
    return cost(view.model.config, _size(seen), budget_of(seen, cores), keep=view.keep)


def costs_table(seen: Look, cores: int, times: Times) -> str:
    """Time, FLOPs and interactions beside the dense ViT's, as an HTML table."""
    c = photo_cost(seen, cores)
    rows = [
        (name, form.format(value), form.format(dense), f"{value / dense:.1%}")
        if dense
        else (name, form.format(value), "not timed", "")
        for name, value, dense, form in (
            ("ms", times.veca, times.dense, "{:.1f}"),
            ("GFLOPs", c.veca.flops / 1e9, c.dense.flops / 1e9, "{:.2f}"),
            ("interactions", c.veca.interactions, c.dense.interactions, "{:,}"),
        )
    ]
    ours = f"VECA, {c.cores} core{'s' * (c.cores != 1)}"
    ours += f", keep {c.keep:g}" if seen.view.merges else ""
    header = ("", ours, "dense ViT", "of dense")
    height, width = c.size
    return f'<div class="scroll">{html_table(header, rows)}</div>' + (
        f"<p>{escape(seen.photo.name)} at {height} x {width} px, {c.grid[0]} x {c.grid[1]} "
        f"patches; {escape(seen.weights)}. Milliseconds are measured, the fastest of up to three "
        "runs; the rest is counted, interactions for one layer.</p>"
    )


def features_file(seen: Look, cores: int, folder: str | Path) -> Path:
    """Write the features at a budget as .npz, as `veca features` does; return the file.

    They are those of the photo as the page keeps it: of a larger file, scaled down once more than
    `veca features` would.
    """
    budget = budget_of(seen, cores)
    view, run = seen.view, seen.view.run(budget)
    facts = {
        "grid": view.grid,
        "cores": budget,
        "original_size": seen.photo.original,
        "input_size": _size(seen),
    }
    arrays = {
        "cls": run.states[-1, 0].numpy(),
        "patches": run.patches.unflatten(0, view.grid).numpy(),
        "core_states": run.states[-1].numpy(),
        "core_xy": run.path[-1].numpy(),
        **{name: np.array(value, dtype=np.int64) for name, value in facts.items()},
    }
    share = ""
    if view.merges:
        arrays["keep"], share = np.array(view.keep), f"-keep-{view.keep}"
    path = Path(folder) / f"{file_stem(seen.photo.name)}-{budget}-cores{share}.npz"
    write_features(path, arrays, {"image": seen.photo.name, "weights": seen.weights})
    return path
