"""Writers of tiny files, for datasets built in a temporary folder."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


class Writer:
    """Writes below one folder; every method takes a path relative to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rng = np.random.default_rng(0)
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4), (200, 30, 60)).save(buffer, "JPEG")
        self.jpeg = buffer.getvalue()

    def path(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def photos(self, *names: str) -> None:
        """The same 4 x 4 JPEG under each name: fast, where only the names matter."""
        for name in names:
            self.path(name).write_bytes(self.jpeg)

    def image(self, name: str, height: int = 6, width: int = 8, **save: Any) -> np.ndarray:
        """A random image; returns its pixels, which a PNG keeps."""
        pixels = self.rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(self.path(name), **save)
        return pixels

    def labels(self, name: str, values: Any, *, palette: bool = False) -> np.ndarray:
        """A single-channel PNG of these values: 8 bit, or 16 where the array has 16."""
        values = np.asarray(values)
        if values.dtype != np.uint16:
            values = values.astype(np.uint8)
        image = Image.fromarray(values)
        if palette:
            image.putpalette(self.rng.integers(0, 256, 768, dtype=np.uint8).tobytes())
            assert image.mode == "P"
        image.save(self.path(name))
        return values

    def text(self, name: str, lines: Iterable[object]) -> None:
        self.path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def json(self, name: str, value: object) -> None:
        self.path(name).write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    return Writer(tmp_path)
