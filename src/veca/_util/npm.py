"""Files of packages that npm brings: from a folder, from the cache, or from npm itself."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from veca._util.cache import cache_folder, mark_used
from veca._util.files import atomic_write
from veca.errors import VecaError

_SECONDS = 600  # for a download of some 30 MB


class NpmPackage(NamedTuple):
    """A package in one version, and the files of it that are wanted."""

    name: str
    version: str
    integrity: str
    """sha512 of its archive, as npm's lock files have it."""
    files: tuple[str, ...]
    """Paths in the package; their names differ."""
    option: str
    """With which a user gives it where npm cannot bring it."""
    error: type[VecaError]
    """What is raised where it cannot be had."""

    def find(self, given: str | os.PathLike[str] | None = None) -> dict[str, bytes]:
        """The wanted files by name.

        Args:
            given: the unpacked package, the folder in it that has the files, or the archive (.tgz)
                that `npm pack` makes; any version. By default the archive of this version from the
                cache, or else from npm.
        """
        if given is None:
            return self._unpacked(self._cached())
        place = Path(given).expanduser()
        if place.is_file():
            return self._unpacked(place)
        names = [Path(file).name for file in self.files]
        for folder, inside in (
            (place, self.files),
            (place / "package", self.files),
            (place, names),
        ):
            if all((folder / file).is_file() for file in inside):
                return {Path(file).name: (folder / file).read_bytes() for file in inside}
        raise self.error(
            f"{place} is not {self.name}: it has no {names[0]}; give the folder that `npm install "
            f"{self}` makes in node_modules, or the .tgz of `npm pack`."
        )

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    def _unpacked(self, archive: Path) -> dict[str, bytes]:
        """Files of an archive, read by name: nothing is ever extracted to a path in it."""
        try:
            with tarfile.open(archive, "r:gz") as held:
                return {
                    Path(file).name: held.extractfile(f"package/{file}").read()  # type: ignore[union-attr]
                    for file in self.files
                }
        except (OSError, tarfile.TarError, KeyError, EOFError, AttributeError) as error:
            raise self.error(
                f"{archive} is not an archive of {self.name} {self.version} ({error}); make one "
                f"with `npm pack {self}`."
            ) from error

    def _cached(self) -> Path:
        """The archive in the cache, fetched if it is not there."""
        place = cache_folder("web") / f"{self.name}-{self.version}.tgz"
        if place.is_file() and self.is_genuine(place.read_bytes()):
            mark_used(place)
            return place
        content = self._from_npm()
        with atomic_write(place) as file:
            file.write(content)
        return place

    def _from_npm(self) -> bytes:
        other = (
            f"or give the package with {self.option}: the folder that `npm install {self}` makes "
            "in node_modules on another machine"
        )
        npm = shutil.which("npm")
        if npm is None:
            raise self.error(
                f"the page needs {self.name} {self.version}, and npm, which brings it, is not "
                f"installed; install Node.js, {other}."
            )
        with tempfile.TemporaryDirectory() as folder:
            command = [npm, "pack", str(self), "--silent"]
            try:
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise self.error(f"npm does not answer ({error}); try again, {other}.") from error
            archives = list(Path(folder).glob("*.tgz"))
            if done.returncode or not archives:
                lines = [line for line in done.stderr.splitlines() if "npm err" in line.lower()]
                reason = lines[0] if lines else f"exit code {done.returncode}"
                raise self.error(
                    f"npm cannot bring {self.name} {self.version} ({reason}); check the network, "
                    f"{other}."
                )
            content = archives[0].read_bytes()
        if not self.is_genuine(content):
            raise self.error(
                f"what npm brought is not {self.name} {self.version} (its sha512 is another); try "
                f"again, {other}."
            )
        return content

    def is_genuine(self, content: bytes) -> bool:
        return base64.b64encode(hashlib.sha512(content).digest()).decode() == self.integrity
