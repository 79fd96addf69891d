"""The images of a run: any source, with what cannot be read left out."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from data.pictures import make_folder
from distill.small import settings
from veca.data import DataError, InMemoryImages, TooManyBadError
from veca.distill import DistillError, distill, read_metrics
from veca.distill.samples import photo_crops
from veca.weights import read_provenance


def test_images_of_ones_own(tmp_path) -> None:
    images = InMemoryImages(
        torch.randint(0, 256, (9, 3, 40, 40), dtype=torch.uint8),
        np.arange(9),
        [f"{i}" for i in range(9)],
        mode="square",
        source_fingerprint="mine",
    )
    config = settings(data={"source": ""})
    result = distill(config, tmp_path, source=images, validation=photo_crops("photos:5", 40))
    assert result.best is not None
    assert read_provenance(result.final)["data"]["images"] == 9


def test_a_folder_with_a_broken_image(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(12):
        pixels = np.random.default_rng(i).integers(0, 255, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png")
    (folder / "99.png").write_bytes(b"not an image")
    distill(settings(data={"source": str(folder), "workers": 0}), tmp_path / "run")
    (skipped,) = {r["name"] for r in read_metrics(tmp_path / "run", "skipped")}
    assert skipped.endswith("99.png")
    (folder / "99.png").unlink()
    table = {"source": str(folder), "workers": 0, "in_memory": True, "hold_out": 2}
    result = distill(settings(data=table), tmp_path / "memory")
    assert result.stopped == "done"
    assert list((tmp_path / "cache" / "images").glob("*.safetensors"))


def test_an_empty_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match="extensions"):
        distill(settings(data={"source": str(tmp_path / "photos")}), tmp_path / "run")


@pytest.mark.parametrize("in_memory", [False, True])
def test_how_many_bad_images_are_borne_is_a_setting(tmp_path, in_memory: bool) -> None:
    photos = make_folder(tmp_path / "photos", 20)
    for path in sorted(photos.rglob("*.png"))[:5]:
        path.write_bytes(b"no image")
    data = {"source": str(photos), "in_memory": in_memory, "memory_size": 32, "workers": 0}
    steps = {"steps": 8, "warmup": 0}
    with pytest.raises(TooManyBadError, match=r"data\.bad_limit"):
        distill(settings(data=data, schedule=steps), tmp_path / "strict")
    data["bad_limit"] = 0.5
    assert distill(settings(data=data, schedule=steps), tmp_path / "run").stopped == "done"
    with pytest.raises(DistillError, match=r"data\.bad_limit"):
        settings(data={**data, "bad_limit": 2.0})


def test_a_bad_image_of_any_name_is_left_out(tmp_path) -> None:
    photos = make_folder(tmp_path / "photos", 6)
    (photos / os.fsdecode(b"bad\xff.png")).write_bytes(b"no image")
    said = io.StringIO()
    data = {"source": str(photos), "workers": 0, "bad_limit": 0.5}
    config = settings(data=data, schedule={"steps": 4, "warmup": 0})
    distill(config, tmp_path / "run", console=Console(file=said))
    assert "bad\\xff.png" in said.getvalue()
    (record,) = read_metrics(tmp_path / "run", "skipped")
    assert record["name"].endswith("bad\udcff.png")
