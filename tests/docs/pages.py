"""Runs the code blocks of a page of the documents, in order, as its reader would.

    python tests/docs/pages.py docs/quickstart.md    # in a folder made for it

    # As a new user: in a clone, with the veca and the pip on the PATH.
    python tests/docs/pages.py docs/quickstart.md --folder CLONE --as-is

Blocks marked `python` share one namespace, blocks marked `bash` run under `set -eu`, all in one
folder. It holds what a clone has at hand (`examples`, `src`) and what pages call the
reader's own: `photo.jpg`, `photos/`. A block marked `text` is the output of the block above it and
has to be found there; `...` stands for anything. A block is left out only behind a comment that
says why:

    <!-- not run: needs gated weights -->

`pip install` of an extra checks that what the extra brings is there; where it is not, the page is
skipped (exit code 77). Only the standard library is used, so that it runs in any environment.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import linecache
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUNNABLE = ("python", "bash")
SKIPPED = 77
_FENCE = re.compile(r"^(`{3,})\s*(\S*)\s*$")
_MARKER = re.compile(r"^<!-- not run: (.+) -->$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    """Of its first line of code, from 1."""
    language: str
    code: str
    not_run: str | None
    """Why it is left out."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page whose blocks are run. `docs/reference` comes from docstrings."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/README.md"]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, from top to bottom."""
    found, start, fence, marker = [], 0, "", None
    lines = page.read_text(encoding="utf-8").splitlines()
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    for number, line in enumerate(lines, start=1):
        match = _FENCE.match(line)
        if not fence:
            if match:
                fence, language, start = match[1], match[2], number + 1
            elif line.strip():
                comment = _MARKER.match(line.strip())
                marker = comment[1] if comment else None
        elif match and match[1] == fence and not match[2]:
            code = "\n".join(lines[start - 1 : number - 1]) + "\n"
            found.append(Block(name, start, language, code, marker))
            fence, marker = "", None
    if fence:
        raise ValueError(f"{name}:{start - 1}: the block is never closed")
    return found


def prepare(folder: Path) -> None:
    """What a reader has at hand: the clone, and photos."""
    for name in ("benchmarks", "examples", "src"):
        if not (folder / name).exists():  # the folder may be a clone itself
            (folder / name).symlink_to(ROOT / name)
    photos = ROOT / "src" / "veca" / "assets" / "photos"
    (folder / "photos").mkdir(exist_ok=True)
    for photo in photos.glob("*.jpg"):
        shutil.copy(photo, folder / "photos")
    shutil.copy(photos / "chelsea.jpg", folder / "photo.jpg")


def run_page(page: Path, folder: Path, env: dict[str, str], *, quiet: bool = False) -> int:
    """Run the blocks of a page in `folder`; 0, 77 where an extra is missing, or 1 with why."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(page):
        if block.not_run:
            printed = "..."
            continue
        begin = time.perf_counter()
        if block.language == "python":
            code, printed = _run_python(block, namespace)
        elif block.language == "bash":
            code, printed = _run_bash(block, folder, env)
        else:
            if block.language == "text" and not _matches(block.code, printed):
                print(f"{block.place}: this is not what came out:\n{printed}")
                return 1
            continue
        if code:
            print(f"{block.place}: failed ({code})\n{block.code}\n{printed}")
            return SKIPPED if code == SKIPPED else 1
        if not quiet:
            print(f"{block.place}: {block.language}, {time.perf_counter() - begin:.1f} s")
    return 0


def _run_python(block: Block, namespace: dict[str, Any]) -> tuple[int, str]:
    # Blank lines before it, so that a traceback names the lines of the page.
    source = "\n" * (block.line - 1) + block.code
    linecache.cache[block.place] = (len(source), None, source.splitlines(True), block.place)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            exec(compile(source, block.place, "exec"), namespace)
        except Exception:
            out.write(traceback.format_exc())
            return 1, out.getvalue()
    return 0, out.getvalue()


def _run_bash(block: Block, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def _matches(wanted: str, printed: str) -> bool:
    """Whether `wanted` is in what was printed; "..." stands for anything, blanks count as one."""
    parts = [re.escape(" ".join(part.split())) for part in wanted.split("...")]
    return re.search(r"\s*.*?\s*".join(parts), " ".join(printed.split())) is not None


def environment(folder: Path, *, as_is: bool) -> dict[str, str]:
    """The reader's environment; unless `as_is`, `veca`, `python` and `pip` are this Python's."""
    env = {**os.environ, "COLUMNS": "200", "VECA_CACHE": str(folder / ".cache")}
    if as_is:
        return env
    commands = folder / ".bin"
    commands.mkdir()
    this = shlex.quote(sys.executable)
    for name, command in (
        ("python", this),
        ("veca", f"{this} -m veca"),
        ("pip", f"{this} {shlex.quote(__file__)} --pip"),
    ):
        (commands / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (commands / name).chmod(0o755)
    env["PATH"] = f"{commands}{os.pathsep}{env['PATH']}"
    return env


def pip(arguments: list[str]) -> int:
    """What `pip install` of this package would have to bring; 77 where it is not installed."""
    wanted = [word for word in arguments if re.match(r"(veca|\.)(\[|$)", word)]
    if arguments[:1] != ["install"] or not wanted:
        print(f"a page may only install this package, got: pip {shlex.join(arguments)}")
        return 1
    missing = sorted({name for word in wanted for name in _missing(word)})
    if missing:
        print(f"not installed: {', '.join(missing)}")
    return SKIPPED if missing else 0


def _missing(word: str) -> Iterator[str]:
    """Distributions of the extras named in "veca[a,b]" that are not here."""
    extras = optional_dependencies()
    for extra in re.findall(r"[\w-]+", word.partition("[")[2]):
        if extra not in extras:
            raise SystemExit(f"{word!r} names an extra that pyproject.toml does not have")
        for requirement in extras[extra]:
            name, own = re.match(r"([\w.-]+)(\[.*\])?", requirement).groups()
            if name == "veca":
                yield from _missing(f"veca{own}")
                continue
            try:
                importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                yield name


def optional_dependencies() -> dict[str, list[str]]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["optional-dependencies"]


def main() -> int:
    if sys.argv[1:2] == ["--pip"]:
        return pip(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--folder", type=Path, help="a folder to work in")
    parser.add_argument("--as-is", action="store_true", help="veca and pip as on the PATH")
    args = parser.parse_args()
    page = args.page.resolve()
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder.resolve()
        prepare(folder)
        env = environment(folder, as_is=args.as_is)
        os.environ.update(env)
        os.chdir(folder)
        try:
            return run_page(page, folder, env)
        finally:
            os.chdir(ROOT)


if __name__ == "__main__":
    sys.exit(main())
