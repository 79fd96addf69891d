"""The tables of the diary, from the results files.

    python -m research.tables [--check]

The diary asks for a table with a pair of comments, as the pages of docs/ do: recipes and stages,
the teacher by size, its principal components, the first core beside the patches, what was
memorised, the rules of merging, what choosing by content saves, and the shipped weights at every budget.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks.rows import Rows, number, read, read_csv, table
from benchmarks.scores import CONTROL, NAMES, cosines
from benchmarks.tables import Table, fill, update
from research import RESULTS, scores
from research.elastic import compared

DIARY = Path(__file__).parent / "diary.md"


def teacher_sizes(rows: Rows) -> str:
    return table(
        ["pixels", "entropy of its classes, nats", "likeliest class", "variance of the feature"],
        [
            [r["size"], *(f"{float(r[k]):.2f}" for k in ("entropy", "likeliest")),
             f"{float(r['variance']):.0f}"]
            for r in rows
        ],
    )  # fmt: skip


def siblings(run: str) -> dict[str, tuple[str, str]]:
    """Small, and tiny beside it, in one run."""
    return {"small": (run, ""), "tiny": (run, "tiny")}


def controlled(run: str) -> dict[str, tuple[str, str]]:
    """The students of the controlled experiment."""
    return siblings(run) | pair(run)


def apart(small: str, tiny: str) -> dict[str, tuple[str, str]]:
    """Each in a run of its own."""
    return {"small": (small, ""), "tiny": (tiny, "")}


def pair(run: str) -> dict[str, tuple[str, str]]:
    """Small and the dense ViT in one run."""
    return {"small": (run, ""), NAMES[CONTROL]: (run, "dense")}


def controlled_apart(small: str, dense: str) -> dict[str, tuple[str, str]]:
    """Small and the dense ViT, each in a run of its own."""
    return {"small": (small, ""), NAMES[CONTROL]: (dense, "")}


def basis(rows: Rows) -> str:
    """Bands of the teacher's principal components: their variance, what students explain of it."""
    students = list(dict.fromkeys((r["weights"], r["cores"]) for r in rows))
    full = [(name, cores) for name, cores in students if cores == "64"]
    found = {(r["components"], r["weights"], r["cores"]): r for r in rows}
    lines = []
    for band in dict.fromkeys(r["components"] for r in rows):
        mine = [found[(band, *student)] for student in students]
        lines.append(
            [
                band,
                f"{float(mine[0]['share of variance']):.0%}",
                *(f"{float(r['explained']):.0%}" for r in mine),
                *(f"{float(found[(band, *one)]['cosine up to here']):.2f}" for one in full),
                f"{float(mine[0]['ceiling']):.2f}",
            ]
        )
    names = [f"{name}, C = {cores}" for name, cores in students]
    up_to = [f"cosine up to here, {name}, C = {cores}" for name, cores in full]
    return table(["components", "variance", *names, *up_to, "ceiling"], lines)


def first_core(rows: Rows) -> str:
    """Cosine and divergence of the first core and of the mean of the patches."""
    return _beside(rows, "feature", lambda r: f"{float(r['cls_cos']):.3f} / {float(r['kl']):.2f}")


def by_heart(rows: Rows) -> str:
    """Cosines, divergence and agreement on photos held out and on those trained on."""

    def cell(r: dict[str, str]) -> str:
        cls, dense, agree = cosines(r)
        return f"{cls} / {dense} / {float(r['kl']):.2f} / {agree}"

    return _beside(rows, "photos", cell)


def _beside(rows: Rows, column: str, cell: Callable[[dict[str, str]], str]) -> str:
    """Weights at each budget, with a column for each value of one of the results' columns."""
    values = list(dict.fromkeys(r[column] for r in rows))
    found = {(r["weights"], r["cores"], r[column]): r for r in rows}
    return table(
        ["weights", "cores", *values],
        [
            [name, cores, *(cell(found[name, cores, value]) for value in values)]
            for name, cores in dict.fromkeys((r["weights"], r["cores"]) for r in rows)
        ],
    )


