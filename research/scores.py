"""Tables that only the diary shows: every budget, seeds, the controlled experiment step by step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.rows import Rows, read, table
from benchmarks.scores import (
    BLIND,
    BUDGETS,
    CONTROL,
    CONTROLLED,
    CONTROLLED_LINES,
    DRAWN,
    EXPERIMENT,
    NAMES,
    PROBES,
    ROOMS,
    SECOND,
    SHIPPED,
    SMALL,
    SMALL_CONTROL,
    TEACHER,
    TINY,
    Scores,
    after,
    cosines,
    every_probe,
    interval_ends,
    plain,
    ratio,
    samples_after,
    samples_seen,
    scores_in,
    shown,
)

EVERY_BUDGET = ("8", "16", "24", "32", "40", "48", "56", "64")
CLASSIFICATION = ("pets-knn", "pets-linear")


def probes(rows: Rows) -> str:
    return every_probe(rows, (BLIND, TEACHER, CONTROL), EVERY_BUDGET)


def control(_: Rows) -> str:
    """VECA-small's share of the dense ViT's scores, after the same steps."""
    lines = []
    for ours, theirs, recipe in EXPERIMENT:
        veca, dense = after(ours), after(theirs)
        seen = [recipe, *(f"{samples_after(run):.1f} M" for run in (ours, theirs))]
        for cores in BUDGETS:
            shares = (
                ratio(probe, veca[SMALL, cores, probe], dense[CONTROL, "", probe])
                for probe in PROBES
            )
            lines.append([*seen, cores, *(f"{100 * x:.1f} %" for x in shares)])
    header = ["recipe", "samples of VECA", "of the dense ViT", "cores"]
    return table([*header, *(plain(title) for title, _ in PROBES.values())], lines)


def controlled(_: Rows) -> str:
    """What VECA-small and the dense ViT reach after the same steps, with the latest recipe."""
    lines = []
    for ours, theirs, _recipe in SECOND:
        scores = {**after(ours), **after(theirs)}
        seen = f"{samples_after(ours):.1f} M"
        for name, cores in CONTROLLED_LINES:
            found = (shown(probe, scores[name, cores, probe]) for probe in PROBES)
            lines.append([seen, NAMES[name], cores, *found])
    return table(["samples of each", "", "cores", *(title for title, _ in PROBES.values())], lines)


def gains(rows: Rows) -> str:
    """The shipped weights beside those that the experiment's first part ended with, all cores."""
    first = EXPERIMENT[0].veca
    before, now = after(first), scores_in(rows)
    lines = []
    for name in (SMALL, TINY):
        for samples, scores in ((samples_after(first), before), (samples_seen(name), now)):
            found = (shown(probe, scores[name, "64", probe]) for probe in PROBES)
            lines.append([NAMES[name], f"{samples:.1f} M", *found])
    return table(["", "samples", *(title for title, _ in PROBES.values())], lines)


def costs(rows: Rows) -> str:
    """GFLOPs of one image at the sizes that the probes use."""
    flops = {(r["backbone"], r["cores"], r["probe"]): float(r["flops"]) for r in rows if r["flops"]}
    wanted = [p for p in PROBES if p != "pets-linear"]  # sees what 10-NN sees
    lines = [(SMALL, "8"), (SMALL, "64"), (CONTROL, "")]
    return table(
        ["", "cores", *(PROBES[p][0].split(",")[0] for p in wanted)],
        [[NAMES[n], c, *(f"{flops[n, c, p] / 1e9:.2f}" for p in wanted)] for n, c in lines],
    )


def rooms(rows: Rows) -> str:
    """Depth in the rooms of NYUv2, and what is kept of 64 cores' and of the teacher's."""
    found = {(r["backbone"], r["cores"]): r for r in rows if r["probe"] == ROOMS}
    lines = []
    for name, cores in [
        (BLIND, ""),
        (TEACHER, ""),
        *((name, cores) for name in (SMALL, TINY) for cores in BUDGETS),
    ]:
        row = found[name, cores]
        chance = (float(row["high"]) - float(row["low"])) / 2
        lines.append(
            [
                NAMES[name],
                cores,
                f"{float(row['rmse']):.3f} ±{chance:.3f}",
                f"{float(row['abs_rel']):.3f}",
                f"{100 * float(row['delta1']):.1f}",
                _retention(row, "full") if cores not in ("", BUDGETS[-1]) else "",
                _retention(row, "teacher") if name != TEACHER else "",
            ]
        )
    header = ["", "cores", "RMSE m", "abs rel", "delta1 %", "of 64 cores", "of the teacher"]
    return table(header, lines)


def seeds(rows: Rows) -> str:
    """RMSE of depth of the shipped weights by the seed of the probe, 0 in other tables."""
    return _by_seed(
        [*read("probes/shipped"), *rows], [(x, c) for x in (SMALL, TINY) for c in BUDGETS]
    )


def controlled_seeds(rows: Rows) -> str:
    """The same of VECA-small and the dense ViT where their common run ended."""
    return _by_seed(rows, CONTROLLED_LINES)


def _by_seed(rows: Rows, lines: Sequence[tuple[str, str]]) -> str:
    depth = [r for r in rows if r["probe"].startswith("scau-depth")]
    found = {(r["backbone"], r["cores"], r["probe"]): float(r["rmse"]) for r in depth}
    runs = sorted({r["probe"] for r in depth})  # scau-depth, scau-depth-1 and so on
    titles = (f"seed {run.removeprefix('scau-depth').lstrip('-') or 0}" for run in runs)
    return table(
        ["", "cores", *titles],
        [
            [NAMES[name], cores, *(f"{found[name, cores, run]:.3f}" for run in runs)]
            for name, cores in lines
        ],
    )


