"""Commands in processes that can be killed: forks of one that has imported everything."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_HEAVY = ("veca.embed", "veca.data", "veca.distill", "veca.tune", "veca.large", "veca.probe",
          "veca.export", "veca.cli.common")  # fmt: skip


def prepare() -> None:
    """Import what commands need, so that a fork begins to work at once."""
    import torch

    torch.set_num_threads(1)
    for name in _HEAVY:
        importlib.import_module(name)


class Started:
    """A process under way, in a session of its own, with what it says in a file."""

    def __init__(
        self, work: Callable[[], int], said: Path, *, first: Callable[[], None] | None = None
    ) -> None:
        """
        Args:
            first: called in the new process before anything else, such as to limit it.
        """
        self.said = said
        said.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.begun = time.monotonic()
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _in_child(work, said, first)

    def poll(self) -> int | None:
        """The exit code, once it has ended; of a signal, its number below zero."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float = 120.0) -> int:
        """Wait for its end; a process that takes longer is killed, and that is a fault."""
        while self.poll() is None:
            if time.monotonic() - self.begun > seconds:
                self.kill()
                raise TimeoutError(f"still running after {seconds:g} s: {self.text()[-500:]}")
            time.sleep(0.003)
        assert self.code is not None
        return self.code

    def kill(self) -> bool:
        """SIGKILL to the process itself, not to its workers; whether it still ran."""
        ran = self.poll() is None
        if ran:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return ran

    def orphans(self, seconds: float = 20.0) -> list[int]:
        """Workers that outlive it; they are given some time to notice, and then ended."""
        until = time.monotonic() + seconds
        while left := self._members():
            if time.monotonic() > until:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return left
            time.sleep(0.02)
        return []

    def _members(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def text(self) -> str:
        with contextlib.suppress(OSError):
            return self.said.read_text(errors="replace")
        return ""


def command(args: Sequence[str | Path]) -> Callable[[], int]:
    """`veca ARGS`, to be run in another process."""

    def run() -> int:
        from veca.cli.main import main

        return main([str(arg) for arg in args])

    return run


def _in_child(work: Callable[[], int], said: Path, first: Callable[[], None] | None) -> None:
    code = 1
    try:
        os.setsid()
        for handle, name, flags in ((0, os.devnull, os.O_RDONLY), (1, said, _WRITE), (2, None, 0)):
            source = 1 if name is None else os.open(name, flags, 0o666)
            os.dup2(source, handle)
        if first is not None:
            first()
        code = work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
