"""What a file of features holds, as .npz or .safetensors.

    cls            [D]          the global embedding           (if asked for)
    patches        [h, w, D]    dense features, row by row     (if asked for)
    grid           [2]          (h, w): patches down and across
    cores          []           the budget
    original_size  [2]          (height, width) of the image as it was read
    input_size     [2]          (height, width) of what the model saw
    valid_size     [2]          (height, width) of the part of it that is image, not padding
    crop_box       [4]          (left, top, right, bottom) kept of the scaled image
    image                       the image's path, relative to the root in `features.json`
    image_stat     [2]          (bytes, modification time in ns) of the image's file
    settings                    a fingerprint of the settings

In a file for many images all arrays but `cores` have a first axis over the images, and `images`
lists their paths; `image_stat` is not there. Text is an array of strings in .npz files, and JSON
metadata in .safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from veca._util.files import atomic_write
from veca.errors import InputError

FORMATS = ("npz", "safetensors")
"""What a file of features can be."""


def read_features(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file written by `extract` holds: numpy arrays, and text as `str` or lists of it."""
    path = Path(path)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            content = {name: file[name] for name in file.files}
        return {k: v.tolist() if v.dtype.kind == "U" else v for k, v in content.items()}
    if path.suffix != ".safetensors":
        raise InputError(f"{path} is no file of features; they end in .npz or .safetensors.")
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        text = {name: json.loads(value) for name, value in (file.metadata() or {}).items()}
        return {**{name: file.get_tensor(name) for name in file.keys()}, **text}  # noqa: SIM118


def write_features(
    path: Path, arrays: Mapping[str, Any], text: Mapping[str, str | list[str]]
) -> None:
    """Write a file, all or nothing; its suffix says how."""
    with atomic_write(path) as file:
        if path.suffix == ".npz":
            content: dict[str, Any] = {name: np.array(value) for name, value in text.items()}
            np.savez(file, **arrays, **content)
        else:
            from safetensors.numpy import save

            metadata = {name: json.dumps(value) for name, value in text.items()}
            contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            file.write(save(contiguous, metadata))


class Origin(NamedTuple):
    """What a file of features was made with and from."""

    settings: str
    """The fingerprint."""
    image_stat: tuple[int, ...] | None
    """None if the file does not say: those of earlier versions, and those of many images."""


def origin_of(path: Path) -> Origin | None:
    """Where a file of features comes from; None if it is no whole file of ours."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                settings = str(file["settings"])
                stat = file.get("image_stat")
        else:
            from safetensors import safe_open

            with safe_open(path, "numpy") as file:
                settings = str(json.loads(file.metadata()["settings"]))
                stat = file.get_tensor("image_stat") if "image_stat" in file.keys() else None  # noqa: SIM118
        return Origin(settings, None if stat is None else tuple(stat.tolist()))
    except Exception:  # whatever is wrong with it, it will be written anew
        return None


def common_root(paths: Sequence[Path]) -> Path:
    """The deepest folder that holds all of `paths`."""
    try:
        return Path(os.path.commonpath([path.parent for path in paths]))
    except ValueError as error:  # two drives of a Windows machine
        raise InputError(
            "the images lie on different drives and share no folder to name them from; "
            "run once for each drive."
        ) from error


class NamedImage(NamedTuple):
    """An image that gets a file, or a place in one."""

    place: int
    """In the order of the sources."""
    path: Path
    name: str
    """Its path relative to the root, with forward slashes."""


def name_images(paths: Sequence[Path], root: Path) -> list[NamedImage]:
    """The images under their names, which start from `root`."""
    outside = [path for path in paths if not path.is_relative_to(root)]
    if outside:
        raise InputError(
            f"{outside[0]} ({len(outside)} of {len(paths)} images) is not inside {root}, the "
            "folder that names start from; choose another output, or start over with overwrite "
            "and a root that holds all images."
        )
    return [NamedImage(i, path, path.relative_to(root).as_posix()) for i, path in enumerate(paths)]