def first_names() -> dict[str, str]:
    """What networks are called where the control is that of the experiment's first part."""
    seen = f"{samples_after(EXPERIMENT[0].dense):.1f} M"
    return {**NAMES, **{name: f"{NAMES[name]}, {seen}" for name in (CONTROL, SMALL_CONTROL)}}


def goals(rows: Rows) -> str:
    """What the weights were to reach, what they reach, and whether that is enough."""
    scores = scores_in(rows)
    mine = (SHIPPED, "", "64")
    cosines = [r for r in read("training") if (r["run"], r["student"], r["cores"]) == mine]
    by_size = {int(r["size"]): (float(r["cls_cos"]), float(r["dense_cos"])) for r in cosines}
    samples = samples_seen(SMALL)
    knn, linear = (scores[SMALL, "64", p] for p in CLASSIFICATION)
    gaps = [scores[SMALL, "64", p] - scores[TINY, "64", p] for p in CLASSIFICATION]
    kept = {
        name: [scores[name, "8", p] / scores[name, "64", p] for p in CLASSIFICATION]
        for name in (SMALL, TINY)
    }
    rooms_too = {**scores, **scores_in(read(f"probes/intervals/{ROOMS}"))}
    falling = {
        title.split(",")[0]: [
            NAMES[name] for name in (SMALL, TINY) if not _rises(rooms_too, name, probe, metric)
        ]
        for probe, (title, metric) in DRAWN.items()
        if probe not in CLASSIFICATION
    }
    dense = after(CONTROLLED.dense)
    shares = {
        plain(title): ratio(probe, scores[SMALL, "64", probe], dense[CONTROL, "", probe])
        for probe, (title, _) in PROBES.items()
    }
    first = by_size[192]
    drift = max(
        abs(x / y - 1)
        for size in (256, 384, 512)
        for x, y in zip(by_size[size], first, strict=True)
    )
    rising = [task for task, names in falling.items() if not names]
    not_so = [f"{task} ({', '.join(names)})" for task, names in falling.items() if names]
    lines = [
        ("15 M samples for small", f"{samples:.1f} M", samples >= 15),
        *(
            (
                f"{kind} cosine {goal} on held-out photos (small, C = 64)",
                f"{cosine:.3f} (256 px, its best size)",
                cosine >= goal,
            )
            for kind, goal, cosine in zip(("CLS", "dense"), (0.72, 0.62), by_size[256], strict=True)
        ),
        ("Pets 10-NN 60 % (small, C = 64)", f"{100 * knn:.1f} %", knn >= 0.60),
        ("Pets linear 78 % (small, C = 64)", f"{100 * linear:.1f} %", linear >= 0.78),
        (
            "tiny within 12 points of small on both",
            " and ".join(f"{100 * gap:.1f}" for gap in gaps) + " points",
            max(gaps) <= 0.12,
        ),
        (
            "classification at C = 8 keeps 96 % of C = 64",
            "; ".join(
                f"{NAMES[name]} " + " and ".join(f"{100 * x:.1f} %" for x in shares_here)
                for name, shares_here in kept.items()
            ),
            min(min(xs) for xs in kept.values()) >= 0.96,
        ),
        (
            "dense tasks rise with C: 8, 16, 32, 64",
            f"{', '.join(rising)}" + (f"; not {', '.join(not_so)}" if not_so else ""),
            not not_so,
        ),
        (
            "VECA-small at C = 64 keeps 97 % of the dense control, after "
            f"{samples:.1f} M samples each",
            "; ".join(f"{title} {100 * share:.1f} %" for title, share in shares.items()),
            min(shares.values()) >= 0.97,
        ),
        (
            "cosines at 256, 384 and 512 px within 10 % of those at 192 px (small, C = 64)",
            f"within {100 * drift:.1f} %",
            drift <= 0.10,
        ),
    ]
    return table(
        ["goal", "reached", ""],
        [[goal, reached, "yes" if met else "**no**"] for goal, reached, met in lines],
        align="---",
    )


def _rises(scores: Scores, name: str, probe: str, metric: str) -> bool:
    steps = [scores[name, cores, probe] for cores in BUDGETS]
    steps = [-x for x in steps] if metric == "rmse" else steps
    return all(a < b for a, b in itertools.pairwise(steps))


def agreement(rows: Rows) -> str:
    columns = [(SMALL, "8"), (SMALL, "64"), (TINY, "8"), (TINY, "64"), (CONTROL, "")]
    found = {(r["weights"], r["cores"], r["size"]): r for r in rows}
    return table(
        ["pixels", *(f"{NAMES[n]}{f', C = {c}' if c else ''}" for n, c in columns)],
        [
            [
                size,
                *(" / ".join(cosines(found[n, c, size])[:2]) for n, c in columns),
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
                *(" / ".join(cosines(found[name, what])[:2]) for name in names),
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


def intervals(_: Rows) -> str:
    """How far chance reaches in the scores themselves: half of the intervals."""
    ends = interval_ends()
    lines = [(TEACHER, ""), *((name, cores) for name in (SMALL, TINY) for cores in ("8", "64"))]

    def half(name: str, cores: str, probe: str) -> str:
        low, high = ends[name, cores, probe]
        return f"±{shown(probe, (high - low) / 2)}"

    return table(
        ["", "cores", *(title for title, _ in PROBES.values())],
        [[NAMES[name], cores, *(half(name, cores, p) for p in PROBES)] for name, cores in lines],
    )


def _retention(row: dict[str, str], of: str) -> str:
    """A share with the ends of its interval, by the record's own numbers."""
    low, high = (100 * float(row[f"{of}_{end}"]) for end in ("low", "high"))
    return f"{100 * float(row[f'retention_{of}']):.1f} % ({low:.1f}–{high:.1f})"
