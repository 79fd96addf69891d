"""Readers that are fuzzed: each takes bytes, and may raise nothing but a `VecaError`.

Imported under atheris by `attack.fuzz`, and plainly by the tests, which go through the corpus.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

import veca
from veca import weights
from veca.distill import load_config
from veca.distill.checkpoint import read as read_checkpoint
from veca.distill.recipe import recipe_text
from veca.embed import embed, read_embeddings
from veca.embed.writers import read_failures
from veca.embed.writers.folder import begun
from veca.errors import VecaError
from veca.images import read_image
from veca.points import read_point
from veca.probe import load_protocol, read_run

PIXELS = 2**20
"""Of an image: the headers are what is fuzzed."""
CORPUS = Path(__file__).with_name("corpus")

_folder = tempfile.TemporaryDirectory(prefix="veca-fuzz-")


def _written(name: str, data: bytes) -> Path:
    path = Path(_folder.name) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def images(data: bytes) -> None:
    read_image(data, max_pixels=PIXELS)


def safetensors(data: bytes) -> None:
    path = _written("x.safetensors", data)
    with contextlib.suppress(VecaError):
        weights.read_provenance(path)
    veca.load(path)


def pt(data: bytes) -> None:
    veca.import_official(_written("x.pt", data))


def manifests(data: bytes) -> None:
    """The first byte says which; the rest is its text."""
    kind, text = data[:1], data[1:]
    if kind == b"e":
        read_embeddings(_written("e/embed.json", text).parent)
    elif kind == b"f":
        begun(_written("f/features.json", text).parent)
    elif kind == b"c":
        read_checkpoint(_written("c/about.json", text).parent)
    elif kind == b"l":
        read_failures(_written("l/failures.jsonl", text))
    elif kind == b"r":
        read_run(_written("r/results.json", text))
    else:
        read_point(_written("p/point.json", text))


def settings(data: bytes) -> None:
    """Protocols and recipes; the first byte says which."""
    path = _written("x.toml", data[1:])
    if data[:1] == b"p":
        load_protocol(str(path))
    else:
        load_config(path)


READERS: Mapping[str, Callable[[bytes], None]] = {
    "images": images, "safetensors": safetensors, "pt": pt, "manifests": manifests,
    "settings": settings,
}  # fmt: skip


def try_one(name: str, data: bytes) -> None:
    """Whatever the bytes are, a `VecaError` at most."""
    with contextlib.suppress(VecaError):
        READERS[name](data)


def write_corpus(folder: Path = CORPUS) -> None:
    """Small whole files that fuzzing starts from: some kilobytes."""
    from PIL import Image

    def keep(reader: str, name: str, data: bytes) -> None:
        path = folder / reader / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    image = Image.linear_gradient("L").resize((5, 4)).convert("RGB")
    for format in ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "AVIF"):
        file = io.BytesIO()
        image.save(file, format, **({"quality": 20} if format == "JPEG" else {}))
        keep("images", f"image.{format.lower()}", file.getvalue())
    config = veca.VecaConfig(depth=1, width=4, heads=1, num_cores=2, patch_size=2)
    made = veca.create_model(config)
    with tempfile.TemporaryDirectory() as place:
        path = veca.save(made, Path(place) / "x.safetensors", provenance={"licence": "x"})
        keep("safetensors", "weights.safetensors", path.read_bytes())
        veca.export_official(made, Path(place) / "x.pt", chunk=2)
        keep("pt", "checkpoint.pt", (Path(place) / "x.pt").read_bytes())
        image.save(Path(place) / "a.png")
        embed(Path(place) / "a.png", Path(place) / "e", weights=path, size=4, workers=0)
        keep("manifests", "embeddings", b"e" + (Path(place) / "e" / "embed.json").read_bytes())
    point = {
        "format": "veca-point-1",
        "weights": "x",
        "weights_sha256": "0",
        "machine": "x",
        "precision": "float32",
        "size": 224,
        "cores": 8,
        "keep": 1.0,
        "measured": {},
    }
    keep("manifests", "point", b"p" + json.dumps(point).encode())
    keep("manifests", "features", b'f{"fingerprint": "x", "root": "/x", "size": 32}')
    keep(
        "manifests",
        "checkpoint",
        b'c{"format_version": 1, "step": 3, "sections": {"student": "x"}}',
    )
    keep("manifests", "failures", b'l{"path": "a.png", "reason": "x"}\n')
    keep("manifests", "run", b'r{"task": "knn", "rows": [], "protocol": {"name": "quick"}}')
    protocol = resources.files("veca.probe") / "protocols" / "quick.toml"
    keep("settings", "protocol", b"p" + protocol.read_bytes())
    keep("settings", "recipe", b"r" + recipe_text("laptop").encode())
