"""What a file of a picture gives: levels, a resolution, a place on earth, and windows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from veca.errors import LargeError

Pixels = np.ndarray[Any, Any]


class Place(NamedTuple):
    """Where a picture lies: a coordinate system, and the affine way from pixels to it."""

    crs: str
    """As WKT; empty where the file says none."""
    transform: tuple[float, float, float, float, float, float]
    """(a, b, c, d, e, f): x = a column + b row + c, y = d column + e row + f."""

    def part(self, top: float, left: float, down: float, across: float) -> Place:
        """Of a part that begins there, whose pixels are so many of these down and across."""
        a, b, c, d, e, f = self.transform
        origin = (a * left + b * top + c, d * left + e * top + f)
        return Place(self.crs, (a * across, b * down, origin[0], d * across, e * down, origin[1]))


class Source:
    """A file, or folder, that a picture is read from; each kind has a class.

    Attributes:
        levels: (height, width) of each, the finest first.
        microns: micrometres a pixel of the finest level, (down, across), where the file says it.
        place: of the finest level, where the file says it.
        cheap: a window costs no more than its own pixels, so nothing need be kept.
    """

    levels: Sequence[tuple[int, int]]
    microns: tuple[float, float] | None = None
    place: Place | None = None
    cheap = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, level: int, top: int, left: int, height: int, width: int) -> Pixels:
        """[height, width, bands] or [height, width] there, of any type; the window is inside."""
        raise NotImplementedError

    def valid(self, level: int, top: int, left: int, height: int, width: int) -> Pixels | None:
        """Booleans [height, width]: where there are data. None: the file does not say."""
        return None

    def identity(self) -> str:
        """What tells it from others, and from itself changed."""
        return file_identity(self.path)


def file_identity(path: Path) -> str:
    """By place, size and date: gigabytes are not read to find out."""
    state = os.stat(path)  # noqa: PTH116
    return f"{os.path.realpath(path)} {state.st_size} {state.st_mtime_ns}"


def cut_short(path: Path, wanted: int) -> LargeError:
    """The error for a file that ends before its pixels do."""
    there = path.stat().st_size
    return LargeError(
        f"{path} is cut short: its pixels need {wanted:,} bytes and it has {there:,}; fetch or "
        "write it again."
    )


def damaged(path: Path, reason: object) -> LargeError:
    """The error for a file that no reader makes sense of."""
    words = " ".join(str(reason).split()) or type(reason).__name__
    return LargeError(f"{path} cannot be read as a picture ({words[:200]}); replace it.")
