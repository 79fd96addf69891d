"""Finding image files: of paths, folders and glob patterns, in natural order."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from veca.errors import ImageError
from veca.images.formats import advice_for, check_name, extensions


def find_images(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    recursive: bool = True,
    passed_over: Counter[str] | None = None,
) -> list[Path]:
    """List image files, each once, in the order of `sources` and in natural order within each.

    A source is a file (kept whatever its extension), a folder (its files with a suffix in
    `extensions()`; with `recursive` those of its subfolders too, symbolic links to folders not
    followed) or a glob pattern such as "photos/**/*.jpg" (its matches with such a suffix). Hidden
    files and folders are passed over. Natural order puts img2.png before img10.png. A
    broken link is listed, and reading it says so. `passed_over`, if given, counts the other files
    of folders and patterns by their suffix, in lower case.

    Raises:
        ImageError: a source does not exist or yields no image.
    """
    listed = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not listed:
        raise ImageError("no files, folders or patterns given; expected at least one")
    # absolute(), not resolve(): links with different names are different images to the user.
    others = Counter[str]() if passed_over is None else passed_over
    expanded = (path for source in listed for path in _expand(source, recursive, others))
    return list({path.absolute(): path for path in expanded}.values())


def _expand(
    source: str | os.PathLike[str], recursive: bool, passed_over: Counter[str]
) -> list[Path]:
    name, path = os.fspath(source), Path(source)
    check_name(source)
    known = extensions()
    if name and path.is_dir():  # Path("") would be the current folder
        paths = _files(path, recursive)
        fault = "no image in this folder" + (" or its subfolders" if recursive else "")
    elif name and os.path.lexists(path):  # before patterns: a file may be called "scan[1].png"
        return [path]
    elif any(wildcard in name for wildcard in "*?["):
        # Path.glob takes no absolute patterns and follows other rules for hidden files.
        matches = map(Path, glob.iglob(name, recursive=True))  # noqa: PTH207
        paths = [path for path in matches if not path.is_dir()]
        fault = "no image matches this pattern"
    else:
        raise ImageError(f"{name or repr(name)}: no such file or folder; check the path")
    # A broken link stays in: reading it reports it, leaving it out here would hide it.
    images = [path for path in paths if path.suffix.lower() in known]
    suffixes = (path.suffix.lower() for path in paths)
    others = Counter(suffix for suffix in suffixes if suffix not in known)
    if not images:
        raise ImageError(f"{name}: {no_images(fault, others)}")
    passed_over.update(others)
    return sorted(images, key=lambda path: natural_key(path.as_posix()))


def no_images(fault: str, others: Mapping[str, int]) -> str:
    """Why there is no image among some files: what was looked for, and what there is instead.

    Args:
        others: how many files there are, by their suffix.
    """
    said = f"{fault}; extensions looked for: {' '.join(sorted(extensions()))}"
    return f"{said}; found {kinds(others)}" if others else said


LOUD = 0.05
"""Files of a kind that is not read that make up more of a folder than this are no side matter."""


def large_kinds(others: Mapping[str, int], images: int) -> dict[str, int]:
    """Those kinds of files passed over, by suffix, that are a large part of all the files.

    Args:
        others: how many files are passed over, by suffix.
        images: how many images there are beside them.
    """
    total = images + sum(others.values())
    return {suffix: number for suffix, number in others.items() if number > LOUD * total}


def left_out(others: Mapping[str, int], images: int) -> str | None:
    """A sentence about `large_kinds`, if there are any."""
    total, many = images + sum(others.values()), large_kinds(others, images)
    if not many:
        return None
    share = f"{sum(many.values()):,} of {total:,} files ({sum(many.values()) / total:.0%})"
    return f"{share} are of a kind that is not read, and are left out: {kinds(many)}"


def kinds(others: Mapping[str, int], most: int = 5) -> str:
    """'300 .heic, 20 .txt', the most frequent first, and what to do about the first of them."""
    by_number = sorted(others.items(), key=lambda kind: (-kind[1], kind[0]))
    shown = [f"{number:,} {suffix or 'without a suffix'}" for suffix, number in by_number[:most]]
    rest = sum(number for _, number in by_number[most:])
    shown += [f"{rest:,} others"] if rest else []
    hint = next((hint for suffix, _ in by_number if (hint := advice_for(suffix))), None)
    return ", ".join(shown) + (f" ({hint})" if hint else "")


def _files(folder: Path, recursive: bool) -> list[Path]:
    paths: list[Path] = []
    try:
        for relative, _, entries in walk(folder):
            paths += [folder / relative / entry.name for entry in entries]
            if not recursive:
                break
    except OSError as error:
        raise ImageError(
            f"{error.filename}: the folder cannot be listed ({error.strerror}); check permissions"
        ) from error
    return paths


def walk(
    folder: Path, *, links: bool = False
) -> Iterator[tuple[str, os.stat_result, list[os.DirEntry[str]]]]:
    """Each folder from `folder` down: its path relative to that, its state, and the files in it.

    Hidden names are passed over. Links to folders are, too, or with `links` are followed, each
    real folder once. An OSError says which folder cannot be listed: none is passed over in silence.
    """
    seen: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        relative = waiting.pop()
        state = (folder / relative).stat()
        if links and (state.st_dev, state.st_ino) in seen:
            continue
        seen.add((state.st_dev, state.st_ino))
        with os.scandir(folder / relative) as entries:
            shown = sorted((e for e in entries if e.name[0] != "."), key=lambda entry: entry.name)
        files: list[os.DirEntry[str]] = []
        inner: list[os.DirEntry[str]] = []
        for entry in shown:
            (inner if _is_folder(entry) else files).append(entry)
        yield relative, state, files
        below = (entry.name for entry in inner if links or not entry.is_symlink())
        waiting += reversed([f"{relative}/{name}" if relative else name for name in below])


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def natural_key(name: str) -> tuple[list[list[str | int]], str]:
    """Compare runs of digits as numbers, folder by folder; the plain name breaks ties."""
    parts: list[list[str | int]] = [
        # split() alternates text and digits, starting with text.
        [int(run) if i % 2 else run for i, run in enumerate(re.split("([0-9]+)", part))]
        for part in name.casefold().split("/")
    ]
    return parts, name
