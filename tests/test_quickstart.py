"""The first look, on a small model: table, pictures and page belong together."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from PIL import Image

from conftest import stirred
from veca import bench, create_model, save
from veca.config import VecaConfig
from veca.quickstart import BUDGETS, PARTS, bundled_photos, quickstart, table
from veca.viz.numbers import read_csv


@pytest.fixture
def weights(tmp_path):
    model = create_model(VecaConfig(depth=2, width=32, heads=2, num_cores=64))
    return str(save(stirred(model), tmp_path / "weights"))


def test_bundled_photos_have_credits():
    photos = bundled_photos()
    assert 1 <= len(photos) <= 5
    credits = (photos[0].parent.parent / "PHOTO-CREDITS.md").read_text()
    for photo in photos:
        assert f"`{photo.name}`" in credits
        with Image.open(photo) as image:
            assert min(image.size) >= 256


def test_page_shows_every_budget_and_picture(tmp_path, weights, monkeypatch):
    monkeypatch.setattr(bench.BenchPlan, "__init__", _quick(bench.BenchPlan.__init__))
    out = tmp_path / "out"
    result = quickstart(out, bundled_photos()[:2], weights=weights, size=64)
    assert [row.cores for row in result.rows] == list(BUDGETS)
    assert result.trained and result.dense_ms > 0
    full = result.rows[-1]
    assert full.cls_agreement == pytest.approx(1) and full.patch_agreement == pytest.approx(1)
    assert all(row.ms > 0 and -1 <= row.cls_agreement <= 1.0001 for row in result.rows)
    assert result.rows[0].patch_agreement < 1

    assert "scatter by up to 80%" in replace(result, spread=0.8).rough
    assert replace(result, spread=0.1).rough == ""

    page = result.page.read_text()
    assert ("The times are rough" in page) == bool(result.rough)
    sources = re.findall(r'<image [^>]*href="([^"]+)"', page)
    names = [photo.stem for photo in bundled_photos()[:2]]
    drawn = [f"{name}-{part}.png" for name in names for part in PARTS]
    assert sources == [*drawn, "numbers.png"]
    for source in sources:
        with Image.open(out / source) as picture:
            assert picture.width > 400
    assert len(read_csv(out / "numbers.csv")) == 2 * 4  # two layers, four of the budgets
    assert "attention gets narrower from 8 to 64 cores" in page and "These weights show" in page
    header, rows = table(result)
    for cell in (*header, *rows[0], *rows[-1]):
        assert cell in page
    assert "random weights" not in page


@pytest.mark.parametrize(("asked", "used"), [(100, 96), (40, 48)])
def test_any_size_is_fitted_to_the_patch_grid(tmp_path, weights, monkeypatch, asked, used):
    monkeypatch.setattr(bench.BenchPlan, "__init__", _quick(bench.BenchPlan.__init__))
    monkeypatch.setattr("veca.quickstart.BUDGETS", (8, 64))
    result = quickstart(tmp_path / "out", bundled_photos()[:1], weights=weights, size=asked)
    assert result.size == used and result.rows[0].cost.grid == (used // 16, used // 16)
    assert f"one image of {used} x {used} pixels" in result.page.read_text()


@pytest.mark.slow
def test_fresh_weights_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.BenchPlan, "__init__", _quick(bench.BenchPlan.__init__))
    monkeypatch.setattr("veca.viz.default_weights.find", lambda name: None)
    monkeypatch.setattr("veca.quickstart.BUDGETS", (8, 64))
    state = torch.random.get_rng_state()
    result = quickstart(tmp_path / "out", bundled_photos()[:1], size=64)
    page = result.page.read_text()
    assert not result.trained and "These are fresh random weights" in page
    assert "Fresh random weights: " in page and "fresh" in result.weights
    assert torch.equal(state, torch.random.get_rng_state())


def _quick(init):
    def patched(self, **kwargs):
        init(self, **{**kwargs, "repeats": 1, "seconds": 0.0})

    return patched
