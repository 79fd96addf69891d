"""The page of all figures."""

from __future__ import annotations

import re

import pytest
from PIL import Image

from veca import create_model, viz
from veca.viz.numbers import read_csv
from veca.viz.report import PARTS


def test_a_page_with_every_figure_and_the_numbers(view, tmp_path):
    lines = []
    options = viz.Options(sizes=[32, 64], cores=[2, 8])
    made = viz.report(
        [view], tmp_path / "r", options, weights="w", progress=lines.append, command="veca v"
    )
    page = made.page.read_text()
    sources = re.findall(r'<image [^>]*href="([^"]+)"', page)
    assert sources == [*(f"p-{part}.png" for part in PARTS), "numbers.png"]
    assert [path.name for path in made.pictures] == sources
    for source in sources:
        with Image.open(tmp_path / "r" / source) as picture:
            picture.verify()
    assert read_csv(tmp_path / "r" / "numbers.csv")[0].cores == 2
    assert len(made.rows) == 2 * 3 and not made.fresh
    for verdict in made.verdicts:
        assert verdict.claim in page
    assert "random weights" not in page and "These weights show" in page
    assert "<code>veca v</code>" in page
    assert "dense ViT" in page and any("numbers" in line for line in lines)


def test_a_page_of_a_view_that_merges_shows_what_merged(view, tmp_path):
    half, options = view.merging(0.4), viz.Options(sizes=[32], cores=[8])
    page = viz.report([half], tmp_path, options).page.read_text()
    assert "p-merged.png" in page and "keep 0.4" in page and (tmp_path / "p-merged.png").is_file()


@pytest.mark.slow
def test_fresh_weights_are_called_so(photo, tmp_path):
    model = create_model("tiny", depth=2, width=32, heads=2, num_cores=8)
    view = viz.View(model, photo, 32)
    made = viz.report([view, view], tmp_path, viz.Options(sizes=[32], cores=[2, 8]))
    page = made.page.read_text()
    assert made.fresh and "Fresh random weights" in page and "These are fresh" in page
    assert ">photo-2</h2>" in page and (tmp_path / "photo-2-features.png").is_file()
