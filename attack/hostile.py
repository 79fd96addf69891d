"""Hostile places: a full disk, a deleted folder, two writers, changed sources, no permission.

Whatever happens, a command ends by itself, says what is wrong in one line, claims nothing that is
not there, and goes on when the fault is mended.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attack.launch import Started, prepare
from attack.registry import Options, Report
from attack.sandbox import FOREIGN, HANG, REFUSED, SILENT, Result
from attack.scenes import SCENES, differences, forget

_PATIENCE = 120.0
_FULL = {"pack": 48, "distill": 96, "tune": 4, "probe": 8}
"""KiB that a disk has at first; else 16. Less than the command needs."""


class Skipped(Exception):
    """This cannot be tried here; the message says why."""


class Fault(Exception):
    """Something that must not happen."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Place:
    """A command with its inputs, and what an undisturbed run of it leaves."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.scene = name, SCENES[name]
        self.home, self.out = folder / name, folder / name / "runs" / "out"
        self.out.parent.mkdir(parents=True)
        self.scene.prepare(self.home)
        begun = time.monotonic()
        self.end(self.start(), {0})
        self.takes = time.monotonic() - begun
        self.wanted = self.scene.left(self.out)

    def start(self, first: Callable[[], None] | None = None, said: str = "said.txt") -> Started:
        place = self.out.parent / said  # not among the sources, which a check damages
        return Started(self.scene.work(self.home, self.out), place, first=first)

    def end(self, process: Started, codes: set[int]) -> int:
        """Wait for the end: one of these codes, and no traceback."""
        try:
            code = process.wait(_PATIENCE)
        except TimeoutError as error:
            raise Fault(HANG, str(error)) from error
        if code not in codes or "Traceback" in process.text():
            raise Fault(FOREIGN, f"{self.name}: exit code {code}: {process.text()[-1200:]}")
        said = process.text().strip().splitlines()
        if code and not (said and said[-1].startswith("veca:")):
            raise Fault(FOREIGN, f"{self.name} says no reason: {process.text()[-300:]}")
        return code

    def finish(self) -> None:
        """Go on, to the end; what is left has to be that of an undisturbed run."""
        self.end(self.start(), {0})
        self.compare()

    def compare(self) -> None:
        fault = differences(self.wanted, self.scene.left(self.out))
        if fault:
            raise Fault(SILENT, f"{self.name}: {fault}")


# ------------------------------------------------------------------------------------- the places


def full_disk(place: Place, rng: random.Random) -> None:
    """The disk is full in the middle of the run, and is made larger afterwards."""
    forget(place.out)
    with _disk(place.out, _FULL.get(place.name, 16)):
        process = place.start()
        code = place.end(process, {0, 2})
        if not code:
            raise Skipped("all of it fitted on the small disk")
        if "space" not in process.text():
            raise Fault(FOREIGN, f"{place.name} does not say that the disk is full")
        _mount("-o", "remount,size=200m", place.out)
        place.finish()


def small_files(place: Place, rng: random.Random) -> None:
    """No file may grow beyond some kilobytes, which needs no rights to try."""
    forget(place.out)

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    process = place.start(first=limit)
    process.wait(_PATIENCE)
    # What it says goes to a file as well, of which it may fill no more.
    if process.code not in (0, 2) and "Traceback" in process.text():
        raise Fault(FOREIGN, f"{place.name}: exit code {process.code}: {process.text()[-1200:]}")
    place.finish()


def deleted_folder(place: Place, rng: random.Random) -> None:
    """Somebody removes the output folder in the middle of the run."""
    forget(place.out)
    process = place.start()
    moment = process.begun + rng.uniform(0.2, 0.9) * place.takes
    while process.poll() is None and time.monotonic() < moment:
        time.sleep(0.002)
    with contextlib.suppress(OSError):
        place.out.rename(place.out.with_name("trash"))
    code = place.end(process, {0, 2})
    shutil.rmtree(place.out.with_name("trash"), ignore_errors=True)
    if code == 0 and place.out.exists():
        place.compare()  # it may have begun only then
    place.finish()


def two_writers(place: Place, rng: random.Random) -> None:
    """Two processes of the same command in the same folder."""
    forget(place.out)
    first = place.start()
    time.sleep(rng.random() * 0.3 * place.takes)
    second = place.start(said="said-too.txt")
    codes = [place.end(process, {0, 2}) for process in (first, second)]
    if 0 not in codes:
        raise Fault(REFUSED, f"{place.name}: neither of two writers came to the end")
    place.compare()


def changed_sources(place: Place, rng: random.Random) -> None:
    """Inputs are removed, cut short and overwritten in the middle of the run."""
    forget(place.out)
    kept = place.home.with_name(f"{place.name}-kept")
    shutil.copytree(place.home, kept, ignore=shutil.ignore_patterns("runs"))
    try:
        process = place.start()
        time.sleep(rng.uniform(0.1, 0.6) * place.takes)
        files = sorted(p for p in place.home.rglob("*") if p.is_file() and "runs" not in p.parts)
        for path in rng.sample(files, len(files) // 2):
            rng.choice((_remove, _cut, _overwrite))(path)
        place.end(process, {0, 2})
    finally:
        forget(place.out)
        for path in sorted(kept.iterdir()):
            target = place.home / path.name
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            path.rename(target)
        shutil.rmtree(kept)
    place.finish()


def read_only(place: Place, rng: random.Random) -> None:
    """The output folder may not be written to."""
    forget(place.out)
    with _disk(place.out, 4096):
        _mount("-o", "remount,ro", place.out)
        if place.end(place.start(), {0, 2}) == 0:
            raise Fault(SILENT, f"{place.name} says it wrote to a read-only folder")


def _remove(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _overwrite(path: Path) -> None:
    path.write_bytes(b"something else")


@contextlib.contextmanager
def _disk(folder: Path, kib: int) -> Iterator[None]:
    """A small disk at `folder`, of this machine's memory."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=False, capture_output=True)


def _mount(*words: str | Path) -> None:
    try:
        subprocess.run(["mount", *words], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skipped("this user may not mount a small disk") from error


CHECKS: Mapping[str, Callable[[Place, random.Random], None]] = {
    "full disk": full_disk,
    "small files": small_files,
    "deleted folder": deleted_folder,
    "two writers": two_writers,
    "changed sources": changed_sources,
    "read-only folder": read_only,
}


def run(options: Options) -> Report:
    """Every check on every command, `count` times."""
    prepare()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or SCENES:
            place = Place(Path(folder), name)
            for what, check in CHECKS.items():
                for number in range(options.count):
                    if options.is_over:
                        return Report(rows, failed, False)
                    rng = random.Random(f"{options.seed} {name} {what} {number}")
                    row = _tried(place, what, check, rng)
                    rows.append(row)
                    print(f"{name}, {what}: {row['outcome']} {row['detail']}", flush=True)
                    if row["outcome"] not in ("held", "skipped"):
                        failed.append(f"{name}, {what}: {row['outcome']}: {row['detail']}")
    return Report(rows, failed)


def _tried(
    place: Place, what: str, check: Callable[[Place, random.Random], None], rng: random.Random
) -> dict[str, Any]:
    result = Result("held")
    try:
        check(place, rng)
    except Skipped as reason:
        result = Result("skipped", str(reason))
    except Fault as fault:
        result = Result(fault.outcome, str(fault))
    row = {"command": place.name, "check": what, "outcome": result.outcome}
    return {**row, "detail": " ".join(result.detail.split())[-300:]}
