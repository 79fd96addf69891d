"""Figures: panels in rows, the same picture in every format, the same bytes each time."""

from __future__ import annotations

import base64
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from veca.errors import InputError
from veca.viz.chart import chart
from veca.viz.figure import Dot, Figure, Line, Panel, Text

RED, BLUE = (255, 0, 0), (0, 0, 255)


def _panel(colour, size=(60, 40), **options):
    return Panel(Image.new("RGB", size, colour), **options)


def test_panels_stand_in_rows_beside_and_below_each_other():
    figure = Figure([[_panel(RED, title="one"), _panel(BLUE)], [_panel((0, 255, 0))]])
    picture = np.array(figure.image())
    red, blue, green = (
        np.argwhere((picture == colour).all(axis=-1)) for colour in (RED, BLUE, (0, 255, 0))
    )
    assert len(red) == len(blue) == len(green) == 60 * 40
    assert red[:, 1].max() < blue[:, 1].min() and (red[:, 0].min() == blue[:, 0].min())
    assert green[:, 0].min() > red[:, 0].max()
    # Above the titled row there is text, above the other none.
    top = red[:, 0].min()
    assert (picture[:top] < 128).any() and top > 10 + 10


def test_marks_are_drawn_where_they_are_said_to_be():
    marks = [Dot(0.75, 0.25, RED, radius=5, outline=None), Line([(0, 1), (1, 1)], BLUE, 4)]
    picture = np.array(Panel(Image.new("RGB", (200, 100), "white"), marks=marks).image()).astype(
        int
    )
    row, column = np.argwhere((picture == RED).all(axis=-1)).mean(axis=0)
    assert abs(column - 150) < 1 and abs(row - 25) < 1
    assert (picture[-1, 10:-10] == BLUE).all()


def test_text_stands_on_the_named_side_of_its_point():
    def columns(anchor):
        panel = Panel(Image.new("RGB", (100, 40), "white"), marks=[Text(0.5, 0.5, "abc", anchor)])
        return np.argwhere(np.array(panel.image()).min(axis=(0, 2)) < 128)

    assert columns("lm").min() >= 49 and columns("rm").max() <= 51
    assert abs(columns("mm").mean() - 50) < 3


def test_heat_panels_have_a_bar_with_its_values():
    plain, with_bar = (
        Figure([[_panel(RED, scale=scale)]]).image() for scale in (None, (-0.5, 0.75))
    )
    assert with_bar.height > plain.height
    svg = Figure([[_panel(RED, scale=(-0.5, 0.75))]]).svg()
    assert ">-0.50<" in svg and ">0.75<" in svg


def test_titles_wrap_to_their_panel():
    narrow = Figure([[_panel(RED, size=(50, 20), title="a title of several words")]]).image()
    wide = Figure([[_panel(RED, size=(400, 20), title="a title of several words")]]).image()
    assert narrow.width == 70 and narrow.height > wide.height


def test_svg_holds_pictures_and_vectors():
    marks = [
        Dot(0.5, 0.5, RED),
        Line([(0, 0), (1, 0.5)], BLUE),
        Text(0.1, 0.9, "a < b & c", "rb"),
    ]
    figure = Figure([[_panel((9, 9, 9), title="x > y", marks=marks)]], "what it shows")
    root = ElementTree.fromstring(figure.svg())
    space = "{http://www.w3.org/2000/svg}"
    circle = root.find(f".//{space}circle")
    assert circle is not None and (circle.get("cx"), circle.get("cy")) == ("30.00", "20.00")
    assert root.find(f".//{space}polyline").get("points") == "0.00,0.00 60.00,20.00"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts == ["x > y", "a < b & c"]
    source = root.find(f".//{space}image").get("href")
    embedded = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert embedded.size == (60, 40) and embedded.getpixel((0, 0)) == (9, 9, 9)
    assert (root.get("width"), root.get("height")) == tuple(map(str, figure.image().size))


def test_every_format_is_written_whole_and_the_same_each_time(tmp_path):
    figure = Figure([[_panel(RED, title="t")]], 'a "caption"', "name")
    for format in ("png", "svg", "html"):
        first = figure.save(tmp_path / f"a.{format}").read_bytes()
        assert figure.save(tmp_path / "other.file", format).read_bytes() == first
    with Image.open(tmp_path / "a.png") as png:
        assert np.array_equal(np.array(png), np.array(figure.image()))
    page = (tmp_path / "a.html").read_text()
    assert "a &quot;caption&quot;" in page
    embedded = re.search(r'<image [^>]*href="data:image/png;base64,([^"]+)"', page)
    assert embedded and base64.b64decode(embedded[1]) == figure.png()
    assert figure._repr_png_() == figure.png()


def test_unknown_formats_are_told(tmp_path):
    with pytest.raises(InputError, match="'pn'"):
        Figure([[_panel(RED)]]).save(tmp_path / "a.pn")
    assert list(tmp_path.iterdir()) == []


def test_charts_place_points_by_their_values():
    panel = chart({"a": [(1, 0.0), (3, 1.0)], "b": [(1, float("nan"))]}, title="t", zero=True)
    line = next(m for m in panel.marks if isinstance(m, Line) and m.width == 2)
    (x0, y0), (x1, y1) = line.points
    assert x0 < x1 and y0 > y1  # larger values stand higher
    labels = [m.text for m in panel.marks if isinstance(m, Text)]
    assert {"0.00", "1.00", "1", "3", "a", "b"} <= set(labels)
    assert panel.image().size == panel.picture.size


@pytest.mark.parametrize("values", [[0.5, 0.5], [0.0], [1e-9, 2e-9], [-3, 1e6], [float("nan")]])
def test_charts_of_any_range_are_drawn(values):
    panel = chart({"a": list(enumerate(values))})
    for mark in panel.marks:
        points = mark.points if isinstance(mark, Line) else [(mark.x, mark.y)]
        assert all(-0.01 <= value <= 1.01 for point in points for value in point)
