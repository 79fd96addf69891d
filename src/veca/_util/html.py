"""A small HTML page: text, tables and pictures in one column. No scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from veca._util.files import atomic_write_text

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem;
       color: #1c1c1c; background: #fff; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; display: block; margin: .6rem 0; }
.note { background: #fff4d6; border-left: 4px solid #e0a800; padding: .6rem 1rem; }
.small { color: #666; font-size: .85rem; }
"""


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Page:
    """Collects the parts of a page; `write` puts them into one file."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, kind: str = "") -> None:
        """A paragraph; `kind` is "", "note" or "small"."""
        style = f' class="{kind}"' if kind else ""
        self._parts.append(f"<p{style}>{escape(text)}</p>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._parts.append(html_table(header, rows))

    def picture(self, source: str, text: str) -> None:
        """A picture by its path relative to the page, and what it shows."""
        self._parts.append(f'<img src="{escape(source)}" alt="{escape(text)}">')

    def write(self, path: Path) -> Path:
        body = "\n".join(self._parts)
        atomic_write_text(
            path,
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>\n"
            f"<body>\n{body}\n</body></html>\n",
        )
        return path
