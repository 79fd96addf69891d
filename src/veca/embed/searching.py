"""Nearest neighbours in a folder of embeddings, by the cosine of their cls features.

The index is usearch's. faiss-cpu installs as well, but brings an OpenMP runtime of its own into a
process that has torch's already, which ends in crashes on some systems, and loads an index whole;
usearch is small, keeps float16 vectors as they are and searches an index where it lies on the disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from veca._util.extras import require
from veca._util.files import commit, temporary_beside
from veca.data.decode import EncodedImage
from veca.embed.settings import Settings
from veca.embed.shards import Decoder, compute_for
from veca.embed.writers.parquet import finished_shards, read_manifest, read_paths, read_shard
from veca.errors import (
    BadImageError,
    ImageError,
    InputError,
    OutputError,
    WeightsError,
    at_least,
)
from veca.images import Source, read_image
from veca.model import Veca, evaluating
from veca.weights import load, weights_hash

Vector: TypeAlias = "NDArray[Any] | torch.Tensor"

_THREADS = 0  # usearch: all there are
_LOOK_AT = 64  # candidates of the index whose cosine is computed again, exactly

log = logging.getLogger("veca.embed")


class Match(NamedTuple):
    """A neighbour."""

    path: str
    score: float
    """Cosine, in -1..1."""


class Collection:
    """A folder of embeddings to search in. It reads what there is, also of a run that was stopped.

    Opening it is cheap; the index is made or opened by the first search that needs it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        self.settings, manifest = read_manifest(self.folder)
        require("pyarrow.parquet", "searching in embeddings", extra="search")
        self._weights_from: str | None = manifest.get("weights_from")
        self._records = finished_shards(self.folder, self.settings)
        self._ends = np.cumsum([record.rows for record in self._records])
        self._index: Any = None
        self._model: Veca | None = None
        self._paths: dict[int, list[str]] = {}
        if not len(self):
            raise InputError(f"{self.folder} holds no embeddings yet; run veca embed to its end.")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def embed(
        self,
        image: Source,
        *,
        weights: str | os.PathLike[str] | Veca | None = None,
        device: str | torch.device = "cpu",
    ) -> NDArray[np.float32]:
        """The cls features [D] of an image, computed as those of the collection were.

        Args:
            weights: needed where those of the collection are no longer where they were.
        """
        pixels = _query_pixels(image, self.settings)
        model = self._load(weights, device)
        with evaluating(model):
            found = compute_for(model, self.settings)(torch.from_numpy(pixels[None]))
        return found.features["cls"][0].astype(np.float32)

    def search(self, query: Vector, top: int = 10, *, exact: bool = False) -> list[Match]:
        """The images whose cls features are nearest to `query` [D], nearest first.

        Args:
            exact: look at every row instead of asking the index. Needs no index and no usearch, and
                reads the whole collection; the index finds nearly always the same.
        """
        top = at_least("top", top)
        vector = _unit(_one_vector(query, self.settings.width)[None])[0]
        top = min(top, len(self))
        rows, scores = self._exact(vector, top) if exact else self._approximate(vector, top)
        return [Match(self.path(int(r)), float(s)) for r, s in zip(rows, scores, strict=True)]

    def path(self, row: int) -> str:
        """The image of a row; rows are counted through all shards."""
        shard = int(np.searchsorted(self._ends, row, side="right"))
        if shard not in self._paths:
            while len(self._paths) >= 64:
                del self._paths[next(iter(self._paths))]
            self._paths[shard] = read_paths(self._records[shard].path)
        return self._paths[shard][row - (int(self._ends[shard - 1]) if shard else 0)]

    def _exact(self, query: NDArray[Any], top: int) -> tuple[NDArray[Any], NDArray[Any]]:
        rows, scores = np.empty(0, np.int64), np.empty(0, np.float32)
        start = 0
        for record in self._records:
            for part in read_shard(record.path, self.settings):
                here = _unit(part.cls.astype(np.float32)) @ query
                rows = np.concatenate([rows, start + np.arange(len(here))])
                scores = np.concatenate([scores, here])
                best = _best(scores, top)
                rows, scores = rows[best], scores[best]
                start += len(here)
        return rows, scores

    def _approximate(self, query: NDArray[Any], top: int) -> tuple[NDArray[Any], NDArray[Any]]:
        index = self._open_index()
        found = index.search(query, max(top, _LOOK_AT), threads=1)
        keys = np.sort(np.asarray(found.keys, np.int64))
        # The index rounds distances; the vectors it keeps are those of the shards.
        vectors = np.asarray(index.get(keys), np.float32).reshape(len(keys), -1)
        scores = _unit(vectors) @ query
        best = _best(scores, top)
        return keys[best], scores[best]

    def _open_index(self) -> Any:
        if self._index is None:
            library = require("usearch.index", "searching by an index (not exact)")
            path = self.folder / f"index-{self._fingerprint()}.usearch"
            self._index = _opened(library, path, len(self)) or self._build(library, path)
        return self._index

    def _build(self, library: Any, path: Path) -> Any:
        kind = "f16" if self.settings.dtype == "float16" else "f32"
        index = library.Index(ndim=self.settings.width, metric="cos", dtype=kind)
        start = 0
        for record in self._records:
            for part in read_shard(record.path, self.settings):
                keys = np.arange(start, start + len(part.paths), dtype=np.uint64)
                index.add(keys, np.ascontiguousarray(part.cls), threads=_THREADS)
                start += len(keys)
        try:
            with temporary_beside(path) as temporary:
                index.save(str(temporary))
                commit(temporary, path)
            for old in self.folder.glob("index-*.usearch"):
                if old != path:
                    old.unlink(missing_ok=True)
        except (OutputError, OSError, RuntimeError) as error:
            log.warning("the index is not kept, and will be made again: %s", error)
        return index

    def _fingerprint(self) -> str:
        """Changes with the shards: their numbers, sizes and times."""
        states = [
            (r.number, r.rows, r.path.stat().st_size, r.path.stat().st_mtime_ns)
            for r in self._records
        ]
        text = json.dumps([self.settings.fingerprint, states])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _load(
        self, weights: str | os.PathLike[str] | Veca | None, device: str | torch.device
    ) -> Veca:
        if weights is None and self._model is not None:
            return self._model
        if isinstance(weights, Veca):
            model, where = weights, "the model given"
        else:
            chosen = self._weights_from if weights is None else os.fspath(weights)
            if chosen is None:
                raise InputError(
                    f"{self.folder} does not say where its weights are; give them (--weights)."
                )
            where = f"the weights {chosen}"
            dtype: torch.dtype = getattr(torch, self.settings.precision)
            try:
                model = load(chosen, device=device, dtype=dtype)
            except WeightsError as error:
                if weights is not None:
                    raise
                raise WeightsError(
                    f"the weights of {self.folder} are not where they were ({error}); give them "
                    "(--weights)."
                ) from error
        if weights_hash(model) != self.settings.weights:
            raise InputError(
                f"{where} are not those that {self.folder} was made with "
                f"({self.settings.weights[:12]}); give those (--weights)."
            )
        self._model = model
        return model


