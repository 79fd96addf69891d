"""Joint projections: many features become two or three numbers each, by one rule for all.

One rule is what makes colours and places comparable: equal features come out equal wherever they
stand. Layers are the exception: each has a rule of its own, matched to that of the last. PCA is the
default and needs nothing but torch; UMAP, as the paper uses it, is an option.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from veca._util.extras import require
from veca.errors import InputError, check_choice

METHODS = ("pca", "umap")


@dataclass(frozen=True)
class Pca:
    """The principal directions of some features, to be applied to those and to others."""

    mean: Tensor
    """[D], float64."""
    directions: Tensor
    """[D, components], float64; zero where there are fewer directions than asked for."""

    @classmethod
    def fit(cls, features: Sequence[Tensor], components: int = 3) -> Pca:
        """The directions of largest variance over all rows of several [N, D]."""
        joined = _join(features)
        mean = joined.mean(dim=0)
        centred = joined - mean
        _, vectors = torch.linalg.eigh(centred.T @ centred)
        directions = vectors[:, -components:].flip(1)
        # An eigenvector's sign is arbitrary: make its largest entry positive.
        largest = directions.abs().argmax(dim=0, keepdim=True)
        directions = directions * directions.gather(0, largest).sign()
        missing = components - directions.shape[1]
        return cls(mean, torch.nn.functional.pad(directions, (0, missing)))

    def __call__(self, features: Tensor) -> Tensor:
        """[N, D] -> [N, components], float64."""
        return (features.detach().cpu().double() - self.mean) @ self.directions


@dataclass(frozen=True)
class Palette:
    """Three principal directions as red, green and blue, with a range for each.

    Fitted once, it gives equal features equal colours in every picture, also in pictures that
    are drawn later.
    """

    pca: Pca
    low: Tensor
    high: Tensor

    @classmethod
    def fit(cls, features: Sequence[Tensor]) -> Palette:
        """Directions and ranges over all rows of several [N, D]."""
        pca = Pca.fit(features)
        return cls(pca, *_range(torch.cat([pca(part) for part in features])))

    def __call__(self, features: Tensor) -> Tensor:
        """[N, D] -> colours [N, 3] in 0..1."""
        return _scale(self.pca(features), self.low, self.high)


def project(
    features: Sequence[Tensor], components: int = 3, *, method: str = "pca", seed: int = 0
) -> list[Tensor]:
    """Several [N_i, D] -> as many [N_i, components], float64, by one joint projection.

    Args:
        method: "pca", or "umap" (extra `umap`; slow, and its places mean something only relative
            to each other).
        seed: for UMAP, which starts from random places: the same seed gives the same result.

    Raises:
        MissingExtraError: umap-learn is not installed.
    """
    check_choice("projection", method, METHODS)
    if method == "pca":
        pca = Pca.fit(features, components)
        return [pca(part) for part in features]
    joined = _umap(_join(features), components, seed)
    return list(joined.split([len(part) for part in features]))


def joint_colours(
    features: Sequence[Tensor], *, method: str = "pca", seed: int = 0
) -> list[Tensor]:
    """Rows of several [N, D] as colours [N, 3] in 0..1: equal rows get equal colours."""
    if method == "pca":
        palette = Palette.fit(features)
        return [palette(part) for part in features]
    projected = project(features, method=method, seed=seed)
    low, high = _range(torch.cat(projected))
    return [_scale(part, low, high) for part in projected]


def layer_colours(
    layers: Sequence[Sequence[Tensor]], *, method: str = "pca", seed: int = 0
) -> list[list[Tensor]]:
    """Rows of several layers as colours [N, 3] in 0..1: every layer in its full contrast.

    Layers differ in scale and in what their directions mean, so one projection of all would leave
    some of them a single colour. Here each layer has a projection and a range of its own; in a
    layer equal rows get equal colours, and those of the last layer are `joint_colours`. The
    projections of the others are then rotated to agree with the last one as well as they can, so
    that a patch keeps its colour where the layers group patches alike.

    Args:
        layers: for each layer the same maps in the same order, [[N_i, D], ...].
        method, seed: as in `project`.
    """
    shapes = [[len(part) for part in maps] for maps in layers]
    if not layers or any(shape != shapes[0] for shape in shapes):
        raise InputError(f"layers must hold the same maps, of the same rows; got rows {shapes}.")
    places = [torch.cat(project(maps, method=method, seed=seed)) for maps in layers]
    last = _standard(places[-1])
    turned = [place @ _rotation(place, last) for place in map(_standard, places[:-1])]
    colours = [_scale(place, *_range(place)) for place in [*turned, places[-1]]]
    return [list(colour.split(shapes[0])) for colour in colours]


def _standard(places: Tensor) -> Tensor:
    """Columns of mean 0 and deviation 1; a column without any spread is 0."""
    centred = places - places.mean(dim=0)
    deviation = centred.square().mean(dim=0).sqrt()
    flat = deviation < 1e-12 * places.abs().amax(dim=0).clamp_min(1e-12)
    return torch.where(flat, 0.0, centred / torch.where(flat, 1.0, deviation))


def _rotation(places: Tensor, onto: Tensor) -> Tensor:
    """The rotation or reflection that brings places [N, K] nearest to others (Procrustes)."""
    left, _, right = torch.linalg.svd(places.T @ onto)
    return left @ right


def _join(features: Sequence[Tensor]) -> Tensor:
    if not features:
        raise InputError("a projection needs features; got an empty list.")
    widths = {part.shape[-1] for part in features}
    if len(widths) > 1 or any(part.ndim != 2 for part in features):
        shapes = [tuple(part.shape) for part in features]
        raise InputError(
            f"features projected together must be [rows, width] of one width, got {shapes}."
        )
    return torch.cat([part.detach().cpu().double() for part in features])


def _range(projected: Tensor) -> tuple[Tensor, Tensor]:
    # Quantiles, so that a few extreme patches do not wash the others out. numpy's, because
    # torch's refuse more than 16 million numbers.
    low, high = np.quantile(projected.numpy(), [0.01, 0.99], axis=0)
    return torch.from_numpy(low), torch.from_numpy(high)


def _scale(projected: Tensor, low: Tensor, high: Tensor) -> Tensor:
    # A direction without any spread says nothing: the middle of the range.
    flat = high - low < 1e-12 * high.abs().clamp_min(1e-12)
    scaled = ((projected - low) / torch.where(flat, 1.0, high - low)).clamp(0, 1)
    return torch.where(flat, 0.5, scaled).float()


def _umap(features: Tensor, components: int, seed: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        umap = require("umap", "UMAP, unlike PCA,")
    rows = len(features)
    if rows < 4:
        raise InputError(f"UMAP needs at least 4 rows, got {rows}; use PCA.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        places = umap.UMAP(
            n_components=components,
            n_neighbors=min(15, rows - 1),
            # The spectral start needs more rows than components to spare.
            init="spectral" if rows > 4 * components else "random",
            random_state=seed,
            n_jobs=1,
        ).fit_transform(features.float().numpy())
    return torch.from_numpy(places).double()
