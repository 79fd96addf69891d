"""What a model refuses, in words: budgets, layers, and batches of images that it cannot take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from veca._util.tracing import has_values
from veca.config import AUTO, DEFAULT_AGREEMENT
from veca.errors import InputError, whole
from veca.merging import LEAST_KEEP

LARGEST_PIXEL = 1e6
"""Beyond it a float32 network overflows somewhere and gives NaN; pixels in 0..255 pass."""


def check_model(model: object, caller: str) -> None:
    """Refuse what `caller` was given instead of a model: a wrapped one, weights, anything else."""
    from veca.model import Veca  # here, because the model itself uses the other checks

    if not isinstance(model, Veca):
        wrapped = hasattr(model, "module") or hasattr(model, "_orig_mod")
        hint = "; pass the model inside it" if wrapped else ""
        raise InputError(f"{caller} takes a Veca model, got {type(model).__name__}{hint}.")


def check_budget(cores: int | str | None, num_cores: int) -> int:
    """The budget to use: `cores`, or the whole bank when it is None."""
    if cores is None:
        return num_cores
    if isinstance(cores, str) and cores == AUTO:
        raise InputError(
            f"cores={AUTO!r} takes the budget that a calibration says, which cannot be had here; "
            f"give a number from 1 to {num_cores}."
        )
    # A symbol stands for a budget that is left open while a graph is traced.
    budget = cast(int, cores) if type(cores) in (int, torch.SymInt) else whole(cores)
    if budget is None or not 1 <= budget <= num_cores:
        raise InputError(
            f"cores must be a whole number from 1 to {num_cores} (the size of this model's bank), "
            f"got {cores!r}."
        )
    return budget


def check_first(first: int | None, budget: int) -> int:
    """How many of the `budget` cores are wanted: the `first` ones, or all when it is None."""
    if first is None:
        return budget
    rows = whole(first)
    if rows is None or not 1 <= rows <= budget:
        raise InputError(
            f"first must be a whole number from 1 to {budget} (the budget), got {first!r}."
        )
    return rows


def check_keep(keep: float | str | None) -> float:
    """The share of patch tokens that go on: `keep`, or all of them when it is None."""
    if keep is None:
        return 1.0
    if isinstance(keep, torch.SymInt):  # a graph is traced for any; see `merging.merge_plan`
        return keep  # type: ignore[return-value]
    if isinstance(keep, str) and keep == AUTO:
        raise InputError(
            f"keep={AUTO!r} chooses for each image while the model runs, which cannot be had here; "
            f"give a number from {LEAST_KEEP} to 1."
        )
    number = keep if isinstance(keep, (int, float, np.floating, np.integer)) else math.nan
    if isinstance(keep, bool) or not LEAST_KEEP <= number <= 1:  # NaN is neither
        raise InputError(
            f"keep must be a number from {LEAST_KEEP} to 1, the share of patch tokens that go on, "
            f"or {AUTO!r}, got {keep!r}."
        )
    return float(number)


def is_auto(*dials: object) -> bool:
    """Whether any of a call's `cores` and `keep` is to be chosen by content."""
    return any(isinstance(dial, str) and dial == AUTO for dial in dials)


class Dials(NamedTuple):
    """What is asked of every call in a run, checked; written down with what comes out."""

    cores: int
    keep: float | str
    """The share of patch tokens, or "auto"."""
    agreement: float | None
    """What keep="auto" promises."""


