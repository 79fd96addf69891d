"""Tables of what the weights reach: probes, budgets, the dense control, goals.

Scores are in results/probes.csv, by the name of their record: `shipped` has those of the shipped
weights; `control` those of the controlled experiment, in which VECA and a dense ViT learn from the
same batches, by the run whose weights they are of (unless they are shipped); `seeds` those of the
depth probe with other seeds; `intervals` the shipped weights and the teacher once more, on one
machine, with intervals, and there alone depth in the rooms of NYUv2; `blind` what is scored without
a look at images; `few` what is left with fewer cores than were trained, on a part of Pets; `keep`
what is left with merged patches and with fewer cores, at sizes where merging pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.rows import RESULTS, Rows, read, table
from veca.cost import cost
from veca.weights import read_config, read_provenance
from veca.weights.names import locate

PROBES = {
    "pets-knn": ("Pets, 10-NN %", "top1"),
    "pets-linear": ("Pets, linear %", "top1"),
    "pets-trimaps": ("Pets trimaps, mIoU %", "miou"),
    "camvid": ("CamVid, mIoU %", "miou"),
    "scau-depth": ("SCAU, RMSE m", "rmse"),
}
"""Folder of the results -> what its column is called, and its score."""
ROOMS = "nyuv2-depth"
DRAWN = {**PROBES, ROOMS: ("NYUv2, RMSE m", "rmse")}
"""With a probe of the shipped weights that the dense control never had."""
BUDGETS = ("8", "16", "32", "64")
SMALL, TINY, CONTROL = "veca_small_patch16", "veca_tiny_patch16", "dense_vit_small"
TEACHER, SMALL_CONTROL, BLIND = "efficientnet-lite2", "veca_small_control", "blind"
NAMES = {
    BLIND: "blind",
    TEACHER: "teacher",
    CONTROL: "dense control",
    SMALL: "small",
    TINY: "tiny",
    SMALL_CONTROL: "small beside the control",
}

ALL_PATCHES = "all patches"
KEPT_AT = {
    name: {
        ("64", "1"): ALL_PATCHES,
        ("64", "0.6"): "`keep=0.6`",
        ("64", "0.5"): "`keep=0.5`",
        ("64", first): "`keep=0.4`, small 0.45",
        ("64", "0.25"): "`keep=0.25`",
        ("8", "1"): "all patches, 8 cores",
    }
    for name, first in ((TINY, "0.4"), (SMALL, "0.45"))
}
"""By network, the points of the table of merging: (cores, keep) -> its column."""

SHIPPED_WEIGHTS = {TINY: "in the package", SMALL: "in `weights/` of a clone"}
LONG_NAMES = {CONTROL: "dense ViT of small's size", TEACHER: "EfficientNet-Lite2, the teacher"}
MAIN = ("pets-knn", "pets-linear", "camvid", ROOMS)
"""The probes of the short table."""

SHIPPED = "again192-sizes"
"""The run whose small is the shipped one."""


class Pair(NamedTuple):
    """VECA-small and the dense ViT after the same settings: the last run of each."""

    veca: str
    dense: str
    recipe: str


EXPERIMENT = (
    Pair("coco-2", "coco-2", "first"),
    Pair("small-2", "dense-2", "first, then longer"),
    Pair("pair-2", "pair-2", "second"),
    Pair("again-2", "dense-again-2", "second, then longer"),
    Pair(SHIPPED, "dense192-sizes", "second, then at 192 px"),
)
SECOND = EXPERIMENT[2:]
"""The way of the shipped small, from random weights."""
CONTROLLED = EXPERIMENT[-1]
"""The shipped small and the dense ViT that it is held against."""
CONTROLLED_LINES = (*((SMALL, cores) for cores in BUDGETS), (CONTROL, ""))
BEFORE = {
    "coco-2": "coco-1",
    "small-1": "coco-1",
    "small-2": "small-1",
    "dense-1": "coco-2",
    "dense-2": "dense-1",
    "pair-2": "pair-1",
    "again-1": "pair-2",
    "again-2": "again-1",
    "again192": "again-2",
    SHIPPED: "again192",
    "dense-again-1": "pair-2",
    "dense-again-2": "dense-again-1",
    "dense192": "dense-again-2",
    "dense192-sizes": "dense192",
}
"""The experiment's runs, each with the one whose weights it began with."""

