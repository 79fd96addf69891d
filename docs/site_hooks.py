"""What the site needs beyond its plugins: links to files beside the pages, and the commands."""

from __future__ import annotations

import re
from typing import Any

_REPOSITORY_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)\)")
_COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Files of the repository are not part of the site: name them instead of linking."""
    if page.file.src_uri.startswith("reference/"):
        return markdown.replace(_COMMANDS, _commands()) if _COMMANDS in markdown else markdown
    return _REPOSITORY_LINK.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return text if text.strip("`") == path else f"{text} (`{path}` in the repository)"


def _commands() -> str:
    """The help of every command, as Typer writes it."""
    import typer
    from typer.cli import get_docs_for_click

    from veca.cli.main import app

    group = typer.main.get_command(app)
    context = type(group).context_class(group, info_name="veca")
    text: str = get_docs_for_click(obj=group, ctx=context, name="veca")
    return re.sub(r"^# `veca`\n+", "", text)
