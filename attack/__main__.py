"""The one way to attack: `python -m attack NAME`, `python -m attack all`, `... replay CASE`.

Prints its seed. What is done is kept in build/attack, so that a stopped run goes on; the table of
a finished one is written to attack/results. A failure prints its case, which `replay` runs again,
and keeps the damaged file in build/attack/failures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from attack.registry import ATTACKS, Options, Report, listing

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "attack" / "results"
STATE = ROOT / "build" / "attack"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m attack",
        usage="%(prog)s [--list] NAME [options]",
        description=__doc__,
        epilog=f"attacks:\n{listing()}\n  all: these, one after the other",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="names, and what each does")
    parser.add_argument("name", nargs="?", metavar="NAME", choices=[*ATTACKS, "all", "replay"])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of replay: target:seed:number")
    parser.add_argument("--seed", type=int, help="by default that of the stopped run, or a new one")
    parser.add_argument("--count", type=int, help="cases of each target, kills in all, seconds")
    parser.add_argument("--seconds", type=float, help="stop after so long; go on another time")
    parser.add_argument("--only", default="", help="targets, by comma")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the tables")
    parser.add_argument("--state", type=Path, default=STATE, help="folder of what is done so far")
    given = parser.parse_args(words)
    if given.list or given.name is None:
        print(listing())
        return 0 if given.list else 2
    if given.name == "replay":
        return _replay(given.cases)
    names = list(ATTACKS) if given.name == "all" else [given.name]
    until = None if given.seconds is None else time.monotonic() + given.seconds
    only = tuple(name for name in given.only.split(",") if name)
    faults, stopped = 0, False
    for name in names:
        seed = _seed(given.state, name, given.seed)
        count = ATTACKS[name].count if given.count is None else given.count
        print(f"{name}: seed {seed}", flush=True)
        found = _run(name, Options(seed, count, only, given.state, until), given.out)
        faults += len(found.failed)
        stopped |= not found.finished
    return 1 if faults or stopped else 0


def _seed(state: Path, name: str, asked: int | None) -> int:
    """That of the run which was stopped, unless another is asked for."""
    file = state / f"{name}.seed"
    if asked is None and file.exists():
        return int(file.read_text())
    seed = random.SystemRandom().randrange(10**6) if asked is None else asked
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(seed))
    return seed


def _run(name: str, options: Options, out: Path) -> Report:
    """Run an attack and write its table: of a stopped one, what was done so far."""
    report: Report = importlib.import_module(f"attack.{name}").run(options)
    from benchmarks.common import print_table, write_csv

    facts = {"seed": options.seed, "pillow": _version("pillow")}
    if report.rows:
        print_table(report.rows)
        rows = [{**row, **facts} for row in report.rows]
        # Of some targets alone: the rows of the others stay.
        write_csv(name, rows, out, device="cpu", key=next(iter(rows[0])) if options.only else "")
    for line in report.failed:
        print(f"FAILED {line.splitlines()[0]}")
    print(f"{name}: {len(report.failed)} failures, seed {options.seed}")
    if report.finished:
        (options.state / f"{name}.seed").unlink(missing_ok=True)
        (options.state / f"{name}.json").unlink(missing_ok=True)
    else:
        print(f"{name}: stopped; the same command goes on", flush=True)
    return report


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _replay(cases: Sequence[str]) -> int:
    """Run cases again in this process, where a debugger can look."""
    from attack.campaign import Case
    from attack.files import TARGETS, Files
    from attack.images import Images

    worst = 0
    for text in cases:
        case = Case.parse(text)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            prepared = Files(place, [case.file]) if case.file in TARGETS else Images(place)
            result = prepared.run(case)
            print(json.dumps({"case": text, "how": prepared.mutant(case)[1], **result._asdict()}))
            print(result.detail)
            worst = max(worst, int(result.is_failure))
    return worst


if __name__ == "__main__":
    sys.exit(main())
