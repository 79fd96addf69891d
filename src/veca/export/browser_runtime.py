"""The files of onnxruntime-web: from a folder, from the cache, or from npm."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from veca._util.cache import cache_folder, mark_used
from veca._util.files import atomic_write
from veca.errors import ExportError

PACKAGE = "onnxruntime-web"
VERSION = "1.30.0"
INTEGRITY = (
    "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
)
"""sha512 of the package's archive, as npm's lock files have it."""

WASM = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
WEBGPU = (
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)
"""The files of its folder `dist` that a page needs on a CPU, and on a GPU."""
_SECONDS = 600  # for a download of 33 MB


def find_runtime(given: str | os.PathLike[str] | None = None) -> dict[str, bytes]:
    """The runtime's files by name.

    Args:
        given: the unpacked package, its folder `dist`, or the archive (.tgz) that `npm pack` makes;
            any version. By default the archive of `VERSION` from the cache, or else from npm.
    """
    if given is None:
        return _unpacked(_cached())
    place = Path(given).expanduser()
    if place.is_file():
        return _unpacked(place)
    for folder in (place / "dist", place / "package" / "dist", place):
        if all((folder / name).is_file() for name in (*WASM, *WEBGPU)):
            return {name: (folder / name).read_bytes() for name in (*WASM, *WEBGPU)}
    raise ExportError(
        f"{place} is not {PACKAGE}: it has no {WASM[0]}; give the folder that "
        f"`npm install {PACKAGE}@{VERSION}` makes in node_modules, or the .tgz of `npm pack`."
    )


def _unpacked(archive: Path) -> dict[str, bytes]:
    """The wanted files of an archive, read by name: nothing is ever extracted to a path in it."""
    try:
        with tarfile.open(archive, "r:gz") as held:
            files = {
                name: held.extractfile(f"package/dist/{name}").read()  # type: ignore[union-attr]
                for name in (*WASM, *WEBGPU)
            }
    except (OSError, tarfile.TarError, KeyError, EOFError, AttributeError) as error:
        raise ExportError(
            f"{archive} is not an archive of {PACKAGE} {VERSION} ({error}); make one with "
            f"`npm pack {PACKAGE}@{VERSION}`."
        ) from error
    return files


def _cached() -> Path:
    """The archive in the cache, fetched if it is not there."""
    place = cache_folder("web") / f"{PACKAGE}-{VERSION}.tgz"
    if place.is_file() and _is_genuine(place.read_bytes()):
        mark_used(place)
        return place
    content = _from_npm()
    with atomic_write(place) as file:
        file.write(content)
    return place


def _from_npm() -> bytes:
    other = (
        f"or give the package with --ort: the folder that `npm install {PACKAGE}@{VERSION}` makes "
        "in node_modules on another machine"
    )
    npm = shutil.which("npm")
    if npm is None:
        raise ExportError(
            f"the page needs {PACKAGE} {VERSION}, and npm, which brings it, is not installed; "
            f"install Node.js, {other}."
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--silent"]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ExportError(f"npm does not answer ({error}); try again, {other}.") from error
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or not archives:
            lines = [line for line in done.stderr.splitlines() if "npm err" in line.lower()]
            reason = lines[0] if lines else f"exit code {done.returncode}"
            raise ExportError(
                f"npm cannot bring {PACKAGE} {VERSION} ({reason}); check the network, {other}."
            )
        content = archives[0].read_bytes()
    if not _is_genuine(content):
        raise ExportError(
            f"what npm brought is not {PACKAGE} {VERSION} (its sha512 is another); try again, "
            f"{other}."
        )
    return content


def _is_genuine(content: bytes) -> bool:
    return base64.b64encode(hashlib.sha512(content).digest()).decode() == INTEGRITY
