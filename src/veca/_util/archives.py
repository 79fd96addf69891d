"""Zip archives of which nothing is believed: every member stored as it is, and as it was written.

torch stores its tensors in such archives and reads them without a look at their checksums.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

from veca._util.files import check_regular
from veca.errors import VecaError

_FREE, _RATIO = 64 * 2**20, 100
"""What a compressed archive may unpack to: so many bytes, and so many times its own."""


def check_unpacked(path: Path, error: type[VecaError]) -> None:
    """Refuse an archive that would unpack to far more than it is, before any of it is unpacked."""
    check_regular(path)
    with zipfile.ZipFile(path) as archive:
        total = sum(member.file_size for member in archive.infolist())
    if total > _FREE + _RATIO * path.stat().st_size:
        raise error(
            f"{path} would unpack to {total / 1e6:,.0f} MB, far more than it could hold; it is not "
            "read."
        )


def check_stored(
    path: Path, what: str, error: type[VecaError], keep: Callable[[str], bool]
) -> dict[str, bytes]:
    """The members whose names `keep` wants; every byte of all is compared with its checksum.

    A compressed member, which could unpack to any size, is refused before it is.

    Args:
        what: the kind of archive, for messages: "one written by torch.save".
    """
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            stored = all(
                member.compress_type == zipfile.ZIP_STORED
                and member.compress_size == member.file_size
                for member in members
            )
            if not stored:
                raise error(f"{path} is a zip archive, but not {what}: it is compressed.")
            total = sum(member.file_size for member in members)
            if total > path.stat().st_size or len({m.filename for m in members}) < len(members):
                raise error(f"{path}: parts of the archive overlap; fetch it again.")
            read = {m.filename: _read(archive, m, keep(m.filename)) for m in members}
            return {name: data for name, data in read.items() if data is not None}
    except zipfile.BadZipFile as problem:
        damaged = "is damaged" if "CRC" in str(problem) else "is cut short or damaged"
        raise error(f"{path} {damaged} ({problem}); fetch it again.") from problem
    except OSError as problem:
        raise error(f"cannot read {path} ({problem.strerror or problem}).") from problem
    except (RuntimeError, ValueError, EOFError, NotImplementedError, OverflowError) as problem:
        if isinstance(problem, VecaError):
            raise
        raise error(f"{path} is a damaged archive ({problem}); fetch it again.") from problem


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, keep: bool) -> bytes | None:
    """Read a member to its end, where its checksum is compared."""
    kept = []
    with archive.open(member) as file:
        while chunk := file.read(2**20):
            if keep:
                kept.append(chunk)
    return b"".join(kept) if keep else None
