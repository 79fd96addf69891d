"""Nearest neighbours in a folder of embeddings, by the cosine of their cls features.

The index is usearch's. faiss-cpu installs as well, but brings an OpenMP runtime of its own into a
process that has torch's already, which ends in crashes on some systems, and loads an index whole;
usearch is small, keeps float16 vectors as they are and searches an index where it lies on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from veca._util.extras import require
from veca._util.files import (
    atomic_write_json,
    commit,
    from_json,
    remove_leftovers,
    temporary_beside,
)
from veca.data.decode import EncodedImage
from veca.embed.pca import FILE as PCA_FILE
from veca.embed.pca import load as load_reduction
from veca.embed.settings import AUTO, AutoSize, Settings, resolved_size, resolved_width
from veca.embed.shards import Decoder, compute_for
from veca.embed.writers.parquet import finished_shards, read_manifest, read_paths, read_shard
from veca.errors import (
    BadImageError,
    ImageError,
    InputError,
    OutputError,
    VecaError,
    VecaWarning,
    WeightsError,
    at_least,
)
from veca.images import Source, read_image
from veca.model import Veca, evaluating
from veca.precision import in_precision
from veca.weights import load, weights_hash
from veca.weights.store import file_hash

Vector: TypeAlias = "NDArray[Any] | torch.Tensor"
Folder: TypeAlias = "str | os.PathLike[str]"

EXACT_BELOW = 100_000
"""Rows of a collection below which all are looked at: that takes a moment and misses nothing."""
_THREADS = 0  # usearch: all there are
_LOOK_AT = 64  # candidates of the index whose cosine is computed again, exactly
_OF_SCORES = (
    "weights",
    "cores",
    "keep",
    "agreement",
    "size",
    "width",
    "pca",
    "fast_jpeg",
    "precision",
)
"""Settings that decide what a cosine means."""
_RECALL_OF, _RECALL_TOP = 64, 10  # rows that recall is measured with, and neighbours of each

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

    recall: float | None = None
    """Of the index, once it is open: the share of the true 10 nearest that it finds, measured with
    64 rows spread through the collection. None: every row is looked at."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        self.settings, manifest = read_manifest(self.folder)
        require("pyarrow.parquet", "searching in embeddings", extra="search")
        self._weights_from: str | None = manifest.get("weights_from")
        self._records = finished_shards(self.folder, self.settings)
        self._ends = np.cumsum([record.rows for record in self._records])
        stored = self.settings.pca
        self._reduction = None if stored is None else load_reduction(self.folder / PCA_FILE, stored)
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
            compute = compute_for(model, self.settings, self._reduction)
            found = compute(torch.from_numpy(pixels[None]))
        return found.features["cls"][0].astype(np.float32)

    def asked_otherwise(
        self,
        *,
        size: AutoSize = AUTO,
        cores: int | None = None,
        keep: float | str | None = None,
        width: str | None = None,
    ) -> list[str]:
        """What is asked for that the collection was not made with, in words.

        A query is always embedded as the collection was: only then are they comparable.
        """
        if width is not None:
            width = resolved_width(width, self.settings.model_config, self.settings.what, None)
        wanted: dict[str, Any] = {"cores": cores, "keep": keep, "width": width}
        if not isinstance(size, str):
            wanted["size"] = resolved_size(size, self.settings.model_config, None)
            if wanted["size"] is None:
                wanted["size"] = "native"
        here = {**asdict(self.settings), "size": self.settings.size or "native"}
        return [
            f"{name} {_word(here[name])}, not {_word(value)}"
            for name, value in wanted.items()
            if value is not None and value != here[name]
        ]

    def search(self, query: Vector, top: int = 10, *, exact: bool | None = None) -> list[Match]:
        """The images whose cls features are nearest to `query` [D], nearest first.

        Args:
            exact: look at every row instead of asking the index. Needs no index and no usearch, and
                reads the whole collection. By default in collections of less than 100,000 rows
                (`EXACT_BELOW`); above, `recall` says what share the index finds.
        """
        top = at_least("top", top)
        vector = _unit(_one_vector(query, self.settings.dimensions)[None])[0]
        top = min(top, len(self))
        exact = len(self) < EXACT_BELOW if exact is None else exact
        if exact:
            rows, scores = (found[0] for found in self._exact(vector[None], top))
        else:
            rows, scores = self._approximate(vector, top)
        return [Match(self.path(int(r)), float(s)) for r, s in zip(rows, scores, strict=True)]

    def path(self, row: int) -> str:
        """The image of a row; rows are counted through all shards."""
        shard = int(np.searchsorted(self._ends, row, side="right"))
        if shard not in self._paths:
            while len(self._paths) >= 64:
                del self._paths[next(iter(self._paths))]
            self._paths[shard] = read_paths(self._records[shard].path)
        return self._paths[shard][row - (int(self._ends[shard - 1]) if shard else 0)]

    def _exact(self, queries: NDArray[Any], top: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Rows and scores [n, top] of each of the queries [n, D]; every row is looked at."""
        count = len(queries)
        rows, scores = np.empty((count, 0), np.int64), np.empty((count, 0), np.float32)
        start = 0
        for record in self._records:
            for part in read_shard(record.path, self.settings):
                here = queries @ _unit(part.cls.astype(np.float32)).T
                numbers = np.broadcast_to(start + np.arange(here.shape[1]), here.shape)
                rows = np.concatenate([rows, numbers], axis=1)
                scores = np.concatenate([scores, here], axis=1)
                best = _best(scores, top)
                rows = np.take_along_axis(rows, best, axis=1)
                scores = np.take_along_axis(scores, best, axis=1)
                start += here.shape[1]
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
            facts = _facts_of(path)
            self._index = _opened(library, path, len(self), facts.get("sha256"))
            if self._index is None:
                self._index, facts = self._build(library, path), {}
            self.recall = self._known_recall(path, facts)
        return self._index

    def _known_recall(self, path: Path, facts: dict[str, Any]) -> float:
        """That of the index, measured once and kept beside it with its hash."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return float(facts["recall"])
        recall = self._measured_recall()
        with contextlib.suppress(VecaError, OSError):  # no room for it: known in this run alone
            facts = {"recall": recall, "queries": _RECALL_OF, "neighbours": _RECALL_TOP}
            atomic_write_json(path.with_suffix(".json"), {"sha256": file_hash(path), **facts})
        return recall

    def _measured_recall(self) -> float:
        rows = np.linspace(0, len(self) - 1, min(_RECALL_OF, len(self))).round().astype(np.int64)
        queries = _unit(np.asarray(self._index.get(rows), np.float32).reshape(len(rows), -1))
        top = min(_RECALL_TOP, len(self))
        true = self._exact(queries, top)[0]
        found = [self._approximate(query, top)[0] for query in queries]
        hits = sum(len(np.intersect1d(a, b)) for a, b in zip(true, found, strict=True))
        return hits / (len(rows) * top)

    def _build(self, library: Any, path: Path) -> Any:
        kind = "f16" if self.settings.dtype == "float16" else "f32"
        index = library.Index(ndim=self.settings.dimensions, metric="cos", dtype=kind)
        remove_leftovers(self.folder.glob(".index-*.tmp"))
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
            for old in self.folder.glob("index-*.*"):
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

    def use_model_of(self, other: Collection) -> None:
        """Take the model of a collection that was made with the same weights, if it has one."""
        if other.settings.weights == self.settings.weights:
            self._model = self._model or other._model

    def _own_model(self, device: str | torch.device) -> Veca | None:
        """The model that the collection was made with, if it is where it was."""
        if self._weights_from is None:
            return None
        with contextlib.suppress(VecaError):
            model = in_precision(load(self._weights_from, device=device), self.settings.precision)
            if weights_hash(model) == self.settings.weights:
                return model
        return None

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
            try:
                model = in_precision(load(chosen, device=device), self.settings.precision)
            except WeightsError as error:
                if weights is not None:
                    raise
                raise WeightsError(
                    f"the weights of {self.folder} are not where they were ({error}); give them "
                    "(--weights)."
                ) from error
        if weights_hash(model) != self.settings.weights:
            own = None if weights is None else self._own_model(device)
            if own is not None:
                warnings.warn(
                    f"{where} are not those that {self.folder} was made with; the query is "
                    f"embedded with its own, {self._weights_from}.",
                    VecaWarning,
                    stacklevel=3,
                )
                self._model = own
                return own
            raise InputError(
                f"{where} are not those that {self.folder} was made with "
                f"({self.settings.weights[:12]}); give those (--weights)."
            )
        self._model = model
        return model


def search(
    folder: Folder | Collection | Sequence[Folder | Collection],
    query: Source | Vector,
    top: int = 10,
    *,
    exact: bool | None = None,
    weights: str | os.PathLike[str] | Veca | None = None,
    cores: int | None = None,
    keep: float | str | None = None,
    size: AutoSize = AUTO,
    width: str | None = None,
    device: str | torch.device = "cpu",
) -> list[Match]:
    """The images of a folder of embeddings, or of several, that are most like `query`.

    For many queries open a `Collection` once, and give that.

    Args:
        folder: several must hold embeddings of the same weights, cores and kind, or their scores
            could not be compared.
        query: an image as `veca.images.read_image` takes it, or a vector [D].
        exact: see `Collection.search`.
        weights: needed where those of the collection are no longer where they were.
        cores, keep, size, width: a query is always embedded as the collection was. If that is not
            what is asked for, a `VecaWarning` says so.
    """
    given = [folder] if isinstance(folder, (str, os.PathLike, Collection)) else list(folder)
    collections = [one if isinstance(one, Collection) else Collection(one) for one in given]
    _check_alike(collections)
    is_vector = isinstance(query, (np.ndarray, torch.Tensor)) and query.ndim == 1
    matches = []
    for collection in collections:
        other = collection.asked_otherwise(size=size, cores=cores, keep=keep, width=width)
        if other:
            warnings.warn(
                f"{collection.folder} was embedded with {', '.join(other)}; so is the query.",
                VecaWarning,
                stacklevel=2,
            )
        if is_vector:
            vector = cast("Vector", query)
        else:
            collection.use_model_of(collections[0])
            vector = collection.embed(cast("Source", query), weights=weights, device=device)
        matches += collection.search(vector, top, exact=exact)
    return sorted(matches, key=lambda match: -match.score)[:top]


def _check_alike(collections: Sequence[Collection]) -> None:
    """Refuse collections whose scores mean different things; warn where they nearly do not."""
    if not collections:
        raise InputError("no folder of embeddings was given to search in.")
    first = collections[0]
    for other in collections[1:]:
        found = {
            name: (getattr(first.settings, name), getattr(other.settings, name))
            for name in _OF_SCORES
        }
        differ = {name: values for name, values in found.items() if values[0] != values[1]}
        if not differ:
            continue
        said = ", ".join(f"{name} {_word(a)} and {_word(b)}" for name, (a, b) in differ.items())
        says = f"{first.folder} and {other.folder} were embedded differently: {said}"
        # Another precision is another hash of the same weights.
        if differ.keys() & {"weights", "cores", "keep", "agreement", "width", "pca"}:
            raise InputError(f"{says}; their scores cannot be compared, search in one at a time.")
        warnings.warn(
            f"{says}; each is searched with a query embedded as it was, and scores of one are not "
            "quite those of the other.",
            VecaWarning,
            stacklevel=3,
        )


def _word(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:12]


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
    return np.argsort(-scores, axis=-1, kind="stable")[..., :top]


def _facts_of(index: Path) -> dict[str, Any]:
    """What is known of an index, from the file beside it."""
    with contextlib.suppress(OSError, ValueError):
        facts = from_json(index.with_suffix(".json").read_text("utf-8"))
        return facts if isinstance(facts, dict) else {}
    return {}


def _opened(library: Any, path: Path, rows: int, sha256: object) -> Any:
    """The index in a file, where it lies; None if there is none, or none that is whole.

    Its library trusts what it reads, and a damaged file may end the process.
    """
    if not path.is_file() or file_hash(path) != sha256:
        return None
    try:
        index = library.Index.restore(str(path), view=True)
        return index if index is not None and len(index) == rows else None
    except Exception:  # a damaged file raises several types; it is made again
        return None
