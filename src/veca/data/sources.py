"""Where encoded images come from: folders, lists of files, tar shards, and several of these."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from veca._util.files import check_regular, open_file
from veca.data.index import SHARD, digest, folder_index
from veca.data.names import Names
from veca.data.shards import ShardSource
from veca.errors import DataError
from veca.images import check_name, extensions
from veca.images.find import natural_key, no_images

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_MOST_BRACES = 1_000_000
_LONGEST_NAME = 4096  # characters that a message shows
_LOOKED_AT = 16


@runtime_checkable
class ImageSource(Protocol):
    """A set of encoded images with a fixed order."""

    def __len__(self) -> int:
        """How many images."""

    def read(self, index: int) -> bytes:
        """The encoded bytes of one; OSError if they cannot be had."""

    def name(self, index: int) -> str:
        """What to call it in a message: a path, or shard and member."""

    def fingerprint(self) -> str:
        """A hash that tells this set (names, order and, where known, sizes) from others."""


Spec: TypeAlias = "str | os.PathLike[str] | ImageSource | Sequence[Spec]"


class FolderSource:
    """The images below a folder, at any depth; see `folder_index` for their order."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        cache_dir: Path | None = None,
        natural: bool = False,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._index = folder_index(self.folder, cache=cache_dir, natural=natural)

    def __len__(self) -> int:
        return len(self._index.names)

    def read(self, index: int) -> bytes:
        return _read(self.name(index))

    def name(self, index: int) -> str:
        return str(self.folder / self._index.names[index])

    def fingerprint(self) -> str:
        """Depends on the paths below the folder and the sizes of the files; not on its place."""
        names = self._index.names
        total = hashlib.sha256(names.text.tobytes())
        for array in (names.ends, self._index.sizes):
            total.update(array.tobytes())
        return total.hexdigest()[:32]

    @property
    def passed_over(self) -> Counter[str]:
        """How many files beside the images have another suffix, by suffix."""
        return Counter(self._index.passed_over)


class ListSource:
    """Image files in the order of a list."""

    def __init__(self, paths: Sequence[str], *, folder: Path | None = None) -> None:
        self.folder = (folder or Path()).absolute()
        self._names = Names.of(paths)
        self.passed_over: Counter[str] = Counter()
        """How many files beside the images matched the pattern, by suffix."""
        if not len(self):
            raise DataError("an empty list of images; expected at least one path.")

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int) -> bytes:
        return _read(self.name(index))

    def name(self, index: int) -> str:
        return str(self.folder / self._names[index])  # an absolute path replaces the folder

    def fingerprint(self) -> str:
        """Depends on the paths as they are written in the list."""
        total = hashlib.sha256(self._names.text.tobytes())
        total.update(self._names.ends.tobytes())
        return total.hexdigest()[:32]


