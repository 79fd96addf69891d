"""Tables of what the weights reach: probes, budgets, the dense control, agreement, training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

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
TEACHER = "efficientnet-lite2"
NAMES = {TEACHER: "teacher", CONTROL: "dense control", SMALL: "small", TINY: "tiny"}


def probes(rows: Rows, budgets: Sequence[str] = BUDGETS) -> str:
    scores = _scores(rows)
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
    """VECA-small as a share of the dense ViT that learnt the same things in the same steps."""
    scores = _scores(rows)

    def share(probe: str, cores: str) -> str:
        ratio = _ratio(probe, scores[SMALL, cores, probe], scores[CONTROL, "", probe])
        return f"{100 * ratio:.1f} %"

    return table(
        ["cores", *(_plain(title) for title, _ in PROBES.values())],
        [[cores, *(share(probe, cores) for probe in PROBES)] for cores in BUDGETS],
    )


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


def every_budget(rows: Rows) -> str:
    """Classification at all eight budgets."""
    scores = _scores(rows)
    wanted = ("pets-knn", "pets-linear")
    return table(
        ["cores", *(f"{NAMES[n]}, {PROBES[p][0]}" for n in (SMALL, TINY) for p in wanted)],
        [
            [cores, *(_score(p, scores.get((n, cores, p))) for n in (SMALL, TINY) for p in wanted)]
            for cores in (str(c) for c in range(8, 65, 8))
        ],
    )


def _scores(rows: Rows) -> dict[tuple[str, str, str], float]:
    """(backbone, cores, probe) -> its score."""
    return {
        (r["backbone"], r["cores"], r["probe"]): float(r[PROBES[r["probe"]][1]])
        for r in rows
        if r["probe"] in PROBES
    }


def _ratio(probe: str, ours: float, theirs: float) -> float:
    """Our share of their score; of an error, the inverse."""
    return theirs / ours if PROBES[probe][1] == "rmse" else ours / theirs


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
    return _stage(rows, "coco-1", "samples", lambda count: f"{int(count) / 1e6:.2f} M")


def stage_2(rows: Rows) -> str:
    """The same after the second stage, by size."""
    return _stage(rows, "coco-2", "size", str)


def _stage(rows: Rows, run: str, by: str, show: Callable[[str], str]) -> str:
    rows = [r for r in rows if r["run"] == run]
    columns = (("", "8"), ("", "64"), ("tiny", "8"), ("tiny", "64"), ("dense", "64"))
    titles = ("small, C = 8", "C = 64", "tiny, C = 8", "C = 64", "dense control")
    found = {(r[by], r["student"], r["cores"]): r for r in rows}
    return table(
        ["px" if by == "size" else by, *titles],
        [
            [show(one), *(" / ".join(_cosines(found[one, s, c])) for s, c in columns)]
            for one in dict.fromkeys(r[by] for r in rows)
        ],
    )


def _cosines(row: dict[str, str]) -> tuple[str, str, str]:
    return (
        f"{float(row['cls_cos']):.3f}",
        f"{float(row['dense_cos']):.3f}",
        f"{100 * float(row['agree']):.0f} %",
    )


def goals(rows: Rows) -> str:
    """What the weights were to reach, what they reach, and whether that is enough."""
    scores = _scores(rows)
    cosines = [
        r for r in read("training") if (r["run"], r["student"], r["cores"]) == ("coco-2", "", "64")
    ]
    by_size = {int(r["size"]): (float(r["cls_cos"]), float(r["dense_cos"])) for r in cosines}
    about = json.loads((ROOT / "weights" / SMALL / "provenance.json").read_text(encoding="utf-8"))
    samples = about["samples_in_all"] / 1e6
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
        _plain(title): _ratio(probe, scores[SMALL, "64", probe], scores[CONTROL, "", probe])
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
        (
            "CLS cosine 0.72, dense 0.62 on held-out photos (small, C = 64)",
            "{:.3f} and {:.3f} (256 px, its best size)".format(*by_size[256]),
            by_size[256][0] >= 0.72 and by_size[256][1] >= 0.62,
        ),
        (
            "Pets 10-NN 60 %, linear 78 % (small, C = 64)",
            f"{100 * knn:.1f} % and {100 * linear:.1f} %",
            knn >= 0.60 and linear >= 0.78,
        ),
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
            "VECA-small at C = 64 keeps 97 % of the dense control",
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
