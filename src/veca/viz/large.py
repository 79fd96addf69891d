"""A large picture and its features: an overview, and a page to zoom into that works from disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from veca._util.files import atomic_write, atomic_write_text, output_errors
from veca._util.npm import NpmPackage
from veca.errors import LargeError, at_least
from veca.large import FeatureStore, PictureView, overview
from veca.viz.project import Palette

_ASSETS = Path(__file__).parent.parent / "assets"
_TILE = 256
_SAMPLE = 40_000  # patches that colours are found of
_GAP = 16  # pixels between the two halves of the overview
_ROWS = 64  # of patches that are coloured at a time

Pixels = np.ndarray[Any, Any]

VIEWER = NpmPackage(
    "openseadragon",
    "6.1.1",
    "g4iKe2q8B642SaBT3+x4ZF3/8b1TxPPydyjmtrOLgDrlYWMKd9ZXM+1Cb/xa9DVySkvs/7l6HR1nHKfD5F3Tsw==",
    ("build/openseadragon/openseadragon.min.js", "LICENSE.txt"),
    option="--openseadragon",
    error=LargeError,
)
"""What the page zooms with."""


class LargePage(NamedTuple):
    """What was written."""

    page: Path
    overview: Path


def large_page(
    store: FeatureStore,
    out: Path,
    picture: PictureView | None = None,
    *,
    longest: int = 16_384,
    viewer: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LargePage:
    """Write `overview.png`, `index.html` and the tiles that the page shows into a folder.

    Args:
        picture: by default the file that the features were made of.
        longest: pixels of the picture's longer side in the page, at most.
        viewer: the npm package openseadragon, its folder or archive, where npm cannot bring it.
        progress: called with (done, total) tiles of the finest level.
    """
    if store.features is None:
        raise LargeError(f"{store.path} keeps the core memory alone; compute its features first.")
    script, licence = VIEWER.find(viewer).values()
    source = store.picture() if picture is None else picture
    colours = patch_colours(store)
    shown = source.reduced(at_least("longest", longest))
    with output_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        side_by_side = _overview(source, colours, store.patch_size)
        with atomic_write(out / "overview.png") as file:
            side_by_side.save(file, "png")
        for name in ("picture_files", "features_files"):
            shutil.rmtree(out / name, ignore_errors=True)
        _pyramid(shown.shape, shown.window, out / "picture_files", "jpg", progress)
        _pyramid(
            (colours.shape[0], colours.shape[1]),
            lambda top, left, height, width: colours[top : top + height, left : left + width],
            out / "features_files",
            "png",
        )
        for name, content in (("min.js", script), ("LICENSE.txt", licence)):
            with atomic_write(out / f"openseadragon.{name}") as file:
                file.write(content)
    data = {
        "tile": _TILE,
        "size": [source.shape[1], source.shape[0]],
        # The last patches may reach over the picture's edge.
        "across": colours.shape[1] * store.patch_size / source.shape[1],
        "picture": _layer("picture_files", "jpg", shown.shape),
        "features": _layer("features_files", "png", (colours.shape[0], colours.shape[1])),
    }
    facts = (
        f"{source.shape[1]:,} x {source.shape[0]:,} px, {store.grid[1]} x {store.grid[0]} patches, "
        f"{store.facts['cores']} cores, context {store.facts['context']}"
    )
    page = Template((_ASSETS / "page" / "large.html").read_text("utf-8")).substitute(
        title=escape(source.source.path.name),
        facts=escape(facts),
        data=json.dumps(data).replace("<", "\\u003c"),
    )
    atomic_write_text(out / "index.html", page)
    return LargePage(out / "index.html", out / "overview.png")


def _layer(folder: str, format: str, shape: tuple[int, int]) -> dict[str, Any]:
    return {"folder": folder, "format": format, "width": shape[1], "height": shape[0]}


def patch_colours(store: FeatureStore) -> Pixels:
    """The principal components of the features as colours, uint8 [h, w, 4]; masked ones clear."""
    height, width = store.grid
    mask = np.ones((height, width), bool) if store.mask is None else store.mask
    step = max(1, -(-int(mask.sum()) // _SAMPLE))
    sample, seen = [], 0
    for top in range(0, height, _ROWS):
        band = np.asarray(store.features[top : top + _ROWS])[mask[top : top + _ROWS]]
        sample.append(torch.from_numpy(band[-seen % step :: step].astype(np.float32)))
        seen += len(band)
    palette = Palette.fit(sample)
    found = np.zeros((height, width, 4), np.uint8)
    for top in range(0, height, _ROWS):
        band = np.asarray(store.features[top : top + _ROWS]).astype(np.float32)
        shape = band.shape[:2]
        colours = palette(torch.from_numpy(band).flatten(0, 1)).view(*shape, 3)
        found[top : top + _ROWS, :, :3] = (colours * 255).round().byte().numpy()
        found[top : top + _ROWS, :, 3] = mask[top : top + _ROWS] * np.uint8(255)
    return found


def _overview(source: PictureView, colours: Pixels, patch_size: int) -> Image.Image:
    """The picture and its features' colours beside each other."""
    photo = Image.fromarray(overview(source, 1024))
    # Of the colours what lies on the picture.
    box = (0, 0, source.shape[1] / patch_size, source.shape[0] / patch_size)
    white = Image.new("RGBA", colours.shape[1::-1], "white")
    white.alpha_composite(Image.fromarray(colours))
    smooth = colours.shape[1] > photo.width
    how = Image.Resampling.BOX if smooth else Image.Resampling.NEAREST
    drawn = white.convert("RGB").resize(photo.size, how, box=box)
    found = Image.new("RGB", (2 * photo.width + _GAP, photo.height), "white")
    found.paste(photo, (0, 0))
    found.paste(drawn, (photo.width + _GAP, 0))
    return found


