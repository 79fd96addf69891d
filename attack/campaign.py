"""What campaigns of damaged files have in common: seeds, counts, what is kept of failures."""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from attack.registry import Options, Report
from attack.sandbox import ACCEPTED, FAILURES, Result, Sandbox, in_a_fork

KINDS = ("accepted", "changed", "refused", *FAILURES)


class Case(NamedTuple):
    """One damaged file, read in one way."""

    target: str
    """The file that is damaged, and perhaps after a slash the way in which it is read."""
    number: int
    seed: int

    @property
    def file(self) -> str:
        return self.target.partition("/")[0]

    @property
    def way(self) -> str:
        return self.target.partition("/")[2]

    @property
    def rng(self) -> random.Random:
        """The same for every way."""
        return random.Random(f"{self.seed} {self.file} {self.number}")

    def __str__(self) -> str:
        """As `replay` takes it."""
        return f"{self.target}:{self.seed}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Case:
        target, seed, number = text.rsplit(":", 2)
        return cls(target, int(number), int(seed))


class Prepared(Protocol):
    """The undamaged files of a campaign, and what is read from them."""

    def run(self, case: Case) -> Result: ...

    def mutant(self, case: Case) -> tuple[bytes, str]:
        """The damaged bytes, and what was done in words."""
        ...

    def read(self, case: Case, data: bytes) -> Result:
        """What becomes of these bytes in place of the case's file."""
        ...

    def costs(self, case: Case) -> int:
        """Cases that cost more come later; of equal ones, targets take turns."""
        ...

    def whole(self, case: Case) -> bytes:
        """The undamaged bytes."""
        ...


class Campaign(Prepared, Protocol):
    """Prepared files, and how they are listed."""

    def targets(self, count: int) -> dict[str, int]:
        """How many cases each has, of a campaign of `count`."""
        ...

    def row_of(self, target: str) -> str:
        """The row of the table that a target counts in."""
        ...


class Tally:
    """Counts of a campaign by target, kept on the disk so that a stopped run goes on."""

    def __init__(self, file: Path | None, facts: Mapping[str, object]) -> None:
        self._file, self._facts = file, dict(facts)
        self.counts: dict[str, Counter[str]] = {}
        self.done: Counter[str] = Counter()
        self.slowest: dict[str, float] = {}
        self.peak: dict[str, int] = {}
        self.failed: list[str] = []
        if file is not None and file.exists():
            self._recall(json.loads(file.read_text()))

    def _recall(self, kept: dict[str, object]) -> None:
        if kept.get("facts") != self._facts:
            return
        table = kept["targets"]
        assert isinstance(table, dict)
        for name, one in table.items():
            self.counts[name] = Counter(one["counts"])
            self.done[name], self.slowest[name] = one["done"], one["slowest"]
            self.peak[name] = one["peak"]
        failed = kept["failed"]
        assert isinstance(failed, list)
        self.failed = failed

    def add(self, case: Case, result: Result) -> None:
        name = case.target
        self.counts.setdefault(name, Counter())[result.outcome] += 1
        self.done[name] += 1
        self.slowest[name] = max(self.slowest.get(name, 0.0), result.seconds)
        self.peak[name] = max(self.peak.get(name, 0), result.peak)
        if result.is_failure:
            self.failed.append(f"{case}: {result.outcome}: {result.detail}")

    def keep(self) -> None:
        if self._file is None:
            return
        table = {
            name: {
                "counts": dict(self.counts[name]),
                "done": self.done[name],
                "slowest": self.slowest[name],
                "peak": self.peak[name],
            }
            for name in self.counts
        }
        kept = {"facts": self._facts, "targets": table, "failed": self.failed}
        new = self._file.with_suffix(".new")
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(kept, indent=1))
        new.replace(self._file)

    def rows(self, group: Callable[[str], str] = str) -> list[dict[str, object]]:
        """The table, one row for each group of targets."""
        groups: dict[str, list[str]] = {}
        for name in self.counts:
            groups.setdefault(group(name), []).append(name)
        return [
            {
                "target": row,
                "cases": sum(self.done[name] for name in names),
                **{kind: sum(self.counts[name][kind] for name in names) for kind in KINDS},
                "slowest_s": round(max(self.slowest[name] for name in names), 1),
                "peak_mib": max(self.peak[name] for name in names) // 2**20,
            }
            for row, names in sorted(groups.items())
        ]


def attack(
    prepared: Prepared,
    targets: Mapping[str, int],
    tally: Tally,
    *,
    seed: int,
    until: float | None = None,
    keep_in: Path | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Run so many cases of each target that `tally` lacks; True if all were run.

    Targets take turns, so that a run that is stopped has looked at all of them.

    Args:
        until: a moment of `time.monotonic` at which to stop.
        keep_in: a folder for the damaged files that failed.
    """
    waiting: list[Case] = []
    in_a_fork(lambda: _check(prepared, targets))

    def one(index: int) -> Result:
        return prepared.run(waiting[index])

    most = max(targets.values(), default=0)
    waiting += [
        Case(name, number, seed)
        for number in range(most)
        for name, count in targets.items()
        if tally.done[name] <= number < count
    ]
    waiting.sort(key=lambda case: prepared.costs(case))
    told = time.monotonic()
    with Sandbox(one) as sandbox:
        for index, case in enumerate(waiting):
            if until is not None and time.monotonic() > until:
                tally.keep()
                return False
            result = sandbox.run(index)
            tally.add(case, result)
            if result.is_failure:
                _report(prepared, case, result, keep_in, say)
            if time.monotonic() - told > 20:
                told = time.monotonic()
                tally.keep()
                say(f"{index + 1} of {len(waiting)} cases, {len(tally.failed)} failures")
    tally.keep()
    return True


def _check(prepared: Prepared, targets: Iterable[str]) -> None:
    """A reader that refuses the whole file would refuse all damage, and say nothing."""
    for target in targets:
        case = Case(target, 0, 0)
        result = prepared.read(case, prepared.whole(case))
        if result.outcome != ACCEPTED:
            raise AssertionError(f"{target}: the whole file is {result.outcome}: {result.detail}")


def _report(
    prepared: Prepared, case: Case, result: Result, folder: Path | None, say: Callable[[str], None]
) -> None:
    data, how = prepared.mutant(case)
    place = ""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / re.sub(r"[^\w.-]", "_", str(case))
        file.write_bytes(data)
        file.with_name(f"{file.name}.txt").write_text(
            f"{case}\n{how}\n{result.outcome}\n{result.detail}\n"
        )
        place = f"; kept as {file}"
    last = result.detail.strip().splitlines()[-1:] or [""]
    say(f"FAILED {case} ({how}): {result.outcome}: {last[0][:300]}{place}")
    sys.stdout.flush()


def run_campaign(options: Options, name: str, make: Callable[[Path], Campaign]) -> Report:
    """A whole campaign."""
    tally = Tally(options.state / f"{name}.json", {"seed": options.seed})
    with tempfile.TemporaryDirectory() as folder:
        prepared = make(Path(folder))
        every = prepared.targets(options.count)
        wanted = {one: n for one, n in every.items() if not options.only or one in options.only}
        done = attack(
            prepared,
            wanted,
            tally,
            seed=options.seed,
            until=options.until,
            keep_in=options.state / "failures",
        )
    return Report(tally.rows(prepared.row_of), tally.failed, done)