class JoinedSource:
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        self.sources = list(sources)
        self._ends = np.cumsum([len(source) for source in self.sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> bytes:
        source, place = self.locate(index)
        return source.read(place)

    def name(self, index: int) -> str:
        source, place = self.locate(index)
        return source.name(place)

    def fingerprint(self) -> str:
        return digest(*(source.fingerprint() for source in self.sources))

    @property
    def passed_over(self) -> Counter[str]:
        """How many files beside the images of its folders have another suffix, by suffix."""
        total: Counter[str] = Counter()
        for source in self.sources:
            total.update(getattr(source, "passed_over", {}))
        return total

    def locate(self, index: int) -> tuple[ImageSource, int]:
        """The source that an image belongs to, and its place there."""
        index = range(len(self))[index]
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[part], index - (int(self._ends[part - 1]) if part else 0)


def open_source(
    spec: Spec, *, cache_dir: str | os.PathLike[str] | None = None, natural: bool = False
) -> ImageSource:
    """Find the images that `spec` means.

    Args:
        spec: a folder of images at any depth (or, where it holds none, of `.tar` shards); a `.txt`
            file with one path per line, absolute or relative to that file (blank lines and lines
            that begin with # are passed over); a `.tar` shard; an image; a pattern such as
            "shards/train-*.tar", "photos/**/*.jpg" or "train-{000..127}.tar"; a sequence of any of
            these, read one after the other; or a source, returned as it is.
        cache_dir: where the indexes of folders and shards are kept; default $VECA_CACHE, or
            ~/.cache/veca. Nothing is ever written beside the images.
        natural: the order and the links of `veca.images.find_images`: img2.png before img10.png,
            links to folders passed over, a file that is named is an image, whatever its suffix, and
            a pattern that matches images and shards means the images, as a folder does. Else the
            order of the paths, links to folders followed: what training draws from.

    Raises:
        DataError: nothing is there, it holds no images, or it cannot be read.
    """
    cache = None if cache_dir is None else Path(cache_dir)
    if isinstance(spec, (str, os.PathLike)):
        return _open(os.fspath(spec), cache, natural)
    if isinstance(spec, Sequence):
        if not spec:
            raise DataError("no images given; expected a folder, a list of files or tar shards.")
        return _open_several(spec, cache, natural)
    if isinstance(spec, ImageSource):
        return spec
    raise DataError(
        f"cannot read images from {type(spec).__name__}; expected a folder, a .txt list, .tar "
        f"shards, a pattern, or a sequence of these."
    )


def _open_several(spec: Sequence[Spec], cache: Path | None, natural: bool) -> ImageSource:
    """One after the other.

    A file that is named and missing is no error as long as there is any image beside it: reading
    it will report it. (Training allows it only among files.) All else that is missing is an error.
    """
    files = [_file_name(part, natural) for part in spec]
    names = [name for name in files if name is not None]
    if len(names) == len(files):  # not one source a file
        return _listed(names, Path(), "the list", look_at=len(names) if natural else _LOOKED_AT)
    parts = [
        open_source(part, cache_dir=cache, natural=natural)
        if name is None or not natural
        else ListSource([name])
        for part, name in zip(spec, files, strict=True)
    ]
    return parts[0] if len(parts) == 1 else JoinedSource(parts)


def _file_name(spec: Spec, natural: bool) -> str | None:
    """The path of an image, be it there or not; None for everything else."""
    if not isinstance(spec, (str, os.PathLike)):
        return None
    check_name(spec, DataError)
    name = os.path.expanduser(os.fspath(spec))  # noqa: PTH111
    if not _is_image(name) or _has_wildcard(name) or "{" in name:
        return None
    # Training does not ask, as in 0.1: it has lists of millions, perhaps on a network drive.
    return None if natural and Path(name).is_dir() else name


def _open(name: str, cache: Path | None, natural: bool) -> ImageSource:
    if not name:
        raise DataError("an empty path names no images; expected a folder, a list or tar shards.")
    check_name(name, DataError)
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_folder(path, cache, natural)
    if name.lower().endswith(_COMPRESSED):
        raise DataError(f"{name}: compressed shards cannot be read in any order; unpack it first.")
    # Before patterns: a file may be called "scan[1].tar".
    if path.exists() or (natural and path.is_symlink()):
        suffix = path.suffix.lower()
        if suffix == SHARD:
            return ShardSource([path], cache=cache)
        if suffix == ".txt":
            return _open_list(path)
        if natural:
            return ListSource([str(path)])
        if _is_image(name):
            return _listed([os.path.expanduser(name)], Path(), name)  # noqa: PTH111
        raise DataError(
            f"{name}: a file of this kind holds no images that can be read here; expected a "
            f"folder, a .txt list, a .tar shard or an image ({' '.join(sorted(extensions()))})."
        )
    expanded = _expand(str(path), natural)
    if expanded is None:
        raise DataError(f"{name}: no such file or folder; check the path.")
    shards = [Path(found) for found in expanded if found.lower().endswith(SHARD)]
    images = [found for found in expanded if _is_image(found)]
    if shards and not (natural and images):
        return ShardSource(shards, cache=cache)
    if images:
        source = _listed(images, Path(), name)
        suffixes = (Path(found).suffix.lower() for found in expanded if not _is_image(found))
        source.passed_over.update(suffixes)
        return source
    raise DataError(f"{name}: no image and no .tar shard matches this pattern; check it.")


def _open_folder(folder: Path, cache: Path | None, natural: bool) -> ImageSource:
    source = FolderSource(folder, cache_dir=cache, natural=natural)
    if not len(source):
        fault = "no image and no .tar shard in this folder or below"
        raise DataError(f"{folder}: {no_images(fault, source.passed_over)}.")
    if source.name(0).lower().endswith(SHARD):
        return ShardSource([Path(source.name(i)) for i in range(len(source))], cache=cache)
    return source


def _open_list(path: Path) -> ListSource:
    try:
        check_regular(path)
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(f"{path}: the list cannot be read ({reason}); check the file.") from error
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if any("\0" in name for name in names):
        raise DataError(f"{path}: the list cannot be read (it holds a NUL character).")
    for name in names if any("://" in name for name in names) else ():
        check_name(name, DataError)
    if not names:
        raise DataError(f"{path}: the list names no images; expected one path per line.")
    return _listed(names, path.absolute().parent, str(path))


def _listed(names: list[str], folder: Path, what: str, *, look_at: int = _LOOKED_AT) -> ListSource:
    source = ListSource(names, folder=folder)
    # Asking for every file takes minutes on a network drive; one that is missing is skipped and
    # counted later. A list read from the wrong place, though, should be known at once.
    looked_at = np.unique(np.linspace(0, len(source) - 1, look_at).astype(int))
    if not any(_exists(source.name(int(i))) for i in looked_at):
        first = source.name(0)
        first = first if len(first) <= _LONGEST_NAME else f"{first[:_LONGEST_NAME]}..."
        fault = f"none of the {len(looked_at)} files looked at exists, such as {first}"
        if len(source) == 1:
            fault = f"there is no file {first}"
        raise DataError(f"{what}: {fault}; paths are taken relative to {source.folder}.")
    return source


def _exists(name: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # too long, or what no file can be called
        return Path(name).exists()
    return False


def _read(name: str) -> bytes:
    with open_file(Path(name)) as file:
        return file.read()


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in extensions()


# --------------------------------------------------------------------------------------- patterns


def _expand(pattern: str, natural: bool) -> list[str] | None:
    """Files that a pattern with {a,b}, {00..12}, *, ? or [] stands for; None if it is no pattern.

    Names without a wildcard are kept even if they do not exist: a missing shard must be an error.
    """
    names = _braces(pattern)
    if names == [pattern] and not _has_wildcard(pattern):
        return None
    found: list[str] = []
    for name in names:
        if _has_wildcard(name):
            if natural:
                found += sorted(_match(name), key=natural_key)
            else:
                found += sorted(glob.glob(name, recursive=True))  # noqa: PTH207
        else:
            found.append(name)
    return list(dict.fromkeys(found))


def _match(pattern: str) -> list[str]:
    """Files that match; through no link to a folder, unless the pattern has its name."""
    *parts, last = Path(pattern).parts
    if last == "**":
        parts, last = [*parts, last], "*"
    folders = [""]
    for part in parts:
        folders = [folder for above in folders for folder in _match_folders(above, part)]
    matches = (match for folder in folders for match in _match_names(folder, last))
    return [str(Path(match)) for match in matches if not Path(match).is_dir()]


def _match_folders(above: str, part: str) -> list[str]:
    if part == "**":
        found = []
        for folder, below, _ in os.walk(above or os.curdir):
            below[:] = [name for name in below if not name.startswith(".")]
            found.append(folder)
        return found
    if not _has_wildcard(part):
        return [os.path.join(above, part)]  # noqa: PTH118
    return [found for found in _match_names(above, part) if not Path(found).is_symlink()]


def _match_names(folder: str, part: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), part))  # noqa: PTH118, PTH207


def _has_wildcard(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _braces(pattern: str) -> list[str]:
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if numbers:
        low, high = int(numbers[1]), int(numbers[2])
        if not low <= high < low + _MOST_BRACES:
            raise DataError(f"{pattern}: {{{match[1]}}} is no rising range of numbers.")
        options = [str(i).zfill(len(numbers[1])) for i in range(low, high + 1)]
    elif "," in match[1]:
        options = match[1].split(",")
    else:
        return [pattern]
    ends = _braces(pattern[match.end() :])
    return [pattern[: match.start()] + option + end for option in options for end in ends]
