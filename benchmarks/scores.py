"""Tables of what the weights reach: probes, budgets, the dense control, agreement, training.

Results of the shipped weights are in results/probes; those of the controlled experiment, in which
small, tiny and a dense ViT learnt in the same steps, in results/control.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from rows import ROOT, Rows, read, table

PROBES = {
    "pets-knn": ("Pets, 10-NN %", "top1"),
    "pets-linear": ("Pets, linear %", "top1"),
    "pets-trimaps": ("Pets trimaps, mIoU %", "miou"),
    "camvid": ("CamVid, mIoU %", "miou"),
    "scau-depth": ("SCAU, RMSE m", "rmse"),
}
"""Folder of the results -> what its column is called, and its score."""
BUDGETS = ("8", "16", "32", "64")
SMALL, TINY, CONTROL = "veca_small_patch16", "veca_tiny_patch16", "dense_vit_small"
TEACHER, SMALL_CONTROL = "efficientnet-lite2", "veca_small_control"
NAMES = {
    TEACHER: "teacher",
    CONTROL: "dense control",
    SMALL: "small",
    TINY: "tiny",
    SMALL_CONTROL: "small beside the control",
}

Scores = dict[tuple[str, str, str], float]
"""(backbone, cores, probe) -> its score."""


def probes(rows: Rows, budgets: Sequence[str] = tuple(str(c) for c in range(8, 65, 8))) -> str:
    scores = _scores([*read("control"), *rows])
    lines = [(TEACHER, ""), (CONTROL, ""), *((x, c) for x in (SMALL, TINY) for c in budgets)]
    return table(
        ["", "cores", *(title for title, _ in PROBES.values())],
        [
            [
                NAMES[name],
                cores,
                *(_score(probe, scores.get((name, cores, probe))) for probe in PROBES),
            ]
            for name, cores in lines
        ],
    )


def probes_short(rows: Rows) -> str:
    return probes(rows, ("8", "64"))


def control(rows: Rows) -> str:
    """VECA-small's share of the dense ViT's scores: after the same steps, and as it is shipped."""
    beside, shipped = _scores(rows), _scores(read("probes"))
    lines = []
    for samples, scores in ((samples_seen(CONTROL), beside), (samples_seen(SMALL), shipped)):
        for cores in BUDGETS:
            shares = (
                _ratio(probe, scores[SMALL, cores, probe], beside[CONTROL, "", probe])
                for probe in PROBES
            )
            lines.append([f"{samples:.1f} M", cores, *(f"{100 * x:.1f} %" for x in shares)])
    header = ["samples of VECA", "cores", *(_plain(title) for title, _ in PROBES.values())]
    return table(header, lines)


def gains(rows: Rows) -> str:
    """The shipped weights beside those of the controlled experiment, with all cores."""
    before, now = _scores(read("control")), _scores(rows)
    lines = []
    for name in (SMALL, TINY):
        for samples, scores in ((samples_seen(CONTROL), before), (samples_seen(name), now)):
            found = (_score(probe, scores[name, "64", probe]) for probe in PROBES)
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


def budgets(rows: Rows) -> str:
    """What smaller budgets keep of the score with all cores."""
    scores = _scores(rows)
    lines = []
    for name in (SMALL, TINY):
        for cores in BUDGETS[:-1]:
            line = [NAMES[name], cores]
            for probe in PROBES:
                ratio = _ratio(probe, scores[name, cores, probe], scores[name, "64", probe])
                line.append(f"{100 * ratio:.1f} %")
            lines.append(line)
    return table(["", "cores", *(_plain(title) for title, _ in PROBES.values())], lines)


def _scores(rows: Rows) -> Scores:
    return {
        (r["backbone"], r["cores"], r["probe"]): float(r[PROBES[r["probe"]][1]])
        for r in rows
        if r["probe"] in PROBES
    }


def _ratio(probe: str, ours: float, theirs: float) -> float:
    """Our share of their score; of an error, the inverse."""
    return theirs / ours if PROBES[probe][1] == "rmse" else ours / theirs


def samples_seen(name: str) -> float:
    """In millions; of shipped weights by their provenance, of the experiment's by its runs."""
    if name in (CONTROL, SMALL_CONTROL):
        seen: dict[str, int] = {}
        for row in read("training"):
            seen[row["run"]] = max(seen.get(row["run"], 0), int(row["samples"]))
        return (seen["coco-1"] + seen["coco-2"]) / 1e6
    places = (ROOT / "weights" / name, ROOT / "src" / "veca" / "assets" / "weights" / name)
    folder = next(place for place in places if place.is_dir())
    about = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    return float(about["samples_in_all"]) / 1e6


