"""Writing that never leaves half a file, and reading that never waits for one.

Everything is written to a hidden temporary file in the same folder, flushed to the disk, and
renamed over the target. A crash at any moment leaves the old file, or the new one, whole.

What is read was written by others: a pipe is refused before it is opened, and JSON that is none,
however it fails, is an error that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import platform
import re
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from veca.errors import InputError, OutputError, VecaError, shown

_ADVICE = {
    errno.ENOSPC: "free some space or choose another place",
    errno.EDQUOT: "free some space or choose another place",
    errno.EFBIG: "the file system takes no file that large; choose another place",
    errno.EACCES: "choose a place you may write to",
    errno.EPERM: "choose a place you may write to",
    errno.EROFS: "choose a place you may write to",
    errno.ENOTDIR: "a part of the path is a file; choose another name",
    errno.EISDIR: "that is a folder; choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_KEPT = 50  # characters of a name in that of its temporary file, which must not grow too long


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file for writing that appears at `path` only when the block ends without an error.

    Args:
        path: the target; its folder is made if need be. A symbolic link is followed.
        mode: "wb", or "w" for UTF-8 text.
    """
    if mode not in ("wb", "w"):
        raise InputError(f"atomic_write takes mode 'wb' or 'w', got {mode!r}.")
    encoding = None if mode == "wb" else "utf-8"
    with temporary_beside(path) as temporary, output_errors(path):
        with open(temporary, mode, encoding=encoding) as file:  # noqa: PTH123
            yield file
        commit(temporary, path)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 text, all or nothing."""
    with atomic_write(path, "w") as file:
        file.write(text)


def atomic_write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write indented JSON, all or nothing."""
    atomic_write_text(path, to_json(value))


def to_json(value: object) -> str:
    """Indented JSON with a final newline; NaN and infinity, which JSON lacks, are refused.

    Bytes of a file name that are no UTF-8 are escaped as JSON does it, and read back unharmed.
    """
    return escaped(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def escaped(text: str) -> str:
    """Text that UTF-8 can hold: half a pair becomes \\uNNNN, as JSON writes it."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(name: str) -> str:
    """A path as UTF-8 text; bytes of a file name that are none are written as \\xNN."""
    try:
        text = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a pair, which names on Windows may hold
        text = name.encode("utf-8", "backslashreplace")
    return text.decode("utf-8", "backslashreplace")


def one_line(name: str) -> str:
    """A path or message on one line of a list or a terminal: what breaks or hides it is escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in printable(name)
    )


def place_for(out: str | os.PathLike[str]) -> Path:
    """The path that a caller wants something written to; "" would be the current folder."""
    if not os.fspath(out):
        raise OutputError("cannot write to an empty path (''); name a file or a folder.")
    return Path(out).expanduser()


@contextlib.contextmanager
def temporary_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty file in the folder of `path`, removed at the end unless `commit` renamed it.

    For writers that want a file name; `atomic_write` is simpler for everything else.
    """
    target = _target(path)
    name = f"{_stem(target)}{os.getpid()}-{_machine()}{secrets.token_hex(4)}.tmp"
    temporary = target.with_name(name)
    with contextlib.ExitStack() as stack:
        with output_errors(path):
            stack.enter_context(folder_to_fill(target.parent))
            with contextlib.suppress(FileNotFoundError):
                target.lstat()  # a name too long is told now, not when all is written
            # Not `tempfile`: that makes files only their owner can read. This obeys the umask.
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


_LEFT = re.compile(r"\..*\.(?P<process>\d+)-(?P<machine>[0-9a-f]{8})?[0-9a-f]{8}\.tmp", re.DOTALL)


def check_written(paths: Iterable[Path]) -> None:
    """Raise unless all that is said to be written is there: somebody may have removed it since."""
    gone = [path for path in paths if not path.is_file()]
    if gone:
        raise OutputError(
            f"{gone[0]} is gone: something else has changed its folder meanwhile; run it again."
        )


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove, among `paths`, the temporary files of processes that were killed.

    Those of processes that run, and those of other machines, stay.
    """
    for path in paths:
        found = _LEFT.fullmatch(path.name)
        here = found is not None and found["machine"] in (None, _machine())
        if found is not None and here and not _runs(int(found["process"])):
            with contextlib.suppress(OSError):
                path.unlink()


