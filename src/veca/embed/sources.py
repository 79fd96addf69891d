"""Which images are meant, and in which order: the same for `veca features` and `veca embed`.

A source is an image file, a folder with its subfolders, a `.txt` list, a `.tar` shard, a pattern,
or several of these. Images come in the order of the sources; those of a folder or a pattern in
natural order (img2.png before img10.png, folder by folder). Links to files are images; links to
folders are not followed. Names that begin with a dot are passed over.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from PIL import Image

from veca.data.decode import NamedBytes
from veca.data.sources import FolderSource, ImageSource, JoinedSource, ListSource, open_source
from veca.errors import DataError, SourceError, VecaError
from veca.images import read_image

Source: TypeAlias = "str | os.PathLike[str]"
Sources: TypeAlias = "Source | ImageSource | Iterable[Source | ImageSource]"


def open_images(sources: Sources, *, natural: bool = True) -> ImageSource:
    """Find the images; `veca.data.open_source` says what a source can be, and `natural`.

    Raises:
        SourceError: a source is missing, holds no images or cannot be read.
    """
    try:
        if isinstance(sources, (str, os.PathLike, ImageSource)):
            return open_source(sources, natural=natural)
        parts = list(sources)
        return open_source(parts[0] if len(parts) == 1 else parts, natural=natural)
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


def drawn(photos: Sources) -> Iterator[tuple[str, Image.Image]]:
    """Photos in an order that says nothing of them but their names, with the hash of their bytes.

    What cannot be read is passed over.
    """
    source = open_images(photos)

    def rank(index: int) -> bytes:
        return hashlib.sha256(os.fsencode(Path(source.name(index)).name)).digest()

    for index in sorted(range(len(source)), key=rank):
        try:
            key = hashlib.sha256(source.read(index)).hexdigest()
            image = read_image(to_read(source, index))
        except (VecaError, OSError):
            continue
        yield key, image


def state_of(path: Path) -> tuple[int, int]:
    """(bytes, modification time in ns) of an image's file; a member of a shard has the shard's."""
    for place in (path, *path.parents):
        try:
            state = place.stat()
        except NotADirectoryError:
            continue
        return state.st_size, state.st_mtime_ns
    raise FileNotFoundError(path)
