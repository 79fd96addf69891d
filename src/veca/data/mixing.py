"""Two images in one view: the whole of both (mixup) or a rectangle of one in the other (cutmix).

The images of a batch are partners in pairs: the first and the second, the third and the fourth, and
so on. Each draws from its own key what it takes of the other, and is the larger part of its own
view. A student learns from a mixture because its teacher is shown the very same one ("function
matching", Beyer et al., 2021), so nothing has to be known about what such an image should be.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca.data.draws import Keys, uniform
from veca.data.resample import copy_to_device
from veca.errors import DataError

STREAMS = 6
"""How many streams of a key `draw` takes."""

_MOST = 0.5  # of the view may be the partner's
_ASPECT = 2.0  # and its inverse


class Mixture(NamedTuple):
    """What each view takes of its partner's; without regard to the view's size."""

    boxes: NDArray[np.float64]
    """[B, 4]: left, top, right, bottom as fractions of width and height; all of the view where
    nothing is cut."""
    shares: NDArray[np.float64]
    """[B]: the partner's part of the pixels in the box: 0 where nothing is mixed, above 0 and up to
    0.5 for mixup, 1 for cutmix."""


def check_pairs(count: int, ranks: int = 1) -> None:
    """Refuse a batch of `count` images of which some rank gets an odd number."""
    share = -(-count // ranks)
    if count % 2 or share % 2:
        among = f" among {ranks} ranks" if ranks > 1 else ""
        raise DataError(
            f"mixup and cutmix mix images in pairs, and a batch of {count}{among} leaves one "
            f"without a partner; let batches, and the images of a sweep, be a multiple of "
            f"{2 * ranks}, or set augment.mixup and augment.cutmix to 0."
        )


def draw_mixture(keys: Keys, first: int, mixup: float, cutmix: float) -> Mixture:
    """What each sample draws from `STREAMS` streams of its key, from `first` on.

    Args:
        mixup: the probability of a blend. Its weight is uniform in 0.5 .. 1.
        cutmix: the probability of a rectangle. Its area is uniform in 0 .. 0.5 of the view, its
            aspect (in the view's own) log-uniform in 1/2 .. 2, its place uniform.
    """
    kind, weight, area, aspect, down, across = (
        uniform(keys, stream) for stream in range(first, first + STREAMS)
    )
    blended = kind < mixup
    cut = ~blended & (kind < mixup + cutmix)
    shares = np.where(blended, _MOST * (1 - weight), cut.astype(np.float64))
    area, aspect = _MOST * (1 - area), _ASPECT ** (2 * aspect - 1)
    # The largest box of the most extreme aspect just fits; only rounding could take it beyond.
    wide, tall = np.minimum(np.sqrt(area * aspect), 1), np.minimum(np.sqrt(area / aspect), 1)
    left, top = across * (1 - wide), down * (1 - tall)
    boxes = np.stack([left, top, left + wide, top + tall], axis=1)
    return Mixture(np.where(cut[:, None], boxes, [0.0, 0.0, 1.0, 1.0]), shares)


def mix(view: Tensor, mixture: Mixture) -> Tensor:
    """The mixed views, from finished ones: float [B, 3, h, w], B even, on any device.

    A box holds the pixels whose centres lie in it. A pixel that nothing is mixed into stays as it
    is to the bit; inside the box of a cutmix it is the partner's to the bit.
    """
    height, width = view.shape[2:]
    # Pixel i's centre is at i + 0.5. The bounds are found on the host, exactly, so all devices
    # agree; they are small whole numbers, exact in float32.
    bounds = np.ceil(mixture.boxes * [width, height, width, height] - 0.5)
    table = np.concatenate([bounds, mixture.shares[:, None]], axis=1).astype(np.float32)
    left, top, right, bottom, share = copy_to_device(table, view.device)[:, :, None].unbind(1)
    along, below = (torch.arange(side, device=view.device) for side in (width, height))
    columns = (along >= left) & (along < right)
    rows = ((below >= top) & (below < bottom)) * share
    weight = rows[:, None, :, None] * columns[:, None, None, :]
    mixed = torch.empty_like(view)
    for one, other in ((0, 1), (1, 0)):
        ours, theirs = view[one::2], view[other::2]
        torch.lerp(ours, theirs, weight[one::2], out=mixed[one::2])
    return mixed