def check_dials(
    model: Any,
    cores: int | str | None = None,
    keep: float | str | None = None,
    agreement: float | None = None,
    size: int | Sequence[int] | None = None,
) -> Dials:
    """What a run asks of a model. keep="auto" goes on as it is, if the weights can give it.

    Args:
        cores: "auto" becomes the budget for images of `size`.
        agreement: of both, if both are "auto".
        size: of the run's images, in pixels; None where they differ.
    """
    c = model.config
    promise = check_agreement(agreement, cores, keep)
    share = asked_keep(keep)
    if promise is None:
        return Dials(check_budget(cores, c.num_cores), share, None)
    each = model.calibration.of_each(promise, is_auto(cores) + is_auto(keep))
    if not is_auto(cores):
        budget = check_budget(cores, c.num_cores)
    elif size is None:
        raise InputError(
            f"cores={AUTO!r} takes the budget for one size of images; give a size, or a number "
            f"from 1 to {c.num_cores}."
        )
    else:
        height, width = (size, size) if isinstance(size, int) else size
        grid = (height // c.patch_size, width // c.patch_size)
        budget = model.calibration.budget(grid, each, c.num_cores)
    return Dials(budget, share, each if is_auto(keep) else None)


def asked_keep(keep: float | str | None) -> float | str:
    """As `check_keep`, where "auto" may be asked for, too; it goes on as it is."""
    return AUTO if is_auto(keep) else check_keep(keep)


def read_keep(text: str) -> float | str:
    """A share as it is typed: a number, or "auto", which goes on as it is."""
    if text.strip() == AUTO:
        return AUTO
    try:
        number = float(text)
    except ValueError:
        return check_keep(text)  # which says what it must be
    return check_keep(number)


def check_agreement(agreement: float | None, cores: object, keep: object) -> float | None:
    """The promise of what is chosen by content; None where nothing is."""
    if not is_auto(cores, keep):
        if agreement is not None:
            raise InputError(
                f"agreement {agreement!r} is what keep='auto' promises; say keep='auto', or leave "
                "agreement out."
            )
        return None
    if agreement is None:
        return DEFAULT_AGREEMENT
    number = agreement if isinstance(agreement, (int, float)) else math.nan
    if not 0 < number < 1:
        raise InputError(
            f"agreement must be a cosine between 0 and 1, such as {DEFAULT_AGREEMENT}, got "
            f"{agreement!r}."
        )
    return float(number)


def dial(keep: float | str | None, agreement: float | None = None) -> dict[str, Any]:
    """Arguments of a model's call, without what says nothing: any model takes no arguments."""
    given = {"keep": None if keep == 1 else keep, "agreement": agreement}
    return {name: value for name, value in given.items() if value is not None}


def check_readable(images: Tensor, training: bool) -> None:
    """Refuse what cannot choose by content."""
    if training:
        raise InputError(
            f"keep={AUTO!r} chooses in eval mode; in training shares are numbers (distill and "
            "fine-tuning draw them by nested.keep). Call model.eval() first."
        )
    if not has_values(images):
        raise InputError(
            f"keep={AUTO!r} looks at the images, which torch.compile, torch.export and CUDA graphs "
            f"have no values of; give keep a number from {LEAST_KEEP} to 1, or use "
            "veca.compile_for_inference."
        )


def check_memorable(training: bool, keep: float | str | None) -> None:
    """Refuse a pass whose patches cannot be had again one by one."""
    if training:
        raise InputError(
            "a core memory belongs to the model in eval mode; in training the places of the "
            "patches are drawn at random. Call model.eval() first."
        )
    if keep is not None and keep != 1:
        raise InputError(
            f"a core memory belongs to the pass over every patch, got keep={keep!r}: merged "
            "patches depend on each other. Ask for keep=1."
        )


def check_layers(layers: Sequence[int] | None, depth: int) -> list[int]:
    """The layers to show: `layers`, or all of them when it is None."""
    if layers is None:
        return list(range(1, depth + 1))
    wanted = [whole(layer) for layer in layers] if isinstance(layers, Iterable) else []
    known = [layer for layer in wanted if layer is not None and 1 <= layer <= depth]
    if not wanted or len(known) < len(wanted):
        raise InputError(
            f"layers must be a list of whole numbers from 1 to {depth}, got {layers!r}; "
            "1 is the first block."
        )
    return known


def check_blocks(n: int | Sequence[int] | None, depth: int) -> list[int]:
    """Which of `depth` blocks are meant, in order and from 0: the last n, some of them, or all."""
    last = whole(n)
    if n is None:
        wanted = list(range(depth))
    elif last is not None:
        wanted = list(range(depth - last, depth)) if 0 < last <= depth else []
    else:
        numbers = [whole(block) for block in n] if isinstance(n, Iterable) else []
        known = [block for block in numbers if block is not None and -depth <= block < depth]
        wanted = sorted({block % depth for block in known}) if len(known) == len(numbers) else []
    if not wanted:
        raise InputError(
            f"blocks are named by their numbers from 0 to {depth - 1}, negative ones from the end, "
            f"or by how many of the last {depth}; got {n!r}."
        )
    return wanted


def check_images(images: Tensor, channels: int, patch_size: int) -> tuple[int, int]:
    """The patch grid (h, w) of a batch of images that the model can take."""
    if not isinstance(images, Tensor):
        advice = "veca.preprocess makes one from files and PIL images"
        if isinstance(getattr(images, "pixels", None), Tensor):
            advice = "pass its .pixels"
        raise InputError(
            f"images must be a tensor [batch, {channels}, height, width], got "
            f"{type(images).__name__}; {advice}."
        )
    if images.ndim != 4:
        hint = " Add a batch axis with images[None]." if images.ndim == 3 else ""
        raise InputError(
            f"images must be [batch, {channels}, height, width], got shape "
            f"{tuple(images.shape)}.{hint}"
        )
    if images.shape[1] != channels:
        hint = (
            " It looks channels-last; use images.permute(0, 3, 1, 2)."
            if images.shape[3] == channels
            else ""
        )
        raise InputError(f"images must have {channels} channels, got {images.shape[1]}.{hint}")
    if not images.is_floating_point():
        raise InputError(
            f"images must be floating point and normalised, got {images.dtype}; use "
            "veca.preprocess, or scale to 0..1, subtract the mean and divide by the deviation."
        )
    if images.shape[0] == 0:
        raise InputError("the batch is empty; images must hold at least one image.")
    height, width = images.shape[2:]
    if height < patch_size or width < patch_size or height % patch_size or width % patch_size:
        raise InputError(
            f"image height and width must be multiples of the patch size {patch_size}, got "
            f"{height} x {width}; veca.preprocess fits any size to the grid."
        )
    return height // patch_size, width // patch_size


def check_finite(images: Tensor) -> None:
    """Refuse NaN, infinite and absurdly large pixels.

    Skipped where values are not known, as in tracing.
    """
    if not has_values(images):
        return
    # Both are NaN if any pixel is: one pass and no mask.
    lowest, highest = images.aminmax()
    if not (lowest >= -LARGEST_PIXEL and highest <= LARGEST_PIXEL):
        fine = images.abs() <= LARGEST_PIXEL
        bad = (~fine).flatten(1).any(dim=1).nonzero().flatten().tolist()
        raise InputError(
            f"images {bad} of the batch have pixels that are NaN, infinite or beyond "
            f"{LARGEST_PIXEL:,.0f}; normalised ones lie within a few units of 0. Check how they "
            "were decoded and normalised."
        )
