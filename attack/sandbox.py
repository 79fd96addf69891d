"""Runs cases in processes that may hang, grow or die: one forked worker, replaced when it does.

The worker is forked from a process that has imported everything, so that thousands of cases run in
minutes. A case is timed without the time in which it waited for a processor: on a busy machine an
honest reader is slow, and hangs are what is looked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from veca.errors import VecaError

SECONDS = 10.0
"""After which a case hangs."""
MEMORY = 2 * 2**30
"""Resident bytes of a whole process, the interpreter and torch included, that none may pass."""
RENEWED_AFTER = 500  # cases, lest what one leaves behind is blamed on a later one
_LOOK = 0.05  # seconds

T = TypeVar("T")

ACCEPTED, CHANGED, REFUSED = "accepted", "changed", "refused"
SILENT, FOREIGN, HANG, OVER_MEMORY, DIED = "silent", "foreign", "hang", "over memory", "died"
FAILURES = (SILENT, FOREIGN, HANG, OVER_MEMORY, DIED)


class Result(NamedTuple):
    """What became of a case."""

    outcome: str
    detail: str = ""
    seconds: float = 0.0
    """Without those in which it waited for a processor."""
    peak: int = 0
    """Resident bytes of its process, at most."""

    @property
    def is_failure(self) -> bool:
        return self.outcome in FAILURES


def judged(read: Callable[[], object], expected: object, *, covered: bool) -> Result:
    """What a reader makes of a damaged file.

    Args:
        read: gives something that `==` compares, such as a digest.
        expected: what it gives of the undamaged file.
        covered: a checksum covers the damage, so that another result is a failure.
    """
    try:
        found = read()
    except VecaError as error:
        return Result(REFUSED, f"{type(error).__name__}: {error}")
    except Exception:
        return Result(FOREIGN, traceback.format_exc(limit=-6))
    if found == expected:
        return Result(ACCEPTED)
    return Result(SILENT if covered else CHANGED, "other content than before the damage")


class Sandbox:
    """Runs `case(number)` in a worker, within limits."""

    def __init__(
        self, case: Callable[[int], Result], *, seconds: float = SECONDS, memory: int = MEMORY
    ) -> None:
        self._case, self._seconds, self._memory = case, seconds, memory
        self._worker: _Worker | None = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def run(self, number: int) -> Result:
        """One case; whatever it does, this returns."""
        if self._worker is None or self._worker.cases >= RENEWED_AFTER:
            self._end()
            self._worker = _Worker(self._case)
        result = self._worker.run(number, self._seconds, self._memory)
        if result.outcome in (HANG, OVER_MEMORY, DIED):
            self._end()
        return result


class _Worker:
    """A forked process that runs one case after another."""

    def __init__(self, case: Callable[[int], Result]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        asked, ask = os.pipe()
        answer, answered = os.pipe()
        self.cases = 0
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ask)
            os.close(answer)
            try:
                _serve(case, asked, answered)
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answered)
        self._ask, self._answer = ask, answer

    def run(self, number: int, seconds: float, memory: int) -> Result:
        self.cases += 1
        begun, waited = time.monotonic(), _Waited(self.pid)
        os.write(self._ask, b"%d\n" % number)
        text = b""
        while True:
            if select.select([self._answer], [], [], _LOOK)[0]:
                part = os.read(self._answer, 2**16)
                text += part
                if not part:
                    return Result(DIED, f"ended by {self._fate()}")
                if text.endswith(b"\n"):
                    break
            taken = time.monotonic() - begun - waited.seconds()
            if taken > seconds:
                return Result(HANG, _where(self.pid), taken)
            if _resident(self.pid) > memory:
                return Result(OVER_MEMORY, "stopped when it passed the limit", taken)
        taken = time.monotonic() - begun - waited.seconds()
        result = Result(*json.loads(text))._replace(seconds=max(0.0, taken))
        if result.peak > memory:
            return result._replace(outcome=OVER_MEMORY)
        return result

    def _fate(self) -> str:
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        number = os.waitstatus_to_exitcode(status)
        return signal.Signals(-number).name if number < 0 else f"exit code {number}"

    def end(self) -> None:
        for handle in (self._ask, self._answer):
            os.close(handle)
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _serve(case: Callable[[int], Result], asked: int, answered: int) -> None:
    """In the worker: one line asks for a case, one line answers."""
    import faulthandler

    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):  # what libraries say of damaged files is theirs
        os.dup2(nothing, handle)
    with os.fdopen(asked) as lines:
        for line in lines:
            _forget_peak()
            try:
                result = case(int(line))
            except BaseException:
                result = Result(FOREIGN, traceback.format_exc(limit=-6))
            answer = json.dumps([*result[:3], _peak()]) + "\n"
            data = answer.encode("utf-8", "backslashreplace")
            while data:
                data = data[os.write(answered, data) :]


def in_a_fork(work: Callable[[], T]) -> T:
    """What `work` gives, as JSON holds it, made in a process of its own.

    Libraries that start threads would make later forks of this one unsafe.
    """
    answer, answered = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            data = json.dumps(work()).encode()
            while data:
                data = data[os.write(answered, data) :]
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(answered)
    with os.fdopen(answer) as file:
        text = file.read()
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the undamaged files could not be made")
    found: T = json.loads(text)
    return found


class _Waited:
    """How long a process was ready to run and had no processor: that of the thread that waited
    most, since the others may wait for it."""

    def __init__(self, pid: int) -> None:
        self._place = Path(f"/proc/{pid}/task")
        self._begun = self._now()
        self._last: dict[str, int] = {}

    def _now(self) -> dict[str, int]:
        found = {}
        with contextlib.suppress(OSError):
            for thread in self._place.iterdir():
                with contextlib.suppress(OSError, IndexError):
                    found[thread.name] = int((thread / "schedstat").read_text().split()[1])
        return found

    def seconds(self) -> float:
        self._last.update(self._now())
        waits = (now - self._begun.get(thread, 0) for thread, now in self._last.items())
        return max(waits, default=0) / 1e9


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _where(pid: int) -> str:
    try:
        return f"in {Path(f'/proc/{pid}/wchan').read_text() or 'its own code'}"
    except OSError:
        return ""


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Resident bytes of this process, at most, since they were forgotten."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def digest(value: Any) -> str:
    """A short text that is equal where two values are: tensors, arrays, images, tables."""
    import hashlib

    total = hashlib.sha256()
    for part in _parts(value):
        total.update(part)
    return total.hexdigest()[:32]


def _parts(value: Any) -> Iterator[bytes]:
    import dataclasses

    import numpy as np
    import torch
    from PIL import Image

    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        yield f"tensor {plain.dtype} {list(plain.shape)}".encode()
        yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (np.ndarray, np.generic)):
        yield f"array {value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Image.Image):
        yield f"image {value.mode} {value.size}".encode()
        yield value.tobytes()
    elif isinstance(value, torch.nn.Module):
        yield from _parts(dict(value.state_dict()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__.encode()
        yield from _parts({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    elif isinstance(value, dict):
        for name in sorted(value, key=str):  # safetensors has texts in an order of its own
            yield f"key {name!r}".encode("utf-8", "backslashreplace")
            yield from _parts(value[name])
    elif isinstance(value, (str, bytes, int, float, bool, type(None), Path)):
        yield repr(value).encode("utf-8", "backslashreplace")
    elif isinstance(value, Iterable):
        yield b"list"
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value).encode("utf-8", "backslashreplace")
