"""Figures: rows of labelled panels, as PNG, SVG or HTML. Pillow draws all of it.

A panel is a picture with marks on it (lines, dots, text) and a title above. Marks stay vectors
in SVG. The same figure gives the same bytes each time.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from veca._util.files import atomic_write
from veca._util.html import Box, Page, Part, data_uri
from veca.errors import check_choice
from veca.viz.colour import RGB, heat_bar

FORMATS = ("png", "svg", "html")
"""What a figure can be saved as."""
_GAP = 10
_LINE = 17
_FONT = 13
_BAR = 8
_SMOOTH = 3  # marks are drawn this many times larger, then scaled down


@dataclass(frozen=True)
class Line:
    """A line through points (x, y), each in 0..1 of the panel, y down; width in pixels."""

    points: Sequence[tuple[float, float]]
    colour: RGB
    width: float = 1.5


@dataclass(frozen=True)
class Dot:
    """A disc around (x, y) in 0..1 of the panel; radius in pixels."""

    x: float
    y: float
    colour: RGB
    radius: float = 4.0
    outline: RGB | None = (0, 0, 0)


@dataclass(frozen=True)
class Text:
    """A short text at (x, y) in 0..1 of the panel.

    `anchor` says which point of the text that is: l, m or r (left, middle, right), then t, m or b
    (top, middle, bottom).
    """

    x: float
    y: float
    text: str
    anchor: str = "lm"
    colour: RGB = (40, 40, 40)
    size: int = 12


Mark = Line | Dot | Text


@dataclass(frozen=True)
class Panel:
    """A picture, what is drawn on it, and a title."""

    picture: Image.Image
    title: str = ""
    marks: Sequence[Mark] = ()
    scale: tuple[float, float] | None = None
    """For heat: the values of the darkest and the brightest colour, drawn as a bar below."""

    def image(self) -> Image.Image:
        """The picture with its marks, without title and bar."""
        picture = self.picture.convert("RGB")
        width, height = picture.size
        shapes = [mark for mark in self.marks if not isinstance(mark, Text)]
        if shapes:
            layer = Image.new("RGBA", (width * _SMOOTH, height * _SMOOTH), (0, 0, 0, 0))
            draw = ImageDraw.Draw(layer)
            for shape in shapes:
                _draw_shape(draw, shape, layer.size)
            smooth = layer.resize(picture.size, Image.Resampling.BOX)
            picture.paste(smooth, (0, 0), smooth)
        draw = ImageDraw.Draw(picture)
        for mark in self.marks:
            if isinstance(mark, Text):
                place = (mark.x * width, mark.y * height)
                draw.text(
                    place,
                    mark.text,
                    fill=mark.colour,
                    font=_font(mark.size),
                    anchor=_PILLOW_ANCHOR[mark.anchor[1]].replace("?", mark.anchor[0]),
                )
        return picture


@dataclass(frozen=True)
class Figure:
    """Rows of panels, and what they show in a sentence or two."""

    rows: Sequence[Sequence[Panel]]
    caption: str = ""
    name: str = "figure"
    arrays: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The numbers behind the pictures, by name."""
    charts: bool = False
    """The panels are charts: ink on white, each of which can stand alone."""

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row]

    def image(self) -> Image.Image:
        """The whole figure as one RGB picture."""
        places, size = _layout(self.rows)
        canvas = Image.new("RGB", size, "white")
        draw = ImageDraw.Draw(canvas)
        for place in places:
            panel = place.panel
            for i, line in enumerate(place.title):
                draw.text(
                    (place.x, place.title_y + i * _LINE), line, fill="black", font=_font(_FONT)
                )
            canvas.paste(panel.image(), (place.x, place.y))
            if panel.scale:
                width, height = panel.picture.size
                top = place.y + height + 4
                canvas.paste(heat_bar(width, _BAR), (place.x, top))
                low, high = (_number(value) for value in panel.scale)
                draw.text((place.x, top + _BAR + 1), low, fill="black", font=_font(11))
                draw.text(
                    (place.x + width, top + _BAR + 1),
                    high,
                    fill="black",
                    font=_font(11),
                    anchor="ra",
                )
        return canvas

    def png(self) -> bytes:
        return _png(self.image())

    def svg(self) -> str:
        """The figure as one self-contained SVG; photos and maps are embedded as PNG."""
        places, (width, height) = _layout(self.rows)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">',
            f"<title>{escape(self.caption or self.name)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]
        for place in places:
            panel = place.panel
            for i, line in enumerate(place.title):
                y = place.title_y + i * _LINE + _FONT
                parts.append(
                    f'<text x="{place.x}" y="{y}" font-size="{_FONT}">{escape(line)}</text>'
                )
            w, h = panel.picture.size
            parts.append(_svg_image(panel.picture.convert("RGB"), place.x, place.y))
            # Marks may run over the edge of a panel; they are cut there, as in the PNG.
            parts.append(f'<svg x="{place.x}" y="{place.y}" width="{w}" height="{h}">')
            parts += [_svg_mark(mark, w, h) for mark in panel.marks]
            parts.append("</svg>")
            if panel.scale:
                top = place.y + h + 4
                parts.append(_svg_image(heat_bar(w, _BAR), place.x, top))
                low, high = (_number(value) for value in panel.scale)
                y = top + _BAR + 12
                parts.append(f'<text x="{place.x}" y="{y}" font-size="11">{low}</text>')
                parts.append(
                    f'<text x="{place.x + w}" y="{y}" font-size="11" text-anchor="end">{high}'
                    "</text>"
                )
        parts.append("</svg>\n")
        return "\n".join(parts)

    def add_to(self, page: Page, source: str = "") -> None:
        """Show it on a page, panel by panel, with its caption.

        Args:
            source: the address of its PNG; by default the picture goes into the page.
        """
        places, size = _layout(self.rows)
        found = iter(places)
        rows = [[_part(next(found)) for _ in row] for row in self.rows]
        source = source or data_uri(self.png())
        page.panels(source, size, rows, self.caption, charts=self.charts)

    def save(self, path: str | Path, format: str | None = None, *, command: str = "") -> Path:
        """Write the figure, all or nothing.

        `format` is png, svg or html; by default what the file's suffix says. The HTML is one
        self-contained page, with `command`, what made it, at its foot.
        """
        target = Path(path)
        kind = check_format(format if format is not None else target.suffix.lstrip(".").lower())
        if kind == "html":
            page = Page(self.name)
            self.add_to(page)
            page.made_by(command)
            return page.write(target)
        content = self.png() if kind == "png" else self.svg().encode()
        with atomic_write(target) as file:
            file.write(content)
        return target

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return self.png()


