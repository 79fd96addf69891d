"""Commands with local weights in a network namespace of their own, in which there is no network.

Each has to work, and none may try to reach anything: the kernel counts what finds no way out. A
first attempt on purpose shows that it does. Nothing can leave this machine from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import veca
from attack.files import model, photos
from attack.hostile import Skipped
from attack.launch import Started, command, prepare
from attack.registry import Options, Report
from attack.scenes import SCENES

_NEW_NET, _NEW_USER = 0x40000000, 0x10000000
_ELSEWHERE = ("192.0.2.1", 9)  # an address of the range for documentation

Command = Callable[[Path, Path], list[str | Path]]


def _features(home: Path, out: Path) -> list[str | Path]:
    return ["features", home / "photos", "--out", out, "--weights", home / "w", "--size", "32"]


COMMANDS: Mapping[str, Command] = {
    "info": lambda home, out: ["info", home / "w"],
    "features": _features,
    "embed": lambda home, out: [
        "embed", home / "photos", "--out", out, "--weights", home / "w", "--size", "32",
        "--workers", "0"],
    "search": lambda home, out: ["search", home / "index", home / "photos" / "000.png"],
    "pack": lambda home, out: ["pack", home / "photos", "--out", out, "--workers", "0"],
    "tune": lambda home, out: [
        "tune", home / "photos", "--weights", home / "w", "--out", out, "--sizes", "32",
        "--cores", "4", "--keep", "1", "--precisions", "float32", "--photos", "1"],
    "distill": lambda home, out: ["distill", "--config", home / "recipe.toml", "--out", out],
    "probe": lambda home, out: [
        "probe", "knn", "--dataset", "cifar-10", "--data", home / "data", "--weights", home / "w",
        "--size", "32", "--cores", "4", "--cache", out / "c", "--out", out / "r", "--no-time"],
    "export": lambda home, out: [
        "export", home / "w", "--out", out, "--to", "torch-export"],
    "publish": lambda home, out: ["publish", home / "w", "--out", out],
    "recipes": lambda home, out: ["recipes"],
    "datasets": lambda home, out: ["datasets"],
}  # fmt: skip


def prepare_home(home: Path) -> int:
    """Inputs of all the commands."""
    from veca.embed import embed

    for name in ("distill", "probe"):
        SCENES[name].prepare(home)
    photos(home / "photos", 4)
    if not (home / "w").exists():
        veca.save(model(), home / "w")
    embed(home / "photos", home / "index", weights=home / "w", size=32, workers=0, threads=1)
    return 0


def isolate() -> None:
    """Leave the network behind; `Skipped` where that is not allowed."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "unshare"):
        raise Skipped("this system has no network namespaces")
    if library.unshare(_NEW_NET) and library.unshare(_NEW_NET | _NEW_USER):
        raise Skipped(
            f"this user may make no network namespace ({os.strerror(ctypes.get_errno())})"
        )


def attempts() -> int:
    """How often something in this namespace wanted to send and found no way."""
    names: list[str] = []
    values: list[str] = []
    for line in Path("/proc/self/net/snmp").read_text().splitlines():
        if line.startswith("Ip:"):
            names, values = values, line.split()[1:]
    count = dict(zip(names, values, strict=True))["OutNoRoutes"]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/net/snmp6").read_text().splitlines()
        six = next(line for line in lines if line.startswith("Ip6OutNoRoutes"))
        return int(count) + int(six.split()[1])
    return int(count)


def _watched(work: Callable[[], int], report: Path) -> Callable[[], int]:
    def run() -> int:
        try:
            isolate()
        except Skipped as reason:
            report.write_text(json.dumps({"skipped": str(reason)}))
            return 0
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_INET, kind) as line, contextlib.suppress(OSError):
                line.connect(_ELSEWHERE)
        seen = attempts()
        code = work()
        report.write_text(json.dumps({"seen": seen, "tried": attempts() - seen, "code": code}))
        return code

    return run


def run(options: Options) -> Report:
    prepare()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        made = Started(partial(prepare_home, home), home / "said.txt")
        if made.wait():
            raise RuntimeError(f"the inputs cannot be made: {made.text()[-800:]}")
        for name in options.only or COMMANDS:
            if options.is_over:
                return Report(rows, failed, False)
            rows.append(tried(home, name))
            print(rows[-1], flush=True)
            if rows[-1]["outcome"] not in ("held", "skipped"):
                failed.append(f"{name}: {rows[-1]['outcome']}: {rows[-1]['detail']}")
    return Report(rows, failed)


def tried(home: Path, name: str) -> dict[str, Any]:
    """One command where there is no network."""
    report = home / f"{name}.json"
    work = command(COMMANDS[name](home, home / f"out-{name}"))
    process = Started(_watched(work, report), home / f"{name}.txt")
    process.wait(300)
    if not report.exists():
        return {"command": name, "outcome": "died", "attempts": "", "detail": process.text()[-300:]}
    found = json.loads(report.read_text())
    if "skipped" in found:
        return {"command": name, "outcome": "skipped", "attempts": "", "detail": found["skipped"]}
    if not found["seen"]:
        return {"command": name, "outcome": "skipped", "attempts": "",
                "detail": "this kernel does not count attempts"}  # fmt: skip
    outcome = "connected" if found["tried"] else "failed" if found["code"] else "held"
    detail = "" if outcome == "held" else process.text()[-300:]
    return {"command": name, "outcome": outcome, "attempts": found["tried"], "detail": detail}
