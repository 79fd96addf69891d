"""A page that runs the network in a visitor's browser: a folder for any file server."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from veca._util import files
from veca.checks import check_model
from veca.errors import InputError, OutputError, check_choice
from veca.export.api import ANY, Exported, export_model
from veca.export.browser_runtime import RUNTIME
from veca.export.graph import frozen_copy
from veca.export.precision import GATES
from veca.export.verify import Photo
from veca.images.bundled import bundled_photos
from veca.merging import LEAST_OPEN_KEEP
from veca.model import Veca
from veca.quantization import Agreement
from veca.version import __version__
from veca.weights import weights_hash

WEB_PRECISIONS = ("int8", "fp16", "fp32")
"""What a page can take; fp16 for the weights alone, and float32 to compute in: browsers widen no
bfloat16, and WebAssembly has no arithmetic in half precision."""
PAGE = Path(__file__).parents[1] / "assets" / "web"
_FIRST = "chelsea.jpg"
_CHECK_SIZE = 224


@dataclass(frozen=True)
class Website:
    """A folder that was written."""

    path: Path
    models: tuple[Exported, ...]
    """What it holds for WebAssembly, and for WebGPU."""
    bytes: int
    """Of all files."""


def export_web(
    model: Veca,
    out: str | os.PathLike[str],
    *,
    precision: str = "int8",
    name: str = "veca",
    ort: str | os.PathLike[str] | None = None,
    check_sizes: Sequence[tuple[int, int]] | None = None,
    data: Photo | Sequence[Photo] | None = None,
    gate: Agreement | tuple[float, float] | float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Website:
    """Write a page with the model in it, which any file server can serve and which sends nothing.

    Each file of the model takes any budget, share of tokens, size and batch. WebAssembly runs one
    in `precision`; WebGPU one that keeps its weights in half precision and computes in float32.

    Args:
        out: a new or empty folder; it is there whole or not at all.
        precision: "int8", "fp16" or "fp32".
        name: of the weights, for the page.
        ort: the package onnxruntime-web, where npm cannot bring it: the unpacked
            folder or the archive of `npm pack`.
        check_sizes, data, gate, progress: as in `export_model`.
    """
    check_model(model, "export_web")
    check_choice("precision of a page", precision, WEB_PRECISIONS)
    if model.config.in_channels != 3:
        raise InputError(
            f"a page takes photos; this model has {model.config.in_channels} channels."
        )
    target = files.place_for(out)
    _require_empty(target)
    say = progress or (lambda _: None)
    with _folder_beside(target) as folder:
        say("fetching the runtime")
        runtime = RUNTIME.find(ort)
        models = _models(model, folder, precision, name, check_sizes, data, gate, say)
        (folder / "ort").mkdir()
        for file, content in runtime.items():
            (folder / "ort" / file).write_bytes(content)
        for path in sorted(PAGE.iterdir()):
            shutil.copyfile(path, folder / path.name)
        (folder / "photos").mkdir()
        for path in bundled_photos():
            shutil.copyfile(path, folder / "photos" / path.name)
        credit = PAGE.parent / "PHOTO-CREDITS.md"
        shutil.copyfile(credit, folder / "photos" / "CREDITS.txt")
        files.atomic_write_json(folder / "about.json", _about(model, name, models))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        _require_empty(target)
        if target.exists():
            target.rmdir()
        os.replace(folder, target)  # noqa: PTH105
    moved = {
        entry.path.name: replace(
            entry,
            path=target / entry.path.relative_to(folder),
            report=target / entry.report.relative_to(folder),
        )
        for entry in models.values()
    }
    return Website(target, tuple(moved.values()), size)


def _require_empty(target: Path) -> None:
    if target.is_dir() and any(target.iterdir()):
        raise OutputError(
            f"{target} is not empty; a page is written to a new folder: choose another, or remove "
            "that one."
        )
    if os.path.lexists(target) and not target.is_dir():
        raise OutputError(f"{target} is a file; a page is a folder: choose another name.")


@contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """A folder to fill, which is removed unless it is renamed to `target`."""
    here = target.absolute().with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with files.output_errors(target), files.folder_to_fill(here.parent):
        here.mkdir()
        try:
            yield here
        finally:
            shutil.rmtree(here, ignore_errors=True)


def _models(
    model: Veca,
    folder: Path,
    precision: str,
    name: str,
    check_sizes: Sequence[tuple[int, int]] | None,
    data: Photo | Sequence[Photo] | None,
    gate: Agreement | tuple[float, float] | float | None,
    say: Callable[[str], None],
) -> dict[str, Exported]:
    """The files by what runs them, in place."""
    found: dict[str, Exported] = {}
    for device, one in (("wasm", precision), ("webgpu", "fp16")):
        if device == "webgpu" and precision == one:
            found[device] = found["wasm"]
            continue
        (entry,) = export_model(
            model,
            folder / device,
            cores=ANY,
            keep=ANY,
            precision=one,
            name=name,
            check_sizes=check_sizes,
            data=data,
            gate=None if one == "fp32" or device == "webgpu" else gate,
            progress=say,
            widen=one == "fp16",
        )
        found[device] = entry
    return found


def _about(model: Veca, name: str, models: dict[str, Exported]) -> dict[str, Any]:
    """What the page knows of the model."""
    c = model.config
    photos = [path.name for path in bundled_photos()]
    return {
        "name": name,
        "version": __version__,
        "runtime": f"{RUNTIME.name} {RUNTIME.version}",
        "weights_sha256": weights_hash(model),
        "patch_size": c.patch_size,
        "image_mean": list(c.image_mean),
        "image_std": list(c.image_std),
        "num_cores": c.num_cores,
        "width": c.feature_width,
        "least_keep": LEAST_OPEN_KEEP,
        "models": {
            device: {
                "file": f"{entry.path.parent.name}/{entry.path.name}",
                "precision": entry.dtype,
                "bytes": entry.bytes,
            }
            for device, entry in models.items()
        },
        "photos": [f"photos/{photo}" for photo in photos],
        "first": photos.index(_FIRST),
        "check": _check(model),
    }


def _check(model: Veca) -> dict[str, Any]:
    """What a browser compares itself with: the global embedding of one photo, in float32."""
    photo = next(path for path in bundled_photos() if path.name == _FIRST)
    cores = model.config.num_cores
    ours = frozen_copy(model, torch.float32)
    with torch.no_grad():
        cls = ours(ours.preprocess(photo, _CHECK_SIZE).pixels, cores=cores, keep=1).cls[0]
    return {
        "photo": f"photos/{photo.name}",
        "size": _CHECK_SIZE,
        "cores": cores,
        "gate": GATES["int8"].cls,
        "cls": [round(float(value), 5) for value in cls],
    }
