"""Depth datasets: metres at every pixel, nan where the sensor saw nothing or the range ends.

The crops of the protocols are data here (`train_crop`, `image_crop`, `eval_crop`); images and depth
maps come whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np

from veca.errors import DatasetError
from veca.probe.datasets.catalogue import shipped
from veca.probe.datasets.pairs import (
    DenseDataset,
    Pair,
    bad_setting,
    pair_up,
    paired_folders,
    read_settings,
    read_values,
)
from veca.probe.datasets.registry import register
from veca.probe.datasets.tree import Tree


@dataclass(frozen=True)
class Crop:
    """A rule that gives a box in an image of any size.

    kind "pixels": values are (top, bottom, left, right) in an image of `size` (height, width), and
    are scaled to other sizes. "fractions": the same four as parts of height and width. "bottom":
    values are (height, width) of a box at the bottom, in the middle from left to right.
    """

    name: str
    kind: str
    values: tuple[float, ...]
    size: tuple[int, int] | None = None

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """(top, bottom, left, right), for `array[top:bottom, left:right]`."""
        if self.kind == "bottom":
            rows, columns = (int(value) for value in self.values)
            if height < rows or width < columns:
                raise DatasetError(
                    f"the {self.name} crop takes {rows} x {columns} pixels, more than an image of "
                    f"{height} x {width} has"
                )
            left = (width - columns) // 2
            return height - rows, height, left, left + columns
        top, bottom, left_, right = self.values
        if self.kind == "pixels":
            of_height, of_width = self.size or (height, width)
            # Whole numbers, so that the size they were made for gives exactly these.
            return (
                int(top) * height // of_height,
                int(bottom) * height // of_height,
                int(left_) * width // of_width,
                int(right) * width // of_width,
            )
        return int(top * height), int(bottom * height), int(left_ * width), int(right * width)


EIGEN_NYU = Crop("Eigen", "pixels", (45, 471, 41, 601), (480, 640))
NYU_BORDER = Crop("NYU border", "pixels", (45, 472, 43, 608), (480, 640))
KITTI_BENCHMARK = Crop("KITTI benchmark", "bottom", (352, 1216))
GARG = Crop("Garg", "fractions", (0.40810811, 0.99189189, 0.03594771, 0.96405229))


class DepthDataset(DenseDataset):
    """A dataset whose samples have a depth for every pixel.

    Attributes:
        depth_scale: stored units per metre.
        min_depth, max_depth: metres; what lies outside is not valid. `max_depth` itself is valid
            where `max_is_valid` says so.
        train_crop: box that training images are cut to first; None: the whole image.
        image_crop: box that image and depth are cut to, in training and test.
        eval_crop: box, within `image_crop`, that is scored.
    """

    depth_scale: float = 1.0
    min_depth: float = 1e-3
    max_depth: float = math.inf
    max_is_valid: ClassVar[bool] = False
    bits: ClassVar[int | None] = 16
    train_crop: ClassVar[Crop | None] = None
    image_crop: ClassVar[Crop | None] = None
    eval_crop: ClassVar[Crop | None] = None

    def depth(self, i: int, *, allow_empty: bool = False) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Metres, float32 [H, W] of the image's size, nan where invalid.

        Raises:
            DatasetError: no pixel is valid (unless `allow_empty`), or the file is not right.
        """
        self._frame(i)  # image and depth agree in size
        path = self.label_path(i)
        values, bits = read_values(path)
        if self.bits is not None and bits != self.bits:
            raise DatasetError(
                f"{path}: {bits} bits per pixel, but {self.name} stores depth with {self.bits}; "
                f"replace the file"
            )
        metres = (values.astype(np.float64) / self.depth_scale).astype(np.float32)
        with np.errstate(invalid="ignore"):  # a comparison with nan is false, as it should be
            inside = metres <= self.max_depth if self.max_is_valid else metres < self.max_depth
            valid = (metres > self.min_depth) & inside
        if not allow_empty and not valid.any():
            raise DatasetError(
                f"{path}: no valid depth, every pixel is empty or outside {self.min_depth:g} to "
                f"{self.max_depth:g} m; leave the sample out, or check the depth scale"
            )
        return np.where(valid, metres, np.float32(np.nan))

    def _try(self, i: int) -> None:
        self.image(i)
        self.depth(i)

    def _group_by(self, names: Sequence[str]) -> None:
        """One group per distinct name."""
        numbers = {name: i for i, name in enumerate(sorted(set(names)))}
        self.groups = tuple(numbers[name] for name in names)


def _listed(
    tree: Tree, source: str, images: str, depths: str
) -> tuple[list[Pair], list[tuple[str, str]]]:
    """Pairs from lines "IMAGE DEPTH FOCAL", sorted, and those whose depth is given as None."""
    pairs: list[Pair] = []
    skipped = []
    for _, words in tree.table(source, 2):
        image = images + words[0].lstrip("/")
        if words[1] == "None":
            skipped.append((image, f"{source} has no depth for it"))
        else:
            pairs.append((image, depths + words[1].lstrip("/")))
    tree.require(path for pair in pairs for path in pair)
    return sorted(pairs), skipped