Scores = dict[tuple[str, str, str], float]
"""(backbone, cores, probe) -> its score."""


def weights(rows: Rows) -> str:
    """The shipped weights by size and score, then the networks they are held against."""
    scores = scores_in([*dense_control(), *rows, *read(f"probes/intervals/{ROOMS}")])
    lines = []
    for name, cores in ((TINY, "64"), (SMALL, "64"), (CONTROL, ""), (TEACHER, "")):
        about = ["", "", ""]
        if name in SHIPPED_WEIGHTS:
            where = locate(name, ("model.safetensors",))
            megabytes = (where / "model.safetensors").stat().st_size / 1e6
            parameters = cost(read_config(where)).veca.parameters / 1e6
            about = [f"{parameters:.1f} M", f"{megabytes:.1f} MB", SHIPPED_WEIGHTS[name]]
        title = f"`{name}`" if name in SHIPPED_WEIGHTS else LONG_NAMES[name]
        seen = f"{samples_seen(name):.1f} M" if name != TEACHER else ""
        found = (shown(probe, scores.get((name, cores, probe))) for probe in MAIN)
        lines.append([title, *about, seen, *found])
    titles = (DRAWN[probe][0] for probe in MAIN)
    return table(["weights", "parameters", "file", "where", "samples seen", *titles], lines)


def probes_short(rows: Rows) -> str:
    return every_probe(rows, (TEACHER, CONTROL), ("8", "64"))


def probes(rows: Rows) -> str:
    """Scores with half of their 95 % interval, where one was drawn."""
    scores = scores_in(
        [*read("probes/blind"), *dense_control(), *rows, *read(f"probes/intervals/{ROOMS}")]
    )
    ends = interval_ends()

    def cell(name: str, cores: str, probe: str) -> str:
        value = shown(probe, scores.get((name, cores, probe)))
        low, high = ends.get((name, cores, probe), (0.0, 0.0))
        return f"{value} ±{shown(probe, (high - low) / 2)}" if value and low < high else value

    lines = [(name, "") for name in (BLIND, TEACHER, CONTROL)]
    lines += [(name, cores) for name in (SMALL, TINY) for cores in ("8", "64")]
    return table(
        ["", "cores", *(title for title, _ in DRAWN.values())],
        [[NAMES[name], cores, *(cell(name, cores, p) for p in DRAWN)] for name, cores in lines],
    )


def budgets(rows: Rows) -> str:
    """Retention: the share of the score with all cores, and its 95 % interval."""
    scores = scores_in([*rows, *read(f"probes/intervals/{ROOMS}")])
    ends = interval_ends("full")
    lines = []
    for name in (SMALL, TINY):
        for cores in BUDGETS[:-1]:
            line = [NAMES[name], cores]
            for probe in DRAWN:
                share = ratio(probe, scores[name, cores, probe], scores[name, "64", probe])
                low, high = (100 * end for end in ends[name, cores, probe])
                line.append(f"{100 * share:.1f} % ({low:.1f}–{high:.1f})")
            lines.append(line)
    return table(["", "cores", *(plain(title) for title, _ in DRAWN.values())], lines)


def control(_: Rows) -> str:
    """VECA-small's share of the dense ViT's scores as both see more of the same samples."""
    lines = []
    for pair in SECOND:
        veca, dense = after(pair.veca), after(pair.dense)
        for cores in ("8", "64"):
            shares = (
                ratio(probe, veca[SMALL, cores, probe], dense[CONTROL, "", probe])
                for probe in PROBES
            )
            seen = f"{samples_after(pair.veca):.1f} M"
            lines.append([seen, cores, *(f"{100 * x:.1f} %" for x in shares)])
    return table(["samples", "cores", *(plain(title) for title, _ in PROBES.values())], lines)


