"""What the site needs beyond its plugins: links to files beside the pages, commands, checks.

A build with `--strict` fails on a broken link, wherever it comes from: a page, a docstring or the
help of a command. It fails on a public name that has no docstring or that no page shows, too.

With VECA_LIVE_DEMO=1, as published versions are built, the front page carries the network itself:
what `veca export --to web` writes, made once and kept in build/. Where npm cannot bring the
runtime, the page says how to make one instead.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

from PIL import Image

log = logging.getLogger("mkdocs.hooks.site")
_REPOSITORY_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
_COMMANDS = "<!-- commands -->"
_IMAGE = re.compile(r'<img((?=[^>]*src="[^"]*images/([\w.-]+)")[^>]*)')
_DEMO_MARK = "<!-- live demo -->"
_DEMO_FRAME = (
    '<iframe class="demo" src="demo/index.html" title="VECA in your browser" loading="lazy">'
    "</iframe>\n\n[The same on a page of its own](demo/index.html){ target=_blank }"
)
_NO_DEMO = "`veca export tiny --to web --out site` makes a page with the network in it."
_ABSENT = re.compile(r"^404\.html$")


def on_files(files: Any, *, config: Any) -> Any:
    """The live demo joins the site, if it is wanted and can be made."""
    if os.environ.get("VECA_LIVE_DEMO") != "1":
        return files
    from mkdocs.structure.files import File

    folder = _demo(Path(config["config_file_path"]).parent / "build" / "demo")
    for path in sorted(folder.rglob("*")) if folder else []:
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            files.append(File.generated(config, f"demo/{name}", abs_src_path=str(path)))
    return files


def _demo(folder: Path) -> Path | None:
    """The page with the bundled weights, made anew where the package has changed; None: no page."""
    import veca
    from veca.errors import VecaError
    from veca.export import export_web

    source = Path(veca.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in source.rglob("*") if p.is_file() and p.suffix != ".pyc"):
        digest.update(path.relative_to(source).as_posix().encode() + path.read_bytes())
    stamp = folder.with_name("demo.sha256")
    if folder.is_dir() and stamp.is_file() and stamp.read_text() == digest.hexdigest():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    try:
        export_web(veca.load("tiny"), folder, name="tiny")
    except VecaError as error:
        log.info("no live demo: %s", error)
        return None
    stamp.write_text(digest.hexdigest())
    return folder


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    """Files of the repository are not part of the site: name them instead of linking."""
    if _DEMO_MARK in markdown:
        there = files.get_file_from_path("demo/index.html") is not None
        markdown = markdown.replace(_DEMO_MARK, _DEMO_FRAME if there else _NO_DEMO)
    if page.file.src_uri.startswith("reference/"):
        return markdown.replace(_COMMANDS, _commands()) if _COMMANDS in markdown else markdown
    return _REPOSITORY_LINK.sub(_named, markdown)


def on_page_content(html: str, *, page: Any, config: Any, **_: Any) -> str:
    """Wide pictures get a class, by which they scroll on a phone."""
    folder = Path(config["docs_dir"])

    def marked(image: re.Match[str]) -> str:
        path = folder / "images" / image[2]
        if not path.is_file():  # the check of links tells
            return image[0]
        with Image.open(path) as picture:
            wide = picture.width > 2.5 * picture.height
        return f'<img class="wide"{image[1]}' if wide else image[0]

    return _IMAGE.sub(marked, html)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Warnings fail a strict build."""
    site = Path(config["site_dir"])
    for problem in [*broken_links(site), *undocumented(site)]:
        log.warning(problem)


def broken_links(site: Path) -> list[str]:
    """Links and pictures of a built site that lead nowhere inside it, with their pages."""
    pages = {path: _Page.of(path) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        if _ABSENT.match(path.relative_to(site).as_posix()):  # its links are from the root
            continue
        for link in page.links:
            address, anchor = urldefrag(link)
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = path
            if parts.path:
                target = (path.parent / unquote(parts.path)).resolve()
                target = target / "index.html" if target.is_dir() else target
            name = path.relative_to(site)
            if not target.is_relative_to(site.resolve()) and target != path:
                problems.append(f"{name}: {link} leads out of the site")
            elif not target.exists():
                problems.append(f"{name}: {link} leads nowhere")
            elif anchor and target.suffix == ".html":
                there = pages.get(site / target.relative_to(site.resolve())) if parts.path else page
                if there is not None and unquote(anchor) not in there.anchors:
                    problems.append(f"{name}: {link}: no such part")
    return problems


def undocumented(site: Path) -> list[str]:
    """Public names of the modules of the reference that are not shown there or say nothing."""
    problems = []
    pages = {path.parent.name: path for path in sorted(site.glob("reference/veca*/index.html"))}
    for module, path in pages.items():
        try:
            things = public_names(module)
        except ImportError as error:  # an optional library, which the tests tell
            log.info("%s: %s", module, error)
            continue
        anchors = _Page.of(path).anchors
        for name, thing in things.items():
            full = f"{module}.{name}"
            # A function that is named like its file has its file's name before its own.
            if full not in pages and not anchors & {full, f"{full}.{name}"}:
                problems.append(f"{full}: no page of the reference shows it")
            if (inspect.isclass(thing) or inspect.isroutine(thing)) and not inspect.getdoc(thing):
                problems.append(f"{full}: has no docstring")
    return problems


def public_names(module: str) -> dict[str, Any]:
    """What a module lists, or defines and does not call private."""
    loaded = importlib.import_module(module)
    listed = getattr(loaded, "__all__", None)
    if listed is not None:
        return {name: getattr(loaded, name) for name in listed if not name.startswith("__")}
    here = vars(loaded).items()
    return {n: v for n, v in here if n[0] != "_" and getattr(v, "__module__", "") == module}


class _Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    @classmethod
    def of(cls, path: Path) -> _Page:
        page = cls()
        page.feed(path.read_text(encoding="utf-8"))
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and not value.startswith("javascript:"):
                self.links.append(value)


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return text if text.strip("`") == path else f"{text} (`{path}` in the repository)"


def _commands() -> str:
    """The help of every command, as Typer writes it, with examples as code and a list in full."""
    import typer
    from typer.cli import get_docs_for_click

    from veca.cli.main import app

    group = typer.main.get_command(app)
    context = type(group).context_class(group, info_name="veca")
    text: str = get_docs_for_click(obj=group, ctx=context, name="veca")
    text = re.sub(r"^# `veca`\n+", "", text)
    text = re.sub(r"(?m)(?:^veca .+\n)+", lambda lines: f"```bash\n{lines[0]}```\n", text)
    for name, command in group.commands.items():
        line = f"* [`{name}`](#veca-{name}): {command.get_short_help_str(limit=200)}"
        text = re.sub(rf"(?m)^\* `{name}`: .*$", line, text, count=1)
    return text
