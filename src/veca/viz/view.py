"""One photo as a model sees it, at any budget: what all figures of the photo are drawn from."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from PIL import Image
from torch import Tensor

from veca.checks import check_budget, check_dials, check_layers, dial
from veca.config import DEFAULT_SIZE
from veca.errors import InputError
from veca.images import Size, Source, read_image
from veca.model import Veca, evaluating

_WIDEST = 3.0  # a panel's width over its height, at most; a strip is shown smaller


class MergeStep(NamedTuple):
    """What windows of patches have become before one layer."""

    layer: int
    """1..L."""
    token_of: Tensor
    """[N] the token of each patch."""

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.token_of.unique())


class PhotoFeatures(NamedTuple):
    """A photo at one budget, on the CPU in float32."""

    patches: Tensor
    """[N, D'] dense features after the last layer."""
    states: Tensor
    """[L, C, D'] the cores after each layer, through the final norm."""
    path: Tensor
    """[L, C, 2] where the cores stood in each layer, (x, y) in [-1, 1]."""
    steps: tuple[MergeStep, ...]
    """Where patches merge: in which steps."""


class View:
    """A photo, fitted to a model's grid; runs are kept, so that figures share them.

    Args:
        photo: what `veca.images.read_image` takes: a path, bytes, a Pillow image, an array.
        size: as in `veca.preprocess`: the short side in pixels, (height, width), or None.
        name: what figures call it; by default the file's name.
        height: of the pictures drawn of it, in pixels.
        keep: the share of patch tokens that go on after merging, as the model takes it.
        agreement: with keep="auto", what is promised.
    """

    def __init__(
        self,
        model: Veca,
        photo: Source,
        size: Size = DEFAULT_SIZE,
        *,
        name: str | None = None,
        height: int = 256,
        keep: float | str | None = None,
        agreement: float | None = None,
    ) -> None:
        self.model = model
        _, self.keep, self.agreement = check_dials(model, None, keep, agreement)
        self.photo = photo if _is_plain(photo) else read_image(photo)
        self.size = size
        self.name = name or (Path(photo).stem if isinstance(photo, (str, Path)) else "photo")
        self.height = height
        batch = model.preprocess(self.photo, size)
        self.pixels = batch.pixels
        """[1, 3, H, W], normalised."""
        self.grid = batch.grid
        """(h, w): patches down and across."""
        self._runs: dict[tuple[int, float | str, float | None], PhotoFeatures] = {}
        self._shown: Image.Image | None = None

    @property
    def shown(self) -> Image.Image:
        """The photo at the size of a panel."""
        if self._shown is None:
            width, height = self.photo.size
            scale = min(self.height / height, self.height * _WIDEST / width)
            size = max(1, round(width * scale)), max(1, round(height * scale))
            self._shown = self.photo.resize(size, Image.Resampling.LANCZOS)
        return self._shown

    def at(self, size: Size) -> View:
        """The same photo at another size."""
        if size == self.size:
            return self
        return View(
            self.model,
            self.photo,
            size,
            name=self.name,
            height=self.height,
            keep=self.keep,
            agreement=self.agreement,
        )

    def merging(self, keep: float | str | None, agreement: float | None = None) -> View:
        """The same photo with another share of tokens; they know of each other's runs."""
        other = copy.copy(self)
        _, other.keep, other.agreement = check_dials(self.model, None, keep, agreement)
        return other

    @property
    def merges(self) -> bool:
        """Whether patches merge."""
        return self.keep != 1

    def run(self, cores: int | None = None) -> PhotoFeatures:
        """Features, states and paths at a budget, computed once."""
        budget = check_budget(cores, self.model.config.num_cores)
        key = (budget, self.keep, self.agreement)
        if key not in self._runs:
            states, path, steps = [], [], []
            with inference(self.model):
                for layer in self.model.walk(self._input(), budget, **self._dial):
                    if layer.merging and layer.periphery.token_of is not None:
                        steps.append(_merge_step(layer.number + 1, layer.periphery.token_of[0]))
                    elif layer.number:
                        out = self.model.output(layer)
                        states.append(_cpu(out.cores[0]))
                        path.append(_cpu(out.core_xy[0]))
                patches = _cpu(out.patches[0])
            found = PhotoFeatures(patches, torch.stack(states), torch.stack(path), tuple(steps))
            self._runs[key] = found
        return self._runs[key]

    def forget(self, keep: Collection[int] = ()) -> None:
        """Drop the runs of all budgets but those to `keep`, to free their memory.

        Those stay as they are seen here and with all tokens, not with other shares.
        """
        shares = (1.0, self.keep)
        for key in [k for k in self._runs if k[0] not in keep or k[1] not in shares]:
            del self._runs[key]

    def features(
        self, cores: int | None = None, layers: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Dense features [N, D'] after each of `layers` (1..L), by default the last."""
        depth = self.model.config.depth
        if layers is None or list(layers) == [depth]:
            return [self.run(cores).patches]
        with inference(self.model):
            outputs = self.model.forward_intermediates(self._input(), cores, layers, **self._dial)
        return [_cpu(out.patches[0]) for out in outputs]

    def states(self, cores: int | None, layer: int) -> Tensor:
        """The cores after a layer (1..L), [C, D'], through the final norm."""
        check_layers([layer], self.model.config.depth)
        return self.run(cores).states[layer - 1]

    def attention(
        self, cores: int | None = None, layers: Sequence[int] | None = None, kind: str = "norm"
    ) -> Tensor:
        """Where each core looks: [layers, C, h, w], each map summing to 1.

        `kind` is "norm", as published, or "softmax", the weights averaged over heads; of those,
        what goes to other cores is left out before they are made to sum to 1.
        """
        with inference(self.model):
            maps = self.model.attention_maps(self._input(), cores, layers, kind=kind, **self._dial)
            maps = _cpu(maps[0])
        return maps / maps.sum(dim=(-2, -1), keepdim=True).clamp_min(1e-30)

    def patch_at(self, point: tuple[float, float]) -> tuple[int, int]:
        """The patch (row, column) under a point (x, y) in 0..1 of the photo."""
        if not all(0 <= value <= 1 for value in point):
            raise InputError(
                f"a point is (x, y) from 0 to 1, left to right and top to bottom; got {point}."
            )
        h, w = self.grid
        return min(int(point[1] * h), h - 1), min(int(point[0] * w), w - 1)

    @property
    def _dial(self) -> dict[str, Any]:
        return dial(self.keep, self.agreement)

    def _input(self) -> Tensor:
        return self.pixels.to(next(self.model.parameters()).device)


def fitting_budgets(model: Veca, wanted: Sequence[int] = (8, 16, 32, 64)) -> list[int]:
    """Those of `wanted` that the bank has cores for, or the whole bank."""
    whole = model.config.num_cores
    return [c for c in wanted if c <= whole] or [whole]


def check_budgets(model: Veca, cores: Sequence[int] | None) -> list[int]:
    """Budgets a figure was asked for, or the usual ones."""
    if cores is None:
        return fitting_budgets(model)
    if not cores:
        raise InputError("no budgets were given; a figure needs at least one, such as 32.")
    return [check_budget(c, model.config.num_cores) for c in cores]


def default_layers(model: Veca, count: int = 4) -> list[int]:
    """The first layer, the last, and some evenly between: 1, 5, 8, 12 of twelve."""
    depth = model.config.depth
    if count == 1 or depth == 1:
        return [depth]
    steps = (1 + i * (depth - 1) / (count - 1) for i in range(count))
    return sorted({round(step) for step in steps})


def unique_names(views: Sequence[View]) -> list[tuple[str, View]]:
    """Views with names that differ, as names of files: two folders may hold an x.jpg each."""
    named: dict[str, View] = {}
    for view in views:
        stem = unique = file_stem(view.name)
        number = 1
        while unique in named:
            number += 1
            unique = f"{stem}-{number}"
        named[unique] = view
    return list(named.items())


def file_stem(name: str) -> str:
    """A name as a part of a file's name."""
    kept = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).strip("._")
    return kept[:80] or "photo"


@contextlib.contextmanager
def inference(model: Veca) -> Iterator[None]:
    """No gradients, and the model in evaluation mode for a while."""
    with evaluating(model), torch.inference_mode():
        yield


def _is_plain(photo: Source) -> TypeGuard[Image.Image]:
    """Whether a photo is as `read_image` leaves it: no need for another copy."""
    # Not a subclass: an image that stands for a file may hold an orientation it has yet to read.
    if not isinstance(photo, Image.Image) or type(photo) is not Image.Image:
        return False
    return photo.mode == "RGB" and not photo.info


def _merge_step(layer: int, token_of: Tensor) -> MergeStep:
    with torch.inference_mode(False):
        return MergeStep(layer, token_of.cpu().clone())


def _cpu(tensor: Tensor) -> Tensor:
    # A clone: what comes out of inference mode cannot take part in ordinary tensor code, and a
    # slice would keep the whole output alive.
    with torch.inference_mode(False):
        return tensor.detach().float().cpu().clone()
