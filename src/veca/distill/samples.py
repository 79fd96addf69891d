"""What a run without any download needs: crops of the bundled photos, and a teacher of filters.

For a first try, a laptop and continuous integration. Both are deterministic.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veca.data import InMemoryImages, sample_keys
from veca.data.draws import choice, uniform
from veca.errors import DistillError
from veca.images import EXTENSIONS, read_image
from veca.teachers.custom import CallableTeacher

PHOTOS, FILTERS = "photos:", "filters"

_SMALLEST = 0.25
"""Side of the smallest crop, as a share of the photo's short side."""


def photo_crops(spec: str, size: int) -> InMemoryImages:
    """ "photos:200" -> 200 square crops of the bundled photos, `size` pixels each."""
    text = spec.removeprefix(PHOTOS)
    if not text.isdigit() or int(text) < 1:
        raise DistillError(f"the bundled photos are asked for as photos:200; got {spec!r}.")
    count = int(text)
    folder = resources.files("veca") / "assets" / "photos"
    names = sorted(p.name for p in folder.iterdir() if p.name.endswith(tuple(EXTENSIONS)))
    photos = [read_image((folder / name).read_bytes()) for name in names]
    keys = sample_keys(0, 0, np.arange(count))
    which, scale = choice(keys, 0, len(photos)), uniform(keys, 1)
    down, across = uniform(keys, 2), uniform(keys, 3)
    crops = np.empty((count, 3, size, size), np.uint8)
    for i in range(count):
        photo = photos[which[i]]
        side = min(photo.size) * (_SMALLEST + (1 - _SMALLEST) * scale[i])
        left, top = (photo.width - side) * across[i], (photo.height - side) * down[i]
        crop = photo.resize((size, size), box=(left, top, left + side, top + side))
        crops[i] = np.asarray(crop).transpose(2, 0, 1)
    return InMemoryImages(
        torch.from_numpy(crops),
        np.arange(count, dtype=np.int64),
        [f"{names[which[i]]}#{i}" for i in range(count)],
        mode="square",
        source_fingerprint=f"veca-photos-{count}-{size}",
    )


class FilterBank(nn.Module):
    """Edges by direction, size and colour, in each patch and around it: features of the old kind.

    Images [B, 3, H, W] in 0..1 -> cls [B, 60], patches [B, 60, H / 16, W / 16]. Half of a patch's
    numbers describe the patch, half its surroundings against the image's mean: a student needs its
    cores for the second half.
    """

    WIDTH, STRIDE = 60, 16
    opponents: Tensor
    sobel: Tensor

    def __init__(self) -> None:
        super().__init__()
        opponents = [[0.299, 0.587, 0.114], [0.5, -0.5, 0.0], [0.25, 0.25, -0.5]]
        smooth, slope = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([-1.0, 0.0, 1.0])
        sobel = torch.stack([torch.outer(smooth, slope), torch.outer(slope, smooth)]) / 4
        self.register_buffer("opponents", torch.tensor(opponents)[:, :, None, None])
        self.register_buffer("sobel", sobel[:, None])

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        colours = F.conv2d(images.float(), self.opponents)
        parts = [F.avg_pool2d(colours, self.STRIDE)]
        for scale in (1, 2, 4):
            grey = F.avg_pool2d(colours[:, :1], scale)
            edges = F.conv2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), self.sobel)
            both = torch.cat([edges, edges.sum(1, True), edges[:, :1] - edges[:, 1:]], dim=1)
            signed = torch.cat([both.relu(), (-both).relu()], dim=1)  # 8 directions
            parts.append(F.avg_pool2d(signed, self.STRIDE // scale).sqrt())
        edges = F.conv2d(
            F.pad(colours[:, 1:].flatten(0, 1)[:, None], (1, 1, 1, 1), mode="replicate"), self.sobel
        )
        length = edges.square().sum(1).sqrt().unflatten(0, (-1, 2))
        colour_edges = F.avg_pool2d(length, self.STRIDE).sqrt()
        light = F.avg_pool2d(colours[:, :1].square(), self.STRIDE)
        local = torch.cat([*parts, colour_edges, light], dim=1)
        around = F.avg_pool2d(local, 5, stride=1, padding=2, count_include_pad=False)
        mean = local.mean(dim=(2, 3), keepdim=True)
        dense = torch.cat([local, around - mean], dim=1)
        spread = (local - mean).square().mean(dim=(2, 3)).sqrt()
        return torch.cat([mean.flatten(1), spread], dim=1), dense


def filter_teacher() -> CallableTeacher:
    """The filter bank as a teacher, called "filters" in settings."""
    return CallableTeacher(
        FilterBank(),
        width=FilterBank.WIDTH,
        stride=FilterBank.STRIDE,
        name=FILTERS,
        licence="Apache-2.0",
    )
