"""Tables of how the weights learnt: recipes and stages, and what was looked at on the way.

That is agreement with the teacher by size, positions, routing, the teacher by size, its principal
components, the first core beside the patches, and what is known by heart.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from rows import Rows, table
from scores import CONTROL, NAMES, SMALL, TINY, first_names


def agreement(rows: Rows) -> str:
    columns = [(SMALL, "8"), (SMALL, "64"), (TINY, "8"), (TINY, "64"), (CONTROL, "")]
    found = {(r["weights"], r["cores"], r["size"]): r for r in rows}
    return table(
        ["pixels", *(f"{NAMES[n]}{f', C = {c}' if c else ''}" for n, c in columns)],
        [
            [
                size,
                *(" / ".join(_cosines(found[n, c, size])[:2]) for n, c in columns),
            ]
            for size in dict.fromkeys(r["size"] for r in rows)
        ],
    )


def positions(rows: Rows) -> str:
    names = sorted({r["weights"] for r in rows}, key=list(NAMES).index)
    found = {(r["weights"], r["coordinates"]): r for r in rows}
    called = first_names()
    return table(
        ["coordinates of the patches", *(called[name] for name in names)],
        [
            [
                what if what == "shuffled" else f"x {float(what):g}",
                *(" / ".join(_cosines(found[name, what])[:2]) for name in names),
            ]
            for what in dict.fromkeys(r["coordinates"] for r in rows)
        ],
    )


def routing(rows: Rows) -> str:
    """The dense cosine at the last step, of every seed."""
    last = max(rows, key=lambda r: int(r["step"]))["step"]
    rows = [r for r in rows if r["step"] == last]
    seeds = sorted({r["seed"] for r in rows}, key=int)
    found = {(r["student"], r["cores"], r["seed"]): r for r in rows}
    return table(
        ["", "cores", *(f"seed {seed}" for seed in seeds)],
        [
            [name, cores, *(f"{float(found[name, cores, s]['dense_cos']):.3f}" for s in seeds)]
            for name, cores in dict.fromkeys((r["student"], r["cores"]) for r in rows)
        ],
    )


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
    cosines = [f"cosine up to here, {name}, C = {cores}" for name, cores in full]
    return table(["components", "variance", *names, *cosines, "ceiling"], lines)


def first_core(rows: Rows) -> str:
    """Cosine and divergence of the first core and of the mean of the patches."""
    return _beside(rows, "feature", lambda r: f"{float(r['cls_cos']):.3f} / {float(r['kl']):.2f}")


def by_heart(rows: Rows) -> str:
    """Cosines, divergence and agreement on photos held out and on those trained on."""

    def cell(r: dict[str, str]) -> str:
        cls, dense, agree = _cosines(r)
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
            line.append(" / ".join(_cosines(row)) if row else "")
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
            cosines = ([float(r[kind]) for r in mine] for kind in ("cls_cos", "dense_cos"))
            cls, dense = map(fmean, cosines)
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
            [what, *(" / ".join(_cosines(found[run, student, c])) for c in ("8", "64"))]
            for what, (run, student) in SEARCH.items()
        ],
        align="---",
    )


def _cosines(row: dict[str, str]) -> tuple[str, str, str]:
    return (
        f"{float(row['cls_cos']):.3f}",
        f"{float(row['dense_cos']):.3f}",
        f"{100 * float(row['agree']):.0f} %",
    )
