"""Finding weights: what a name, a path or a hub id stands for on this machine."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from veca._util.cache import cache_folder
from veca._util.extras import clone_of, is_clone
from veca.config import PRESETS
from veca.errors import InputError, WeightsError, suggest
from veca.weights import hub, store

log = logging.getLogger(__name__)

NAMED: dict[str, str] = {}
"""Weights published on the Hugging Face hub: name -> "owner/name" or "owner/name@revision"."""

IN_A_CLONE = ("veca_small_patch16",)
"""Weights that lie in `weights/` of the repository: too large for the package."""

_PACKAGE = Path(__file__).resolve().parent.parent
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # no folder has a longer one


def find(name: str) -> Path | None:
    """The folder of the weights called `name` (`veca_small_patch16` or `small`), if it is here."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    for folder in _folders():
        for candidate in _spellings(name):
            if (folder / candidate / store.TENSORS).is_file():
                return folder / candidate
    return None


def available() -> list[str]:
    """The names of all weights on this machine that `load` finds by name."""
    found = set()
    for folder in _folders():
        with contextlib.suppress(OSError):  # no such folder, or one that may not be read
            found |= {entry.name for entry in folder.iterdir() if (entry / store.TENSORS).is_file()}
    return sorted(name for name in found if _NAME.fullmatch(name))


def locate(source: str | os.PathLike[str], wanted: Sequence[str] = store.FILES) -> Path:
    """The local folder or file that `source` means.

    A path that exists wins, unless it is a folder without weights that has the name of some.

    Args:
        wanted: the files to fetch if it is a repository of the hub; the first one is a must.
    """
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise InputError(
            "weights are named by a string or a path: a name, a folder, a .safetensors file or a "
            f"hub id; got {source!r}."
        )
    text = os.fsdecode(source)
    path = _path(text)
    is_name = isinstance(source, str) and _NAME.fullmatch(text) and not text.endswith(store.SUFFIX)
    if exists(path) and (store.holds_weights(path) or not is_name):
        say_shadowed(text)
        return path
    if is_name:
        return _by_name(text, wanted)
    if isinstance(source, str) and hub.is_repo(text):
        return hub.download(text, wanted)
    raise WeightsError(
        f"there is no {text}; check the path, or give a name ({', '.join(_known())}) or a hub id "
        "such as owner/name."
    )


def _by_name(name: str, wanted: Sequence[str]) -> Path:
    found = find(name)
    if found is not None:
        return found
    for candidate in _spellings(name):
        if candidate in NAMED:
            return hub.download(NAMED[candidate], wanted)
    if not any(candidate in PRESETS for candidate in _spellings(name)):
        raise WeightsError(
            f"no weights are called {suggest(name, _known(name))} Nor is there a file or a folder "
            f"of that name here (looked in {_looked()})."
        )
    if any(candidate in IN_A_CLONE for candidate in _spellings(name)):
        raise WeightsError(
            f"the weights {name!r} are not on this machine (looked in {_looked()}); they come with "
            "a clone of the repository, in weights/: work in there, give that folder's path, or "
            f"copy it into {cache_folder()}."
        )
    raise WeightsError(
        f"the weights {name!r} are not on this machine (looked in {_looked()}) and none are "
        f"published yet; veca.create_model({name!r}) makes fresh ones, `veca distill` trains them, "
        "and `veca import` reads a checkpoint of the authors'."
    )


def at_hand(source: str) -> Path | None:
    """The weights on this machine that `locate` finds for a path or a name; None without any."""
    path = _path(source)
    if not exists(path) or not store.holds_weights(path):
        return find(source)
    say_shadowed(source)
    return path


def say_shadowed(text: str) -> None:
    """Log one line, once, if what lies at a path is taken instead of other weights so called."""
    path = _path(text)
    if path.is_absolute() or not exists(path):
        return
    other, here = find(text), path.resolve()
    if other is not None and other.resolve() != here:
        _say_once(f"{text} is the folder {here} here, not the weights of that name in {other}.")
    elif hub.is_repo(text) and hub.fetched_before(text):
        _say_once(f"{text} is the folder {here} here, not the hub's repository of that name.")


@functools.cache
def _say_once(line: str) -> None:
    log.warning(line)


def _path(text: str) -> Path:
    with contextlib.suppress(RuntimeError):  # "~someone" whom this machine does not know
        return Path(text).expanduser()
    return Path(text)


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; False for a name that none can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _known(like: str = "veca_") -> list[str]:
    """Every name there is; presets by their short names, unless the one asked for is a long one."""
    short = not like.startswith("veca_")
    presets = (n.removeprefix("veca_").removesuffix("_patch16") if short else n for n in PRESETS)
    return sorted({*presets, *NAMED, *available()})


def _spellings(name: str) -> tuple[str, str]:
    return name, f"veca_{name}_patch16"


def _folders() -> Iterator[Path]:
    """Where named weights are looked for, in this order."""
    yield _PACKAGE / "assets" / "weights"
    for clone in _clones():
        yield clone / "weights"
    yield cache_folder()


def _clones() -> list[Path]:
    """The clone that the package lies in, and the one that it is used in, from any depth."""
    found = [clone] if (clone := clone_of(_PACKAGE)) else []
    with contextlib.suppress(OSError):  # a working folder that is gone
        here = Path.cwd()
        found += [folder for folder in (here, *here.parents) if is_clone(folder)][:1]
    return list(dict.fromkeys(found))


def _looked() -> str:
    """Every place where weights were looked for, in words."""
    *places, last = map(str, _folders())
    if not _clones():
        with contextlib.suppress(OSError):
            places.append(f"weights/ of a clone around {Path.cwd()}, which lies in none")
    return ", ".join([*places, last])


def called(source: str | os.PathLike[str], path: Path) -> str:
    """What the weights are called that `locate` found at `path`: a model's `name`."""
    text = os.fsdecode(source)
    if path not in (_path(text), find(text)):  # from the hub, whose copies are called by a hash
        return next((name for name in _spellings(text) if name in NAMED), text)
    whole = path.resolve()
    folder = whole.parent if whole.name == store.TENSORS else whole
    return folder.name.removesuffix(store.SUFFIX)


def public_name(text: str) -> str:
    """A name to publish: of a path on this machine the last part, after a scheme or NAME= too."""
    given, equals, value = text.partition("=")
    if equals and "/" not in given:
        return f"{given}={public_name(value)}"
    scheme, colon, rest = text.partition(":")
    path = rest if colon and "/" not in scheme else text
    prefix = text[: len(text) - len(path)]
    return prefix + Path(path).name if Path(path).expanduser().is_absolute() else text
