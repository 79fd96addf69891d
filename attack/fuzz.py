"""Coverage-guided fuzzing of readers, by atheris (the extra `attack`), from attack/corpus.

What it finds new is kept in build/attack/corpus, so that the next run goes on from there. A crash
is kept in build/attack/failures; `python -m attack.fuzz READER FILE` runs it again.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from attack.registry import Options, Report

READERS = ("images", "safetensors", "pt", "manifests", "settings")
CORPUS = Path(__file__).with_name("corpus")
_RUNS = re.compile(r"^#(\d+)\s.*?cov: (\d+)", re.MULTILINE)
_FAILED = ("foreign", "hang", "over memory")


def run(options: Options) -> Report:
    """Fuzz each reader for `count` seconds."""
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: skipped, atheris is not installed (pip install 'veca[attack]')")
        return Report([{"reader": name, "outcome": "skipped"} for name in READERS], [])
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in options.only or READERS:
        if options.is_over:
            return Report(rows, failed, False)
        row, said = fuzzed(name, options.seed, options.count, options.state)
        rows.append(row)
        print(row, flush=True)
        if row["outcome"] in _FAILED:
            failed.append(f"{name}: {row['outcome']}: {said[-600:]}")
            print(said[-3000:])
    return Report(rows, failed)


def fuzzed(name: str, seed: int, seconds: int, state: Path) -> tuple[dict[str, Any], str]:
    """One reader in a process of its own, and what that said."""
    grown, crashes = state / "corpus" / name, state / "failures"
    for folder in (grown, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    words = [
        *(grown, CORPUS / name, f"-seed={seed}", f"-max_total_time={seconds}", "-timeout=10"),
        *("-rss_limit_mb=2048", "-max_len=20000", f"-artifact_prefix={crashes}/fuzz-{name}-"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "attack.fuzz", name, *map(str, words)],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    said = done.stderr + done.stdout
    numbers = _RUNS.findall(said)
    outcome = "held"
    if done.returncode:
        timed, grew = "libFuzzer: timeout" in said, "out-of-memory" in said
        outcome = "hang" if timed else "over memory" if grew else "foreign"
    runs, coverage = (int(n) for n in numbers[-1]) if numbers else (0, 0)
    row = {"reader": name, "seconds": seconds, "runs": runs, "coverage": coverage}
    return {**row, "outcome": outcome}, said


def main() -> None:
    """`python -m attack.fuzz READER [libFuzzer's options, folders or files]`."""
    import atheris

    name, words = sys.argv[1], sys.argv[2:]
    with atheris.instrument_imports(include=["veca"]):
        from attack import readers
    atheris.Setup([sys.argv[0], *words], lambda data: readers.try_one(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