@register
class RgbDepth(DepthDataset):
    """A plain set: images and depth files of the same name, and dataset.json.

    dataset.json holds {"depth_scale": 1000, "max_depth": 10}: the stored units per metre, and the
    largest depth in metres that is scored. It may hold "min_depth" (default 0.001). There is no
    default for the first two, since a wrong one would give wrong scores. Keywords of the same names
    take precedence over the file. Zero, negative and non-finite depth is invalid.
    """

    info = shipped("rgb-depth")
    labels_stored_pixels = False
    max_is_valid = True
    bits = None

    def _load(self, tree: Tree) -> None:
        super()._load(tree)
        settings = {"min_depth": 1e-3, **read_settings(tree, self.info, self.options)}
        for key in self.info.options:
            value: Any = settings.get(key)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise bad_setting(tree, key, value, "a number above 0")
            setattr(self, key, float(value))
        if self.min_depth >= self.max_depth:
            raise bad_setting(tree, "min_depth", self.min_depth, "less than max_depth")

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        images, depths = paired_folders(tree, "rgb", "depth", self.split)
        return pair_up(tree, images, depths, label_suffixes=(".png", ".tif", ".tiff", ".npy"))


@register
class NyuV2(DepthDataset):
    """NYU Depth v2 as prepared for BTS and used by DINOv2 and DINOv3.

    24,231 synchronised pairs for training and the 654 official test images, in one folder per
    scene, depth as 16-bit PNG in millimetres, with a list for each split. The official .mat file is
    not read. `groups` are the scenes.
    """

    info = shipped("nyuv2")
    markers = ("nyu_train.txt", "nyu_test.txt", "nyudepthv2_test_files_with_gt.txt")
    nested = ("nyu", "NYU", "nyu_depth_v2")
    depth_scale = 1000.0
    max_depth = 10.0
    train_crop = NYU_BORDER
    eval_crop = EIGEN_NYU

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        source = tree.first(f"nyu_{self.split}.txt", f"nyudepthv2_{self.split}_files_with_gt.txt")
        apart = "sync" if self.split == "train" else "official_splits/test"
        folder = f"{apart}/" if tree.exists(apart) else ""
        pairs, skipped = _listed(tree, source, folder, folder)
        self.skipped = tuple(skipped)
        self._group_by([str(PurePosixPath(image).parent) for image, _ in pairs])
        return pairs


@register
class Kitti(DepthDataset):
    """KITTI with Eigen's split and the improved ground truth (16-bit PNG, depth = value / 256).

    Images of the list without ground truth ("None": 45 of 697 in test) are skipped and counted in
    `skipped`. `groups` are the drives. The Garg box is taken within the 352 x 1216 benchmark crop,
    as DINOv2's evaluation does; older code takes it of the whole image.
    """

    info = shipped("kitti")
    markers = ("input", "gt_depth")
    nested = ("kitti", "KITTI")
    depth_scale = 256.0
    max_depth = 80.0
    image_crop = KITTI_BENCHMARK
    eval_crop = GARG

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        source = tree.first(
            f"kitti_eigen_{self.split}.txt", f"eigen_{self.split}_files_with_gt.txt"
        )
        tree.require(["input", "gt_depth"])
        pairs, skipped = _listed(tree, source, "input/", "gt_depth/")
        self.skipped = tuple(skipped)
        self._group_by([depth.split("/")[1] for _, depth in pairs])
        return pairs


@register
class ScauRgbd(DepthDataset):
    """One drive through a greenhouse, in time order: one scene, and no more than that.

    Split by time, the first 60 % to train on and the last 40 % to test on, since neighbouring
    frames are near copies. Depth is 16 bit in millimetres; 0 and everything above 10 m is invalid.
    `groups` are blocks of time, ten over the drive, six of them in train: to choose settings hold
    out a block, never single frames.
    """

    info = shipped("scau-rgbd")
    markers = ("rgb", "depth")
    nested = ("scau-rgbd",)
    in_time = True
    depth_scale = 1000.0
    max_depth = 10.0
    max_is_valid = True

    def _pairs(self, tree: Tree) -> Sequence[Pair]:
        pairs = pair_up(tree, "rgb", "depth")
        times = {}
        for pair in pairs:
            name = PurePosixPath(pair[0]).stem
            if not name.isdecimal():
                raise tree.error(pair[0], "its name is no frame number; expected rgb/0000.jpg")
            times[pair] = int(name)
        pairs.sort(key=times.__getitem__)
        cut = len(pairs) * 6 // 10
        if self.split == "train":
            chosen, first, blocks = pairs[:cut], 0, 6
        else:
            chosen, first, blocks = pairs[cut:], 6, 4
        self.groups = tuple(first + i * blocks // len(chosen) for i in range(len(chosen)))
        return chosen