def dials(_: Rows) -> str:
    """What turning each dial down takes of the time, on both machines, and the retention."""
    scores = scores_in(read("probes/shipped"))
    kept = [
        f"{100 * scores[SMALL, '8', probe] / scores[SMALL, '64', probe]:.1f} % {title}"
        for probe, title in (("pets-knn", "Pets 10-NN"), ("camvid", "CamVid"))
    ]
    on_cpu = {(r["size"], r["cores"]): float(r["ms"]) for r in read("cpu") if r["model"] == "veca"}
    on_gpu: dict[tuple[str, str], float] = {}
    for r in read("model"):  # large batches, where the GPU is busy
        if r["batch"] != "1":
            for cores in ("8", "64"):
                on_gpu[r["pixels"], cores] = float(r[f"veca {cores} ms"]) / int(r["batch"])
    turns = {
        "`size`": (("1024", "64"), ("512", "64")),
        "`cores` at 1024 px": (("1024", "64"), ("1024", "8")),
        "`cores` at 256 px": (("256", "64"), ("256", "8")),
    }
    lines = [keep_dial(keep) for keep in ("0.5", "0.33")]
    for dial, (full, less) in turns.items():
        which = 0 if full[0] != less[0] else 1
        times = (f"{on[less] / on[full]:.2f}x" for on in (on_cpu, on_gpu))
        retention = ", ".join(kept) if full == ("256", "64") else ""  # at the size of the probes
        lines.append([dial, f"{full[which]} to {less[which]}", *times, retention])
    header = ["dial", "turned down", "time, one CPU core", "time, H200", "retention"]
    return table(header, lines)


def keep_dial(keep: str) -> list[str]:
    """What fewer patch tokens take of the time at 1024 px, and how alike features stay at 512."""
    at = {r["size"]: r for r in read("elastic") if (r["weights"], r["keep"]) == ("small", keep)}
    cpu = f"{float(at['1024']['time']):.2f}x"
    measured = read("elastic_gpu") if (RESULTS / "elastic_gpu.csv").is_file() else []
    graphs = (r for r in measured if (r["batch"], r["pixels"]) == ("8", "1024"))
    gpu = "".join(f"{float(r[f'time at {keep}']):.2f}x" for r in graphs)
    same = f"cosine {float(at['512']['cls']):.3f} CLS, {float(at['512']['patches']):.3f} patches"
    return ["`keep` at 1024 px", f"1 to {keep}", cpu, gpu, same]


def every_probe(rows: Rows, beside: Sequence[str], budgets: Sequence[str]) -> str:
    """The shipped weights at these budgets, after others without budgets."""
    scores = scores_in([*read("probes/blind"), *dense_control(), *rows])
    lines = [(name, "") for name in beside]
    lines += [(name, cores) for name in (SMALL, TINY) for cores in budgets]
    return table(
        ["", "cores", *(title for title, _ in PROBES.values())],
        [
            [
                NAMES[name],
                cores,
                *(shown(probe, scores.get((name, cores, probe))) for probe in PROBES),
            ]
            for name, cores in lines
        ],
    )


def dense_control() -> Rows:
    """The records of the dense ViT that has gone the way of the shipped small."""
    return [r for r in read(f"probes/control/{CONTROLLED.dense}") if r["backbone"] == CONTROL]


def interval_ends(of: str = "") -> dict[tuple[str, str, str], tuple[float, float]]:
    """The ends of 95 % intervals by (backbone, cores, probe): of scores, or of what is kept of the
    score with all cores ("full") or of the teacher's ("teacher")."""
    low, high = (f"{of}_{end}".lstrip("_") for end in ("low", "high"))
    return {
        (r["backbone"], r["cores"], r["probe"]): (float(r[low]), float(r[high]))
        for r in read("probes/intervals")
        if r[low]
    }


def few(rows: Rows) -> str:
    """10-NN on a part of Pets with fewer cores than were ever trained."""
    found = {(r["backbone"], r["cores"]): f"{100 * float(r['top1']):.1f}" for r in rows}
    budgets = sorted({cores for name, cores in found if name == SMALL}, key=int)
    return table(
        ["cores", *budgets],
        [[NAMES[name], *(found[name, cores] for cores in budgets)] for name in (SMALL, TINY)],
    )


