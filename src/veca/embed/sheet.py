"""Neighbours as a page: the query, and a grid of what was found."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from veca._util.html import Card, Page, data_uri
from veca.data.shards import ShardSource
from veca.embed.searching import Match
from veca.errors import VecaError
from veca.images import Source, read_image


def contact_sheet(
    path: str | os.PathLike[str],
    query: Source,
    matches: Sequence[Match],
    *,
    side: int = 320,
    command: str = "",
) -> Path:
    """An HTML page with the query and its neighbours, small pictures inside the file.

    Each name is a link to its photo, where that is a file.

    Args:
        side: the longer side of a small picture, in pixels.
        command: what made the page, for its foot.
    """
    target = Path(path).expanduser()
    above = _common_folder(matches)
    where = f", in `{above}`" if above else ""
    page = Page(
        "Nearest neighbours",
        f"{len(matches):,} image{'s' * (len(matches) != 1)} most like the query, by the cosine of "
        f"the embeddings{where}.",
    )
    page.heading("Query")
    name = Path(query).name if isinstance(query, (str, os.PathLike)) else "the query"
    link = _link(query, target) if isinstance(query, (str, os.PathLike)) else ""
    page.cards([Card(_thumbnail(read_image(query), side), name, link=link)], large=True)
    page.heading("Neighbours")
    page.cards([_card(rank, match, above, target, side) for rank, match in enumerate(matches, 1)])
    page.text(
        "The number is the cosine, 1 for the same embedding; the bar is as long. A photo is there "
        "as long as it is where it was embedded.",
        "small",
    )
    page.made_by(command)
    return page.write(target)


def read_member(path: str) -> bytes:
    """The encoded image behind the path of a row: a file, or a member of a tar shard."""
    file = Path(path)
    if not file.exists():
        for parent in file.parents:
            if parent.suffix == ".tar" and parent.is_file():
                shard = ShardSource([parent])
                places = [i for i in range(len(shard)) if shard.name(i) == path]
                if places:
                    return shard.read(places[0])
    return file.read_bytes()


def _common_folder(matches: Sequence[Match]) -> str:
    """The folder that all matches are in, or below; empty where there is none."""
    try:
        return os.path.commonpath([Path(match.path).parent for match in matches])
    except ValueError:  # no matches, or some of them on another drive
        return ""


def _card(rank: int, match: Match, above: str, page: Path, side: int) -> Card:
    try:
        picture = _thumbnail(read_image(read_member(match.path)), side)
    except (VecaError, OSError):  # moved since it was embedded
        picture = None
    file = Path(match.path)
    place = file.parent.relative_to(above) if above else file.parent
    return Card(
        picture,
        file.name,
        "" if place == Path() else str(place),
        _link(match.path, page),
        f"{match.score:.4f}",
        f"rank {rank}",
        match.score,
    )


def _link(photo: str | os.PathLike[str], page: Path) -> str:
    """The address of a photo as seen from a page, so that both may move together; empty where it is
    no file."""
    file = Path(photo)
    if not file.is_file():
        return ""
    try:
        return quote(Path(os.path.relpath(file.resolve(), page.parent.resolve())).as_posix())
    except ValueError:  # on another drive
        return file.resolve().as_uri()


def _thumbnail(image: Image.Image, side: int) -> str:
    image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return data_uri(buffer.getvalue(), "jpeg")