def _machine() -> str:
    """Eight digits that tell machines apart which share a folder."""
    return f"{zlib.crc32(platform.node().encode()):08x}"


def _runs(process: int) -> bool:
    if process == os.getpid() or os.name != "posix":  # elsewhere nobody can be asked
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


@contextlib.contextmanager
def folder_to_fill(path: Path) -> Iterator[Path]:
    """Make a folder, and those above it, for the block to write in.

    What was made here and is still empty at the end is removed: work that fails before it writes
    anything leaves nothing behind. Folders that were there stay, empty or not.
    """
    here = path.absolute()
    above = (here, *here.parents)
    made = list(itertools.takewhile(lambda folder: not os.path.lexists(folder), above))
    try:
        here.mkdir(parents=True, exist_ok=True)
        yield path
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # rmdir refuses a folder that holds anything
                folder.rmdir()


def commit(temporary: Path, path: str | os.PathLike[str]) -> None:
    """Put a finished temporary file in place of `path`, on the disk before this returns."""
    target = _target(path)
    with output_errors(path):
        flush(temporary)
        os.replace(temporary, target)  # noqa: PTH105
        flush_folder(target.parent)


def reserve(file: IO[bytes], size: int) -> None:
    """Make a file `size` bytes long and, where the system can, have them on the disk from now on.

    A disk that fills up later would end hours of work.
    """
    if os.fstat(file.fileno()).st_size == size:
        return
    if hasattr(os, "posix_fallocate"):  # not on macOS and Windows
        os.posix_fallocate(file.fileno(), 0, size)
    file.truncate(size)


def write_all(file: IO[bytes], data: memoryview) -> None:
    """Write all bytes to a file without a buffer, which may take a part of them at a time."""
    while data:
        data = data[file.write(data) :]


