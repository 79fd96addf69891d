"""An HTML page: text, tables and pictures under one look, readable on a phone and in the dark.

Style and script are in the file, and the page's own policy forbids it to fetch anything from
elsewhere; pictures are in it too, or lie beside it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from veca._util.files import atomic_write_text
from veca.version import __version__

_ASSETS = Path(__file__).parent.parent / "assets" / "page"
_POLICY = (
    "default-src 'none'; img-src 'self' data: file:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'"
)
_LIGHTBOX = """
<dialog class="lightbox" aria-label="Enlarged picture">
<div class="bar"><p class="title"></p><span class="count"></span>
<button type="button" class="previous" aria-label="Previous picture">←</button>
<button type="button" class="next" aria-label="Next picture">→</button>
<button type="button" class="close" aria-label="Close">✕</button></div>
<div class="stage"></div><p class="caption"></p>
</dialog>
"""
_FEWEST_LISTED = 3  # headings that make a contents list worth its place
_NUMBER = re.compile(r"[-+±]?\d[\d,.]*(x\d+)?( ?%)?( ±[\d,.]+)?")


class Box(NamedTuple):
    """A part of a picture, in its pixels."""

    x: int
    y: int
    width: int
    height: int


class Part(NamedTuple):
    """A part of a picture that the page shows by itself."""

    title: str
    box: Box
    bar: Box | None = None
    """Where the scale of its colours is, if it has one."""
    ends: tuple[str, str] = ("", "")
    """What stands at the ends of the scale."""


class Card(NamedTuple):
    """A small picture in a grid, with a value."""

    picture: str | None
    """An address; None where the picture is gone."""
    name: str
    place: str = ""
    """Where it is from, in small below the name."""
    link: str = ""
    """The address of the original."""
    value: str = ""
    what: str = ""
    """What stands beside the value."""
    share: float | None = None
    """The value on a meter, 0..1."""


def data_uri(content: bytes, kind: str = "png") -> str:
    """A picture as an address that carries it."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text; columns of numbers are marked by the class `number`."""
    columns = zip(*rows, strict=True) if rows else [[] for _ in header]
    kinds = [
        ' class="number"' if any(column) and all(_is_number(c) for c in column if c) else ""
        for column in columns
    ]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{line('th', header)}</tr></thead><tbody>{body}</tbody></table>"