def stage(rows: Rows, *, students: dict[str, tuple[str, str]], by: str) -> str:
    """Cosines and agreement of students, each a run and a name in it, by samples or by size."""
    found = {(r["run"], r["student"], r[by], r["cores"]): r for r in rows}
    columns, titles = [], []
    for name, of in students.items():
        budgets = ("64",) if name == NAMES[CONTROL] else ("8", "64")
        columns += [(*of, cores) for cores in budgets]
        titles += [name] if len(budgets) == 1 else [f"{name}, C = 8", "C = 64"]
    runs = {run for run, _ in students.values()}
    places = sorted({int(r[by]) for r in rows if r["run"] in runs})
    lines = []
    for place in places:
        line = [str(place) if by == "size" else f"{place / 1e6:.2f} M"]
        for run, student, cores in columns:
            row = found.get((run, student, str(place), cores))
            line.append(" / ".join(cosines(row)) if row else "")
        lines.append(line)
    return table(["px" if by == "size" else by, *titles], lines)


def means(rows: Rows, *, run: str, before: dict[str, str]) -> str:
    """By what the weights of a run are shipped or not, beside those shipped before, by their runs:
    cosines with all cores, means over 192 to 512 px."""
    found = {(r["run"], r["student"], r["size"], r["cores"]): r for r in rows}
    lines = []
    for name, (_, student) in siblings(run).items():
        for called, of in ((f"{name}, shipped before", before[name]), (name, run)):
            mine = [found[of, student, size, "64"] for size in ("192", "256", "384", "512")]
            both = ([float(r[kind]) for r in mine] for kind in ("cls_cos", "dense_cos"))
            cls, dense = map(fmean, both)
            lines.append([called, *(f"{x:.4f}" for x in (cls, dense, fmean((cls, dense))))])
    return table(["", "CLS", "dense", "mean"], lines)


SEARCH = {
    "nothing: the weights it starts from": ("search-start", ""),
    "coordinates left alone": ("search-a", ""),
    "coordinates stretched, as published": ("search-a", "stretched"),
    "left alone, AdamW x 0.3": ("search-b", ""),
    "left alone, AdamW x 0.1": ("search-b", "adamw-less"),
    "left alone, learning rate x 0.5": ("search-a", "slower"),
    "left alone, mixup 0.3 and cutmix 0.3": ("search-mixed", ""),
    "left alone, KL x 2": ("search-kl1", ""),
    "left alone, the paper's crops and TrivialAugment": ("search-trivial", ""),
    "left alone, a quarter of the batch": ("search-quarter", ""),
}


def search(rows: Rows) -> str:
    found = {(r["run"], r["student"], r["cores"]): r for r in rows}
    return table(
        ["what is done for 250 steps", "C = 8", "C = 64"],
        [
            [what, *(" / ".join(cosines(found[run, student, c])) for c in ("8", "64"))]
            for what, (run, student) in SEARCH.items()
        ],
        align="---",
    )


def _stage(students: dict[str, tuple[str, str]], by: str) -> Callable[[Rows], str]:
    """A table of students, each a run and a name in it, by "samples" or by "size"."""
    return partial(stage, students=students, by=by)


def _means(run: str, **before: str) -> Callable[[Rows], str]:
    """A table of small and tiny of a run beside those shipped before, by their runs."""
    return partial(means, run=run, before=before)


def rules(rows: Rows) -> str:
    """Thousandths of 1 - cosine with the full pass, CLS / patches, at equal shares of the work."""
    lines = []
    for row in compared(rows):
        found = [(row[f"cls {at}"], row[f"patches {at}"]) for at in (0.7, 0.6)]
        cells = [" / ".join(number(str(x)) for x in pair if x != "") for pair in found]
        lines.append([str(row["weights"]), str(row["rule"]), *cells])
    return table(["", "rule", "at .7 of the work", "at .6"], lines)