def keep(rows: Rows) -> str:
    """What merging keeps of the scores with all patches, beside fewer cores: one row a probe."""
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for r in rows:
        point = KEPT_AT[r["backbone"]].get((r["cores"], r["keep"]))
        if point is None:
            continue
        kept = f"{100 * float(r['retention_full']):.1f} %" if r["retention_full"] else ""
        if r["full_low"]:
            low, high = (100 * float(r[f"full_{end}"]) for end in ("low", "high"))
            kept += f" ({low:.1f}–{high:.1f})"
        score = shown(r["probe"], float(r[DRAWN[r["probe"]][1]]))
        at = lines.setdefault((r["backbone"], r["probe"], r["size"]), {})
        at[point] = score if point == ALL_PATCHES else kept
    columns = dict.fromkeys(KEPT_AT[TINY].values())
    return table(
        ["", "probe", "short side, px", *columns],
        [
            [NAMES[name], DRAWN[probe][0], size, *(at.get(column, "") for column in columns)]
            for (name, probe, size), at in lines.items()
        ],
    )


def precision(rows: Rows) -> str:
    """What a precision keeps of the scores of float32, one row a network and probe."""
    lines: dict[tuple[str, str], dict[tuple[str, str], Mapping[str, str]]] = {}
    for r in rows:
        lines.setdefault((r["backbone"], r["probe"]), {})[r["cores"], r["precision"]] = r
    cells = []
    for (name, probe), at in lines.items():
        metric = DRAWN[probe][1]
        plain, full, few = (at["64", "fp32"], at["64", "int8"], at["8", "int8"])
        low, high = (100 * float(full[f"full_{end}"]) for end in ("low", "high"))
        kept = f"{100 * float(full['retention_full']):.1f} % ({low:.1f}–{high:.1f})"
        cells.append(
            [
                *(NAMES[name], DRAWN[probe][0]),
                *(shown(probe, float(one[metric])) for one in (plain, full)),
                kept,
                shown(probe, float(few[metric])),
                f"{100 * float(few[metric]) / float(full[metric]):.1f} %",
            ]
        )
    header = ["", "probe", "fp32, 64 cores", "int8, 64 cores", "retention (95 % CI)"]
    return table([*header, "int8, 8 cores", "of 64"], cells)


def scores_in(rows: Rows) -> Scores:
    return {
        (r["backbone"], r["cores"], r["probe"]): float(r[DRAWN[r["probe"]][1]])
        for r in rows
        if r["probe"] in DRAWN
    }


def after(run: str) -> Scores:
    """Those of the controlled experiment after one of its runs."""
    return scores_in(read("probes/shipped" if run == SHIPPED else f"probes/control/{run}"))


def ratio(probe: str, ours: float, theirs: float) -> float:
    """Our share of their score; of an error, the inverse."""
    return theirs / ours if DRAWN[probe][1] == "rmse" else ours / theirs


def shown(probe: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if DRAWN[probe][1] == "rmse" else f"{100 * value:.1f}"


def samples_seen(name: str) -> float:
    """In millions; of shipped weights by their provenance, of the dense control by its runs."""
    if name == CONTROL:
        return samples_after(CONTROLLED.dense)
    return float(read_provenance(name)["samples_in_all"]) / 1e6


def samples_after(run: str) -> float:
    """In millions, up to the end of one of the experiment's runs."""
    seen: dict[str, int] = {}
    for row in read("training"):
        seen[row["run"]] = max(seen.get(row["run"], 0), int(row["samples"]))
    samples = seen[run]
    while run in BEFORE:
        run = BEFORE[run]
        samples += seen[run]
    return samples / 1e6


def plain(title: str) -> str:
    """A column's title without its unit."""
    return title.rsplit(" ", 1)[0].rstrip(",")


def cosines(row: dict[str, str]) -> tuple[str, str, str]:
    return (
        f"{float(row['cls_cos']):.3f}",
        f"{float(row['dense_cos']):.3f}",
        f"{100 * float(row['agree']):.0f} %",
    )
