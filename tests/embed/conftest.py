"""Weights, images and a way to embed them that takes moments."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import veca
from conftest import SMALLEST, stirred
from data.pictures import make_folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, so that nothing is left in the user's."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VECA_CACHE", str(folder))
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return veca.save(stirred(veca.create_model(SMALLEST)), tmp_path / "weights")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Thirty images of 48 x 64 pixels in three folders."""
    return make_folder(tmp_path / "images", 30)


@pytest.fixture
def embed(weights: Path):
    """`veca.embed.embed`, small and in this process."""
    pytest.importorskip("pyarrow")
    from veca.embed import embed

    options = {"size": (32, 48), "cores": 4, "batch": 4, "shard_rows": 8, "workers": 0}
    return partial(embed, **{"weights": weights, "dtype": "float32", "threads": 1, **options})


@pytest.fixture
def tree():
    """Every file below a folder and its bytes."""

    def read(folder: Path) -> dict[str, bytes]:
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}

    return read