def search(
    folder: str | os.PathLike[str],
    query: Source | Vector,
    top: int = 10,
    *,
    exact: bool = False,
    weights: str | os.PathLike[str] | Veca | None = None,
    device: str | torch.device = "cpu",
) -> list[Match]:
    """The images of a folder of embeddings that are most like `query`.

    For many queries open a `Collection` once.

    Args:
        query: an image as `veca.images.read_image` takes it, or a vector [D].
    """
    collection = Collection(folder)
    if isinstance(query, (np.ndarray, torch.Tensor)) and query.ndim == 1:
        return collection.search(query, top, exact=exact)
    vector = collection.embed(query, weights=weights, device=device)
    return collection.search(vector, top, exact=exact)


def _query_pixels(image: Source, settings: Settings) -> NDArray[np.uint8]:
    decoder = Decoder(None, settings)
    try:
        if isinstance(image, (str, os.PathLike)) and Path(image).is_file():
            path = Path(image)
            return decoder.fit(EncodedImage(path.read_bytes(), str(path)))
        return decoder.fit_image(read_image(image), "the query")
    except (BadImageError, OSError) as error:
        raise ImageError(f"the query cannot be read: {error}") from error


def _one_vector(query: Vector, width: int) -> NDArray[np.float32]:
    if isinstance(query, torch.Tensor):
        query = query.detach().float().cpu().numpy()
    vector = np.asarray(query)
    if vector.shape != (width,) or vector.dtype.kind != "f":
        raise InputError(
            f"a query is a vector of {width} numbers, as Collection.embed gives it; got "
            f"{vector.dtype} of shape {list(vector.shape)}."
        )
    vector = vector.astype(np.float32)
    if not np.isfinite(vector).all():
        raise InputError("the query holds NaN or infinite numbers; give finite ones.")
    return vector


def _unit(vectors: NDArray[Any]) -> NDArray[Any]:
    """Rows of length 1; a row of zeros stays, and has cosine 0 with everything."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(length, np.finfo(np.float32).tiny)


def _best(scores: NDArray[Any], top: int) -> NDArray[Any]:
    """Places of the highest scores, highest first; of equal ones the earlier first."""
    return np.argsort(-scores, kind="stable")[:top]


def _opened(library: Any, path: Path, rows: int) -> Any:
    """The index in a file, where it lies; None if there is none, or none that is whole."""
    if not path.is_file():
        return None
    try:
        index = library.Index.restore(str(path), view=True)
        return index if index is not None and len(index) == rows else None
    except Exception:  # a damaged file raises several types; it is made again
        return None