def check_format(format: str) -> str:
    check_choice("format of a figure", format, FORMATS)
    return format


@dataclass(frozen=True)
class _Place:
    panel: Panel
    x: int
    y: int
    title_y: int
    title: list[str]


def _layout(rows: Sequence[Sequence[Panel]]) -> tuple[list[_Place], tuple[int, int]]:
    """Where each panel goes, and the size of the figure; titles wrap to their panel's width."""
    places: list[_Place] = []
    top, widest = _GAP, 0
    for row in rows:
        titles = [_wrap(panel.title, panel.picture.width) for panel in row]
        text = max((len(lines) for lines in titles), default=0) * _LINE
        x = _GAP
        for panel, lines in zip(row, titles, strict=True):
            places.append(_Place(panel, x, top + text, top, lines))
            x += panel.picture.width + _GAP
        below = max(
            (panel.picture.height + (_BAR + 18 if panel.scale else 0) for panel in row), default=0
        )
        top += text + below + _GAP
        widest = max(widest, x)
    return places, (widest, top)


def _part(place: _Place) -> Part:
    """Where a panel and its bar are in the picture of the whole figure."""
    panel, x, y = place.panel, place.x, place.y
    width, height = panel.picture.size
    box = Box(x, y, width, height)
    if not panel.scale:
        return Part(panel.title, box)
    low, high = panel.scale
    bar = Box(x, y + height + 4, width, _BAR)
    return Part(panel.title, box, bar, (_number(low), _number(high)))


def _wrap(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and _font(_FONT).getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _font(size: int) -> Any:
    return ImageFont.load_default(size=size)


def _number(value: float) -> str:
    """A value of a scale: fixed digits where they suffice, so that 0.5 and 1 read alike."""
    return f"{value:.2f}" if 0.01 <= abs(value) < 1000 or value == 0 else f"{value:.2g}"


_PILLOW_ANCHOR = {"t": "?a", "m": "?m", "b": "?d"}
_SVG_ANCHOR = {"l": "start", "m": "middle", "r": "end"}
_SVG_BASELINE = {"t": "0.8em", "m": "0.35em", "b": "-0.2em"}


def _draw_shape(draw: ImageDraw.ImageDraw, shape: Line | Dot, size: tuple[int, int]) -> None:
    width, height = size
    if isinstance(shape, Line):
        points = [(x * width, y * height) for x, y in shape.points]
        thick = max(1, round(shape.width * _SMOOTH))
        draw.line(points, fill=(*shape.colour, 255), width=thick, joint="curve")
        return
    x, y, r = shape.x * width, shape.y * height, shape.radius * _SMOOTH
    outline = None if shape.outline is None else (*shape.outline, 255)
    draw.ellipse(
        (x - r, y - r, x + r, y + r), fill=(*shape.colour, 255), outline=outline, width=_SMOOTH
    )


def _svg_image(picture: Image.Image, x: int, y: int) -> str:
    return (
        f'<image x="{x}" y="{y}" width="{picture.width}" height="{picture.height}" '
        f'href="{data_uri(_png(picture))}"/>'
    )


def _svg_mark(mark: Mark, width: int, height: int) -> str:
    if isinstance(mark, Line):
        points = " ".join(f"{x * width:.2f},{y * height:.2f}" for x, y in mark.points)
        return (
            f'<polyline points="{points}" fill="none" stroke="{_hex(mark.colour)}" '
            f'stroke-width="{mark.width:g}" stroke-linejoin="round"/>'
        )
    x, y = f"{mark.x * width:.2f}", f"{mark.y * height:.2f}"
    if isinstance(mark, Dot):
        stroke = "" if mark.outline is None else f' stroke="{_hex(mark.outline)}"'
        return f'<circle cx="{x}" cy="{y}" r="{mark.radius:g}" fill="{_hex(mark.colour)}"{stroke}/>'
    return (
        f'<text x="{x}" y="{y}" dy="{_SVG_BASELINE[mark.anchor[1]]}" font-size="{mark.size}" '
        f'text-anchor="{_SVG_ANCHOR[mark.anchor[0]]}" fill="{_hex(mark.colour)}">'
        f"{escape(mark.text)}</text>"
    )


def _hex(colour: RGB) -> str:
    return "#" + "".join(f"{channel:02x}" for channel in colour)


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()