class Page:
    """Collects the parts of a page; `write` puts them into one file.

    In running text a pair of backticks makes code.
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self.title = title
        self._header = [f"<h1>{escape(title)}</h1>"]
        if lead:
            self._header.append(f'<p class="lead">{_inline(lead)}</p>')
        self._parts: list[str] = []
        self._headings: list[tuple[int, str, str]] = []
        self._pictures = 0
        self._command = ""

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """The numbers to take away, with what each is; under the title."""
        items = "".join(
            f"<li><strong>{escape(value)}</strong>{escape(what)}</li>" for value, what in facts
        )
        self._header.append(f'<ul class="facts">{items}</ul>')

    def heading(self, text: str, level: int = 2) -> None:
        """A heading of level 2 or 3; the contents list has it."""
        taken = {anchor for _, anchor, _ in self._headings}
        stem = anchor = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "part"
        number = 1
        while anchor in taken:
            number += 1
            anchor = f"{stem}-{number}"
        self._headings.append((level, anchor, text))
        self._parts.append(f'<h{level} id="{anchor}">{escape(text)}</h{level}>')

    def text(self, text: str, kind: str = "") -> None:
        """A paragraph; `kind` is "", "note" or "small"."""
        style = f' class="{kind}"' if kind else ""
        self._parts.append(f"<p{style}>{_inline(text)}</p>")

    def code(self, text: str) -> None:
        """Lines to copy."""
        self._parts.append(_code(text))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table of plain text, which scrolls inside itself where it is too wide."""
        table = html_table(header, rows)
        self._parts.append(f'<div class="table" tabindex="0">{table}</div>')

    def pictures(self, pictures: Sequence[tuple[str, str]], caption: str = "") -> None:
        """Whole pictures side by side: the address of each, and what it shows."""
        shown = "".join(
            _zoom(f'<img src="{escape(source)}" alt="{escape(text)}">', text, caption)
            for source, text in pictures
        )
        self._figure(f'<div class="plots" data-group="1">{shown}</div>', caption)

    def panels(
        self,
        source: str,
        size: tuple[int, int],
        rows: Sequence[Sequence[Part]],
        caption: str = "",
        *,
        charts: bool = False,
    ) -> None:
        """Parts of one picture in rows, each to be enlarged by itself.

        Args:
            source: the address of the picture; `size` is (width, height) in its pixels.
            charts: the parts are ink on white, and go below each other where it is narrow. Others
                keep their columns, and the rows scroll inside themselves.
        """
        self._pictures += 1
        name = f"picture-{self._pictures}"
        across = max(len(row) for row in rows)
        cells = []
        for row in rows:
            cells += [_panel(name, part, caption) for part in row]
            if not charts:
                cells += ['<div class="panel"></div>'] * (across - len(row))
        style = "panels charts ink" if charts else "panels"
        self._figure(
            '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
            f'<image id="{name}" href="{escape(source)}" width="{size[0]}" height="{size[1]}"/>'
            f'</defs></svg><div class="scroll" tabindex="0"><div class="{style}" '
            f'style="--across:{across}" data-group="{across}">{"".join(cells)}</div></div>',
            caption,
        )

    def cards(self, cards: Sequence[Card], *, large: bool = False) -> None:
        """A grid of small pictures; `large` is for one that stands alone."""
        style = "cards large" if large else "cards"
        items = "".join(_card(card) for card in cards)
        self._parts.append(f'<ul class="{style}" data-group="1">{items}</ul>')

    def made_by(self, command: str) -> None:
        """The command that made the page, for its foot."""
        self._command = command

    def write(self, path: Path) -> Path:
        style, script = ((_ASSETS / name).read_text("utf-8") for name in ("page.css", "page.js"))
        contents = self._contents()
        frame = "frame listed" if contents else "frame"
        header = '<p class="brand">VECA</p>' + "\n".join(self._header)
        made = f"<p>Made by</p>{_code(self._command)}" if self._command else ""
        body = "\n".join(self._parts)
        atomic_write_text(
            path,
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta name="color-scheme" content="light dark">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            f'<link rel="icon" href="data:,"><title>{escape(self.title)}</title>\n'
            f"<style>\n{style}</style></head>\n<body>\n"
            f'<div class="{frame}"><header>{header}</header>\n{contents}<main>\n{body}\n'
            f"<footer>{made}<p>VECA {__version__}</p></footer></main></div>"
            f"{_LIGHTBOX}<script>\n{script}</script>\n</body></html>\n",
        )
        return path

    def _figure(self, content: str, caption: str) -> None:
        below = f"<figcaption>{_inline(caption)}</figcaption>" if caption else ""
        self._parts.append(f"<figure>{content}{below}</figure>")

    def _contents(self) -> str:
        if len(self._headings) < _FEWEST_LISTED:
            return ""
        items: list[str] = []
        for level, anchor, text in self._headings:
            link = f'<a href="#{anchor}">{escape(text)}</a>'
            if level > 2 and items:
                items[-1] += f"<ul><li>{link}</li></ul>"
            else:
                items.append(link)
        listed = "".join(f"<li>{item}</li>" for item in items).replace("</ul><ul>", "")
        return (
            f'<details class="contents"><summary>On this page</summary><ul>{listed}</ul>'
            "</details>\n"
        )


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _code(text: str) -> str:
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def _is_number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell) is not None


def _zoom(picture: str, title: str, caption: str = "", full: str = "") -> str:
    data = {"title": title, "caption": caption, "full": full}
    told = "".join(f' data-{name}="{escape(value)}"' for name, value in data.items() if value)
    label = escape(f"Enlarge: {title}" if title else "Enlarge")
    return f'<button type="button" class="zoom" aria-label="{label}"{told}>{picture}</button>'


def _crop(name: str, box: Box, more: str) -> str:
    # Without its edge, where scaling would let what is beside it shine in.
    view = f"{box.x + 0.75} {box.y + 0.75} {box.width - 1.5} {box.height - 1.5}"
    return f'<svg viewBox="{view}" {more}><use href="#{name}"/></svg>'


def _panel(name: str, part: Part, caption: str) -> str:
    told = f'role="img" aria-label="{escape(part.title)}"'
    parts = [
        f"<p>{escape(part.title)}</p>",
        _zoom(_crop(name, part.box, told), part.title, caption),
    ]
    if part.bar:
        bar = _crop(name, part.bar, 'preserveAspectRatio="none" aria-hidden="true"')
        low, high = (escape(end) for end in part.ends)
        parts.append(f'<div class="scale">{bar}<span>{low}</span><span>{high}</span></div>')
    return f'<div class="panel">{"".join(parts)}</div>'


def _card(card: Card) -> str:
    name = escape(card.name)
    if card.picture is None:
        parts = ['<div class="gone">The picture is no longer there.</div>']
    else:
        picture = f'<img src="{escape(card.picture)}" alt="{name}">'
        parts = [_zoom(picture, f"{card.value}  {card.name}".strip(), full=card.link)]
    if card.value:
        what = f" <small>{escape(card.what)}</small>" if card.what else ""
        parts.append(f'<p class="value">{escape(card.value)}{what}</p>')
    if card.share is not None:
        width = f"{100 * min(max(card.share, 0.0), 1.0):.1f}%"
        parts.append(f'<div class="meter"><i style="width:{width}"></i></div>')
    named = f'<a href="{escape(card.link)}">{name}</a>' if card.link else name
    place = f'<p class="place">{escape(card.place)}</p>' if card.place else ""
    return f'<li class="card">{"".join(parts)}<p>{named}</p>{place}</li>'
