"""Weights, photos and handlers of the demo, small enough to be quick."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from conftest import SMALLEST, stirred
from veca import create_model, save
from veca.app.content import Limits, Photo
from veca.app.handlers import Handlers
from veca.app.model_cache import ModelCache
from veca.app.uploads import Uploads


def make_photo(width: int = 96, height: int = 64, seed: int = 0) -> Image.Image:
    """Noise, the same each time."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def weights(tmp_path) -> str:
    """A folder with trained-looking weights: three layers, eight cores."""
    return str(save(stirred(create_model(SMALLEST)), tmp_path / "weights"))


@pytest.fixture
def models(weights, monkeypatch, tmp_path) -> ModelCache:
    monkeypatch.setattr("veca.app.model_cache.available", lambda: [])
    return ModelCache([weights])


@pytest.fixture
def handlers(models, tmp_path) -> Handlers:
    folder = tmp_path / "files"
    folder.mkdir()
    return Handlers(models, Limits(), Uploads(folder / "uploads"), folder)


@pytest.fixture
def photo() -> Photo:
    return Photo("a photo", make_photo(), (64, 96))


@pytest.fixture
def noise():
    """A function that makes photos."""
    return make_photo
