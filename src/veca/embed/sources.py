"""Which images are meant, and in which order: the same for `veca features` and `veca embed`.

A source is an image file, a folder with its subfolders, a `.txt` list, a `.tar` shard, a pattern,
or several of these. Images come in the order of the sources; those of a folder or a pattern in
natural order (img2.png before img10.png, folder by folder). Links to files are images; links to
folders are not followed. Names that begin with a dot are passed over.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from veca.data.decode import NamedBytes
from veca.data.sources import FolderSource, ImageSource, JoinedSource, ListSource, open_source
from veca.errors import DataError, SourceError

Source: TypeAlias = "str | os.PathLike[str]"
Sources: TypeAlias = "Source | ImageSource | Iterable[Source | ImageSource]"


def open_images(sources: Sources) -> ImageSource:
    """Find the images; `veca.data.open_source` says what a source can be.

    Raises:
        SourceError: a source is missing, holds no images or cannot be read.
    """
    try:
        if isinstance(sources, (str, os.PathLike, ImageSource)):
            return open_source(sources, natural=True)
        parts = list(sources)
        return open_source(parts[0] if len(parts) == 1 else parts, natural=True)
    except DataError as error:
        raise SourceError(str(error)) from error


def to_read(source: ImageSource, index: int) -> Path | io.BytesIO:
    """An image as `veca.preprocess` takes it: a path, or bytes that know their name."""
    if isinstance(source, JoinedSource):
        return to_read(*source.locate(index))
    name = source.name(index)
    if isinstance(source, (FolderSource, ListSource)):
        return Path(name)
    return NamedBytes(source.read(index), name)


def state_of(path: Path) -> tuple[int, int]:
    """(bytes, modification time in ns) of an image's file; a member of a shard has the shard's."""
    for place in (path, *path.parents):
        try:
            state = place.stat()
        except NotADirectoryError:
            continue
        return state.st_size, state.st_mtime_ns
    raise FileNotFoundError(path)
