"""SIGKILLs at random moments: whoever goes on afterwards leaves what an undisturbed run does."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from attack.launch import Started, prepare
from attack.registry import Options, Report
from attack.scenes import SCENES, differences, forget

_MOST = 6
"""Kills of one run, one after the other, before it is let finish."""


class KillReport(NamedTuple):
    """Of one run that was killed so often and then finished."""

    kills: int
    fault: str
    """What was wrong in the end; "" if nothing was."""
    seconds: float


class Kills:
    """The campaign "kills" of one command. Everything is below `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.scene = name, SCENES[name]
        self.home, self._folder = folder / name, folder / name / "runs"
        self.home.mkdir(parents=True)
        self.scene.prepare(self.home)
        begun = time.monotonic()
        self.out = self._folder / "out"  # the same path each time: some files hold it
        self._finish()
        self.takes = time.monotonic() - begun
        self.wanted = self.scene.left(self.out)

    def _start(self) -> Started:
        return Started(self.scene.work(self.home, self.out), self._folder / "said.txt")

    def _finish(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        process = self._start()
        code = process.wait()
        if code:
            raise RuntimeError(f"exit code {code}: {process.text()[-800:]}")

    def run(self, rng: random.Random, most: int = _MOST) -> KillReport:
        """Kill a new run at random moments, up to `most` times, and compare what it leaves."""
        begun, kills = time.monotonic(), 0
        forget(self.out)
        for _ in range(rng.randint(1, most)):
            process = self._start()
            moment = rng.random() * self.takes
            while process.poll() is None and time.monotonic() - process.begun < moment:
                time.sleep(0.001)
            kills += process.kill()
            orphans = process.orphans()
            if orphans:
                fault = f"{len(orphans)} workers outlived the kill"
                return KillReport(kills, fault, time.monotonic() - begun)
            if process.code and process.code > 0:
                fault = f"exit code {process.code}: {process.text()[-800:]}"
                return KillReport(kills, fault, time.monotonic() - begun)
        try:
            self._finish()
            fault = differences(self.wanted, self.scene.left(self.out))
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        return KillReport(kills, fault, time.monotonic() - begun)


def run(options: Options) -> Report:
    """`count` kills in all, spread over the commands."""
    prepare()
    names = list(options.only or SCENES)
    kept = options.state / "kills.json"
    done = _recalled(kept, options)
    failed: list[str] = done.pop("failed", [])
    with tempfile.TemporaryDirectory() as folder:
        for place, name in enumerate(names):
            share = (options.count + place) // len(names)
            row = done.setdefault(name, {"command": name, "runs": 0, "kills": 0, "faults": 0})
            if row["kills"] >= share:
                continue
            kills = Kills(Path(folder), name)
            while row["kills"] < share and row["runs"] < 4 * share:  # one that fails at once
                if options.is_over:
                    return Report(list(done.values()), failed, False)
                rng = random.Random(f"{options.seed} {name} {row['runs']}")
                found = kills.run(rng, min(_MOST, share - row["kills"]))
                row["runs"] += 1
                row["kills"] += found.kills
                row["faults"] += bool(found.fault)
                if found.fault:
                    failed.append(f"{name}, run {row['runs']}: {found.fault}")
                    print(f"FAILED {failed[-1]}", flush=True)
                facts = {"seed": options.seed}
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps({"facts": facts, "rows": {**done, "failed": failed}}))
            print(f"{name}: {row['kills']} kills, {row['faults']} faults", flush=True)
    return Report(list(done.values()), failed)


def _recalled(kept: Path, options: Options) -> dict[str, Any]:
    if kept.exists():
        table = json.loads(kept.read_text())
        if table["facts"] == {"seed": options.seed}:
            rows: dict[str, Any] = table["rows"]
            return rows
    return {}
