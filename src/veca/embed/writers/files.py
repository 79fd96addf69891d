"""What a file of features holds, as .npz or .safetensors.

    cls            [D]          the global embedding           (if asked for)
    patches        [h, w, D]    dense features, row by row     (if asked for)
    grid           [2]          (h, w): patches down and across
    cores          []           the budget
    keep           []           the share of patch tokens that went on (unless all did)
    original_size  [2]          (height, width) of the image as it was read
    input_size     [2]          (height, width) of what the model saw
    valid_size     [2]          (height, width) of the part of it that is image, not padding
    crop_box       [4]          (left, top, right, bottom) kept of the scaled image
    image                       the image's path, relative to the root in `features.json`
    image_stat     [2]          (bytes, modification time in ns) of the image's file
    settings                    a fingerprint of the settings

In a file for many images all arrays but `cores` and `keep` have a first axis over the images, and
`images` lists their paths; `image_stat` is not there. Text is an array of strings in .npz files,
and JSON metadata in .safetensors.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from veca._util.archives import check_unpacked
from veca._util.files import atomic_write, from_json
from veca.errors import InputError

_CHECKSUM = "crc32"

FORMATS = ("npz", "safetensors")
"""What a file of features can be."""


def read_features(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file written by `extract` holds: numpy arrays, and text as `str` or lists of it.

    Raises:
        InputError: it is not there, is no such file, or was damaged: its checksums say so.
    """
    path = Path(path)
    if path.suffix.removeprefix(".") not in FORMATS:
        raise InputError(f"{path} is no file of features; they end in .npz or .safetensors.")
    if not path.is_file():
        raise InputError(f"{path}: there is no such file of features.")
    try:
        return _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    except InputError:
        raise
    except Exception as error:  # of zipfile, zlib, numpy, safetensors, json
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} is damaged or no file of features ({reason}); remove it, then run veca "
            "features again."
        ) from error


def _read_npz(path: Path) -> dict[str, Any]:
    check_unpacked(path, InputError)
    with np.load(path, allow_pickle=False) as file:  # zip checks each member as it is read
        content = {name: file[name] for name in file.files}
    return {k: v.tolist() if v.dtype.kind == "U" else v for k, v in content.items()}


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        text = {name: from_json(value) for name, value in (file.metadata() or {}).items()}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    checksum = text.pop(_CHECKSUM, None)  # files of 0.1 have none
    if checksum is not None and checksum != _checksum(arrays, text):
        raise ValueError("its checksum is wrong")
    return {**arrays, **text}


def _checksum(arrays: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    total = zlib.crc32(json.dumps(text, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), total)
        total = zlib.crc32(array.reshape(-1).view(np.uint8).data, total)
    return total


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

            contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            checked = {**text, _CHECKSUM: _checksum(contiguous, text)}
            metadata = {name: json.dumps(value) for name, value in checked.items()}
            file.write(save(contiguous, metadata))


class Origin(NamedTuple):
    """What a file of features was made with and from."""

    settings: str
    """The fingerprint."""
    image_stat: tuple[int, ...] | None
    """None if the file does not say: those of earlier versions, and those of many images."""


def origin_of(path: Path) -> Origin | None:
    """Where a file of features comes from; None if it is no whole file of ours.

    All of it is read, so that one which was damaged is not taken for whole.
    """
    try:
        content = read_features(path)
        stat = content.get("image_stat")
        return Origin(str(content["settings"]), None if stat is None else tuple(stat.tolist()))
    except (InputError, KeyError):  # whatever is wrong with it, it will be written anew
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