def _pyramid(
    shape: tuple[int, int],
    window: Callable[[int, int, int, int], Pixels],
    folder: Path,
    format: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Tiles in the layout of DeepZoom; coarser levels are made of the finer ones' tiles."""
    shapes = [shape]
    while max(shapes[-1]) > 1:
        shapes.append((-(-shapes[-1][0] // 2), -(-shapes[-1][1] // 2)))
    for depth, (height, width) in enumerate(shapes):
        level = folder / str(len(shapes) - 1 - depth)
        level.mkdir(parents=True)
        rows, columns = -(-height // _TILE), -(-width // _TILE)
        for row in range(rows):
            for column in range(columns):
                top, left = row * _TILE, column * _TILE
                size = (min(_TILE, height - top), min(_TILE, width - left))
                if depth == 0:
                    tile = Image.fromarray(np.ascontiguousarray(window(top, left, *size)))
                else:
                    tile = _halved(level.with_name(str(len(shapes) - depth)), row, column, format)
                    tile = tile.resize(size[::-1], Image.Resampling.BOX)
                tile.save(level / f"{column}_{row}.{format}", **_quality(format))
                if depth == 0 and progress is not None:
                    progress(row * columns + column + 1, rows * columns)


def _quality(format: str) -> dict[str, Any]:
    return {"quality": 85} if format == "jpg" else {}


def _halved(finer: Path, row: int, column: int, format: str) -> Image.Image:
    """Up to four tiles of the finer level as one picture."""
    parts = {}
    for down in (0, 1):
        for across in (0, 1):
            path = finer / f"{2 * column + across}_{2 * row + down}.{format}"
            if path.exists():
                with Image.open(path) as image:
                    parts[down, across] = image.copy()
    width = sum(part.width for (down, _), part in parts.items() if down == 0)
    height = sum(part.height for (_, across), part in parts.items() if across == 0)
    found = Image.new(parts[0, 0].mode, (width, height))
    for (down, across), part in parts.items():
        found.paste(part, (across * parts[0, 0].width, down * parts[0, 0].height))
    return found