def choosing(rows: Rows) -> str:
    """The part of the oracle's saving at each promise: at 95 of 100, and with the bound."""
    promises = sorted({row["promise"] for row in rows})
    lines = []
    for key in dict.fromkeys((row["choice"], row["tells"]) for row in rows):
        cells = []
        for promise in promises:
            some = [r for r in rows if (r["choice"], r["tells"], r["promise"]) == (*key, promise)]
            by_way = {r["allows for"]: float(r["saved of oracle"]) for r in some}
            ways = [by_way[way] for way in ("95 of 100", "bound") if way in by_way]
            cells.append(" / ".join(f"{x:.2f}" for x in ways))
        lines.append([*key, *cells])
    return table(["choice", "what tells", *promises], lines)


TABLES: dict[str, Table] = {
    "choosing": ("choosing", choosing),
    "rules": ("elastic_rules", rules),
    "teacher-sizes": ("teacher_sizes", teacher_sizes),
    "stage-1": ("training", _stage(controlled("coco-1"), "samples")),
    "stage-2": ("training", _stage(controlled("coco-2"), "size")),
    "search": ("training", search),
    "stage-1-longer": ("training", _stage(apart("small-1", "tiny-1"), "samples")),
    "stage-2-longer": ("training", _stage(apart("small-2", "tiny-2"), "size")),
    "dense-longer": (
        "training",
        _stage(controlled_apart("small-1", "dense-1"), "samples"),
    ),
    "dense-longer-sizes": (
        "training",
        _stage(controlled_apart("small-2", "dense-2"), "size"),
    ),
    "pair-1": ("training", _stage(pair("pair-1"), "samples")),
    "pair-2": ("training", _stage(pair("pair-2"), "size")),
    "stage-1-further": ("training", _stage(siblings("further-1"), "samples")),
    "stage-2-further": ("training", _stage(siblings("further-2"), "size")),
    "at-192": ("training", _stage(siblings("at192"), "samples")),
    "at-192-sizes": ("training", _stage(siblings("at192-sizes"), "size")),
    "on-192": ("training", _stage(siblings("on192"), "samples")),
    "on-192-sizes": ("training", _stage(siblings("on192-sizes"), "size")),
    "again-1": ("training", _stage(siblings("again-1"), "samples")),
    "again-2": ("training", _stage(siblings("again-2"), "size")),
    "again-means": ("training", _means("again-2", small="on192-sizes", tiny="on192-sizes")),
    "again-192": ("training", _stage(siblings("again192"), "samples")),
    "again-192-sizes": ("training", _stage(siblings("again192-sizes"), "size")),
    "dense-again-1": (
        "training",
        _stage(controlled_apart("again-1", "dense-again-1"), "samples"),
    ),
    "dense-again-2": (
        "training",
        _stage(controlled_apart("again-2", "dense-again-2"), "size"),
    ),
    "dense-192": ("training", _stage(controlled_apart("again192", "dense192"), "samples")),
    "dense-192-sizes": (
        "training",
        _stage(controlled_apart("again192-sizes", "dense192-sizes"), "size"),
    ),
    "again-192-means": (
        "training",
        _means("again192-sizes", small="on192-sizes", tiny="again-2"),
    ),
    "basis": ("basis", basis),
    "first-core": ("first_core", first_core),
    "by-heart": ("by_heart", by_heart),
    "every-budget": ("probes/shipped", scores.probes),
    "intervals": ("probes/intervals", scores.intervals),
    "gains": ("probes/shipped", scores.gains),
    "seeds": ("probes/seeds", scores.seeds),
    "rooms": ("probes/intervals", scores.rooms),
    "controlled": ("probes/control", scores.controlled),
    "shares": ("probes/control", scores.control),
    "controlled-seeds": ("probes/control/pair-2", scores.controlled_seeds),
    "costs": ("probes/control", scores.costs),
    "positions": ("positions", scores.positions),
    "routing": ("routing", scores.routing),
    "agreement": ("agreement", scores.agreement),
    "goals": ("probes/shipped", scores.goals),
}


def filled(text: str) -> str:
    """The diary with its tables as the results files have them."""
    return fill(text, TABLES, _rows)


def _rows(source: str) -> Rows:
    own = RESULTS / f"{source}.csv"
    return read_csv(own) if own.is_file() else read(source)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if any is stale")
    options = parser.parse_args(words)
    return update({DIARY: filled(DIARY.read_text(encoding="utf-8"))}, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