def flush(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make a rename or a removal durable where folders can be flushed (not on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_held: set[str] = set()
"""Lock files that this process holds: the system would let it take them twice."""


@contextlib.contextmanager
def exclusive(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock file `path`, removed at the end; whoever else holds it: OutputError.

    The lock goes with the process that took it, however that ends. Where there are no locks
    (Windows, some network folders) other processes are not kept out.
    """
    name = os.path.realpath(path)
    if name in _held:
        raise OutputError(busy)
    with contextlib.ExitStack() as stack:
        with output_errors(path):
            stack.enter_context(folder_to_fill(path.parent))
            file = stack.enter_context(path.open("w"))
            while not _lock(file, busy, path):  # its holder removed it just then
                file.close()
                file = stack.enter_context(path.open("w"))
        _held.add(name)
        try:
            yield
        finally:
            _held.discard(name)
            with contextlib.suppress(OSError):  # an open file stays on Windows
                path.unlink(missing_ok=True)


def _lock(file: IO[Any], busy: str, path: Path) -> bool:
    """Lock an open file; False if it no longer is the one called `path`."""
    try:
        import fcntl

        # Not flock: workers that outlive a killed parent for a moment would still hold it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise OutputError(busy) from error
    except (ImportError, OSError):
        return True
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def output_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a failure to write `path` into an `OutputError` that says why and what to do."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        # A write has no file name of its own; a name elsewhere means that some other file, one
        # the caller was reading, is at fault.
        if error.filename is not None and not _is_near(error.filename, path):
            raise
        raise cannot_write(path, error) from error


def cannot_write(path: str | os.PathLike[str], error: OSError) -> OutputError:
    """The `OutputError` for a failure of the operating system."""
    reason = error.strerror or str(error) or type(error).__name__
    advice = _ADVICE.get(error.errno or 0, "choose another place")
    return OutputError(f"cannot write {os.fspath(path)} ({reason}); {advice}.")


def _stem(target: Path) -> str:
    """What the names of a target's temporary files begin with."""
    return f".{target.name[:_KEPT]}."


def _target(path: str | os.PathLike[str]) -> Path:
    """The real file behind `path`; only a regular file, or nothing, can be replaced."""
    target = Path(os.path.realpath(Path(path).expanduser()))
    try:
        mode = target.stat().st_mode
    except OSError:
        return target
    if stat.S_ISDIR(mode):
        raise OutputError(f"cannot write {os.fspath(path)}: it is a folder; choose a file name.")
    if not stat.S_ISREG(mode):
        raise OutputError(
            f"cannot write {os.fspath(path)}: it is a device or a pipe, which a whole file cannot "
            "replace; choose a file name."
        )
    return target


def _is_near(filename: object, path: str | os.PathLike[str]) -> bool:
    """Whether `filename` is the target, its temporary file, inside it or on the way to it."""
    if not isinstance(filename, (str, bytes, os.PathLike)):
        return True
    wanted = Path(os.path.realpath(Path(path).expanduser()))
    actual = Path(os.path.realpath(os.fsdecode(filename)))
    ours = actual == wanted or actual.name.startswith(_stem(wanted))
    beside = ours and actual.parent == wanted.parent
    return beside or actual in wanted.parents or wanted in actual.parents


# --------------------------------------------------------------------------------------- reading


def check_regular(path: str | os.PathLike[str]) -> None:
    """OSError for a pipe, a device or a socket, which to open might wait for ever.

    Ask before anything opens a file by its name.
    """
    mode = os.stat(path).st_mode  # noqa: PTH116
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        reason = "a pipe, a device or a socket, where a file was expected"
        raise OSError(errno.EINVAL, reason, os.fspath(path))


def open_file(path: Path) -> BinaryIO:
    """Open a file to be read. A pipe or a device, which might wait for ever, is an OSError."""
    check_regular(path)
    return path.open("rb")


def read_text(path: Path, error: type[VecaError]) -> str:
    """UTF-8 text; `error` if there is none to be had."""
    try:
        check_regular(path)
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:  # ValueError: no UTF-8, or a NUL in the path
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"cannot read {path} ({reason}); fetch or write it again.") from problem


def read_json(path: Path, error: type[VecaError]) -> dict[str, Any]:
    """The JSON object in a file; `error` names the file if there is none."""
    return parse_json(read_text(path, error), path, error)


def from_json(text: str | bytes, **options: Any) -> Any:
    """`json.loads`, with a ValueError whatever is wrong: lists in lists without end among it."""
    try:
        return json.loads(text, **options)
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem


def parse_json(text: str | bytes, where: object, error: type[VecaError]) -> dict[str, Any]:
    """The JSON object that is in a text of the file `where`."""
    try:
        value = from_json(text, parse_constant=_no_number, parse_float=_finite)
    except ValueError as problem:
        raise error(f"{where} is not valid JSON ({problem}); fetch or write it again.") from problem
    if not isinstance(value, dict):
        raise error(f"{where} must hold a JSON object of named fields, got {type(value).__name__}.")
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"it holds {text}, which JSON lacks")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def check_fields(
    table: Mapping[str, Any], kinds: Mapping[str, Any], where: object, error: type[VecaError]
) -> None:
    """Refuse a table that lacks a field, or holds something else in it than it should.

    Args:
        kinds: by the field's name, "config.schedule" for one of a table inside, what `isinstance`
            takes. True and false are no numbers here.
    """
    for name, kind in kinds.items():
        value: Any = table
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise error(f"{where} lacks the field {name!r}.")
            value = value[part]
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            words = " or ".join(one.__name__ for one in allowed)
            raise error(f"{where}: {name} must be {words}, got {shown(value)}.")