def _plain(title: str) -> str:
    """A column's title without its unit."""
    return title.rsplit(" ", 1)[0].rstrip(",")


def _score(probe: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if PROBES[probe][1] == "rmse" else f"{100 * value:.1f}"


def agreement(rows: Rows) -> str:
    columns = [(SMALL, "8"), (SMALL, "64"), (TINY, "8"), (TINY, "64"), (CONTROL, "")]
    found = {(r["weights"], r["cores"], r["size"]): r for r in rows}
    return table(
        ["pixels", *(f"{NAMES[n]}{f', C = {c}' if c else ''}" for n, c in columns)],
        [
            [
                size,
                *(
                    " / ".join(
                        f"{float(found[n, c, size][k]):.3f}" for k in ("cls_cos", "dense_cos")
                    )
                    for n, c in columns
                ),
            ]
            for size in dict.fromkeys(r["size"] for r in rows)
        ],
    )


def positions(rows: Rows) -> str:
    names = list(dict.fromkeys(r["weights"] for r in rows))
    found = {(r["weights"], r["coordinates"]): r for r in rows}
    return table(
        ["coordinates of the patches", *(NAMES[name] for name in names)],
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
    seeds = list(dict.fromkeys(r["seed"] for r in rows))
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


def stage_1(rows: Rows) -> str:
    """The first stage of all three students, as it went."""
    return _stage(rows, {"small": ("coco-1", ""), "tiny": ("coco-1", "tiny"), **_BESIDE}, "samples")


def stage_2(rows: Rows) -> str:
    """The same after the second stage, by size."""
    beside = {name: ("coco-2", student) for name, (_, student) in _BESIDE.items()}
    return _stage(rows, {"small": ("coco-2", ""), "tiny": ("coco-2", "tiny"), **beside}, "size")


def stage_1_longer(rows: Rows) -> str:
    return _stage(rows, {"small": ("small-1", ""), "tiny": ("tiny-1", "")}, "samples")


def stage_2_longer(rows: Rows) -> str:
    return _stage(rows, {"small": ("small-2", ""), "tiny": ("tiny-2", "")}, "size")


_BESIDE = {"dense control": ("coco-1", "dense")}


def _stage(rows: Rows, students: dict[str, tuple[str, str]], by: str) -> str:
    """Cosines and agreement of students, each a run and a name in it, by samples or by size."""
    found = {(r["run"], r["student"], r[by], r["cores"]): r for r in rows}
    columns, titles = [], []
    for name, of in students.items():
        budgets = ("64",) if name == "dense control" else ("8", "64")
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


def goals(rows: Rows) -> str:
    """What the weights were to reach, what they reach, and whether that is enough."""
    scores, beside = _scores(rows), _scores(read("control"))
    cosines = [r for r in read("training") if (r["run"], r["cores"]) == ("small-2", "64")]
    by_size = {int(r["size"]): (float(r["cls_cos"]), float(r["dense_cos"])) for r in cosines}
    samples = samples_seen(SMALL)
    knn, linear = (scores[SMALL, "64", p] for p in ("pets-knn", "pets-linear"))
    gaps = [scores[SMALL, "64", p] - scores[TINY, "64", p] for p in ("pets-knn", "pets-linear")]
    kept = {
        name: [scores[name, "8", p] / scores[name, "64", p] for p in ("pets-knn", "pets-linear")]
        for name in (SMALL, TINY)
    }
    rising = [
        (NAMES[name], title.split(",")[0], _rises(scores, name, probe, metric))
        for name in (SMALL, TINY)
        for probe, (title, metric) in PROBES.items()
        if probe not in ("pets-knn", "pets-linear")
    ]
    shares = {
        _plain(title): _ratio(probe, beside[SMALL, "64", probe], beside[CONTROL, "", probe])
        for probe, (title, _) in PROBES.items()
    }
    first = by_size[192]
    drift = max(
        abs(x / y - 1)
        for size in (256, 384, 512)
        for x, y in zip(by_size[size], first, strict=True)
    )
    low = [f"{name}, {task}" for name, task, rises in rising if not rises]
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
            f"all but {'; '.join(low)}" if low else "all",
            not low,
        ),
        (
            "VECA-small at C = 64 keeps 97 % of the dense control, "
            f"both after {samples_seen(CONTROL):.1f} M samples",
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


def _rises(scores: dict[tuple[str, str, str], float], name: str, probe: str, metric: str) -> bool:
    steps = [scores[name, cores, probe] for cores in BUDGETS]
    steps = [-x for x in steps] if metric == "rmse" else steps
    return all(a < b for a, b in itertools.pairwise(steps))
