"""Pictures that are, or fit, in memory: what Pillow reads, and NumPy's files as memory maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from veca.images import read_image
from veca.large.sources.source import Pixels, Source, damaged


class PillowSource(Source):
    """A format that must be decoded whole; `--max-pixels` limits what is."""

    cheap = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._pixels = np.asarray(read_image(path))
        self.levels = [(self._pixels.shape[0], self._pixels.shape[1])]

    def read(self, level: int, top: int, left: int, height: int, width: int) -> Pixels:
        return self._pixels[top : top + height, left : left + width]


class NumpySource(Source):
    """A `.npy` file [H, W], [H, W, bands]; only what is asked for is read."""

    cheap = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise damaged(path, error) from error
        if self._array.ndim not in (2, 3) or 0 in self._array.shape:
            raise damaged(path, f"its shape is {list(self._array.shape)}, not [H, W, bands]")
        self.levels = [(self._array.shape[0], self._array.shape[1])]

    def read(self, level: int, top: int, left: int, height: int, width: int) -> Pixels:
        return np.asarray(self._array[top : top + height, left : left + width])
