"""Markdown tables from the results files, put where the documents ask for them.

    python -m benchmarks tables

A document asks with a pair of comments, `<!-- table: model -->` and `<!-- end table -->`; what
stands between them is written here and nowhere else. The tests check that nothing is stale.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import scores
from benchmarks.rows import ROOT, Rows, number, read, table
from veca._util.files import atomic_write_text

DOCUMENTS = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "choosing-a-budget",
            "chosen-by-content",
            "cpu",
            "embedding",
            "export",
            "fine-tuning",
            "large",
            "performance",
            "results",
        )
    ),
    "weights/veca_small_patch16/README.md",
    "src/veca/assets/weights/veca_tiny_patch16/README.md",
)
Table = tuple[str, Callable[[Rows], str]]
"""The main source of a table, as `read` takes it, and what makes it."""

PLAIN = "plain float32"
"""What precisions on a CPU are compared with."""
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def model(rows: Rows) -> str:
    header = ["batch x pixels", "dense DINOv3-B, ms", "64 cores, ms", "8 cores, ms",
              "speed-up at 64", "at 8", "64 cores over the matrix floor"]  # fmt: skip
    return table(
        header,
        [
            [
                f"{r['batch']} x {r['pixels']}",
                number(min(float(r["dense flash ms"]), float(r["dense cuDNN ms"]))),
                number(r["veca 64 ms"]),
                number(r["veca 8 ms"]),
                f"{float(r['speed-up 64']):.2f}x",
                f"{float(r['speed-up 8']):.2f}x",
                f"{float(r['over floor 64']):.2f}",
            ]
            for r in rows
        ],
    )


def attention(rows: Rows) -> str:
    header = ["batch x patches", "one pass", "with rotation", "two SDPA", "with rotation",
              "dense cuDNN", "share of copy bandwidth", "with rotation"]  # fmt: skip
    times = ("one pass", "one pass, rotating", "two SDPA", "two SDPA, rotating", "dense cuDNN")
    shares = ("one pass, share of copy", "one pass, rotating, share of copy")
    return table(
        header,
        [
            [f"{r['batch']} x {r['patches']}"]
            + [number(r[f"{name} ms"]) for name in times]
            + [f"{float(r[name]):.2f}" for name in shares]
            for r in rows
            if r["dtype"] == "bfloat16" and r["cores"] == "64"
        ],
    )


def attention_backward(rows: Rows) -> str:
    header = ["batch x patches", "one pass, ms", "two SDPA, ms", "speed-up",
              "with rotation, ms", "two SDPA with rotation, ms", "speed-up",
              "MiB", "two SDPA, MiB"]  # fmt: skip
    return table(
        header,
        [
            [
                f"{r['batch']} x {r['patches']}",
                number(r["one pass fwd+bwd ms"]),
                number(r["two SDPA fwd+bwd ms"]),
                f"{float(r['fwd+bwd vs two SDPA']):.1f}x",
                number(r["one pass, rotating fwd+bwd ms"]),
                number(r["two SDPA, rotating fwd+bwd ms"]),
                f"{float(r['fwd+bwd vs two SDPA, rotating']):.1f}x",
                number(r["one pass fwd+bwd MiB"]),
                number(r["two SDPA fwd+bwd MiB"]),
            ]
            for r in rows
            if r["dtype"] == "bfloat16" and r["cores"] == "64"
        ],
    )


def train(rows: Rows) -> str:
    header = ["batch x pixels", "eager SDPA, images/s", "fast, images/s", "speed-up",
              "eager SDPA, GiB", "fast, GiB"]  # fmt: skip
    return table(
        header,
        [
            [
                f"{r['batch']} x {r['pixels']}",
                number(r["sdpa images/s"]),
                number(r["fast images/s"]),
                f"{float(r['speed-up']):.2f}x",
                number(float(r["sdpa MiB"]) / 1024),
                number(float(r["fast MiB"]) / 1024),
            ]
            for r in rows
        ],
    )


def distillation(rows: Rows) -> str:
    header = ["teacher", "images/s", "teacher alone", "student alone", "share of both in turn",
              "waited for data"]  # fmt: skip
    return table(
        header,
        [
            [
                r["teacher"],
                number(r["images/s"]),
                number(r["teacher alone images/s"]),
                number(r["student alone images/s"]),
                f"{float(r['share of both in turn']):.0%}",
                f"{float(r['waited for data']):.0%}",
            ]
            for r in rows
        ],
    )


def recorded(rows: Rows) -> str:
    return table(
        ["students", "launched, ms a step", "recorded", "speed-up", "images/s, recorded"],
        [
            [
                r["students"].replace("+", " and "),
                number(r["launched ms"]),
                number(r["recorded ms"]),
                f"{float(r['speed-up']):.2f}x",
                number(r["images/s"]),
            ]
            for r in rows
        ],
    )


def cpu(rows: Rows) -> str:
    header = ["pixels", "dense, ms", "64 cores, ms", "8 cores, ms", "speed-up at 64", "at 8",
              "peak MiB, dense", "64 cores"]  # fmt: skip
    by_size: dict[int, dict[str, dict[str, str]]] = {}
    for r in rows:
        by_size.setdefault(int(r["size"]), {})[r["cores"] or "dense"] = r
    return table(
        header,
        [
            [
                str(size),
                *(number(at[name]["ms"]) for name in ("dense", "64", "8")),
                *(f"{float(at[name]['speedup']):.2f}x" for name in ("64", "8")),
                *(number(at[name]["peak_mib"]) for name in ("dense", "64")),
            ]
            for size, at in sorted(by_size.items())
        ],
    )


def cpu_precision(rows: Rows) -> str:
    """A line for weights, size and threads: the plain model's time, and how much faster others."""
    others = [one for one in dict.fromkeys(r["contender"] for r in rows) if one != PLAIN]
    header = ["weights", "pixels", "threads", "float32, ms", *others, "int8: of floor", "CLS",
              "patches"]  # fmt: skip
    groups: dict[tuple[str, int, str], dict[str, dict[str, str]]] = {}
    for r in rows:
        key = r["weights"].removeprefix("veca_").removesuffix("_patch16"), int(r["size"])
        groups.setdefault((*key, r["threads"]), {})[r["contender"]] = r

    def cell(at: dict[str, str], name: str, form: str) -> str:
        return form.format(float(at[name])) if at[name] else ""

    order = sorted(groups, key=lambda one: (one[0] != "tiny", one[1], one[2]))
    return table(
        header,
        [
            [
                *(name, str(size), threads),
                number(at[PLAIN]["ms"]),
                *(cell(at[one], "times faster", "{:.2f}x") for one in others),
                cell(at["int8"], "of floor", "{:.2f}"),
                *(cell(at["int8"], of, "{:.4f}") for of in ("cls", "patches")),
            ]
            for name, size, threads in order
            for at in [groups[name, size, threads]]
            if at[PLAIN]["ms"]
        ],
    )


def _by_dial(row: Mapping[str, str]) -> tuple[float, ...]:
    """`keep` first, then the dials that it is measured against, each turned down from the top."""
    merged, share = float(row["keep"]) < 1, int(row["pixels"]) / int(row["size"])
    return (not merged, share < 1 and row["cores"] != "64", share < 1,
            -float(row["keep"]), -int(row["cores"]), -share)  # fmt: skip


def elastic(rows: Rows) -> str:
    """A line a point: its time, and CLS / patches beside the full pass."""
    rows = sorted(rows, key=_by_dial)
    sets = list(dict.fromkeys((r["weights"], r["size"]) for r in rows))
    sets.sort(key=lambda one: (int(one[1]), one[0] != "tiny"))
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for r in rows:
        share = int(r["pixels"]) / int(r["size"])
        dials = {
            f"`keep={r['keep']}`": float(r["keep"]) < 1,
            f"`cores={r['cores']}`": r["cores"] != "64",
            f"{share:.3g} of the size": share < 1,
        }
        name = ", ".join(dial for dial, turned in dials.items() if turned)
        if name:
            seen = f"{float(r['cls']):.3f} / {float(r['patches']):.3f}"
            at = cells.setdefault(name, {})
            at[r["weights"], r["size"]] = f"{float(r['time']):.2f}x, {seen}"
    header = ["", *(f"{weights}, {size} px" for weights, size in sets)]
    lines = [[name, *(at.get(one, "") for one in sets)] for name, at in cells.items()]
    return table(header, lines)


def calibration(rows: Rows) -> str:
    """A line a promise: how it is kept, and what that takes beside a fixed share and an oracle."""
    header = ["", "promise", "photos", "keep it", "mean `keep`", "work", "fixed `keep`", "work",
              "oracle, work", "saved", "by the oracle"]  # fmt: skip
    lines = []
    for r in rows:
        if float(r["agreement"]) not in (0.97, 0.98, 0.99):
            continue
        fixed = float(r["fixed_work"])
        lines.append(
            [
                f"{r['weights']}, {r['size']} px",
                f"{float(r['agreement']):g}",
                r["photos"],
                f"{float(r['kept']):.1%}",
                f"{float(r['keep']):.2f}",
                f"{float(r['work']):.3f}",
                f"{float(r['fixed_keep']):g}",
                f"{fixed:.3f}",
                f"{float(r['oracle_work']):.3f}",
                f"{1 - float(r['work']) / fixed:.1%}",
                f"{1 - float(r['oracle_work']) / fixed:.1%}",
            ]
        )
    return table(header, lines)


def calibrated_cores(rows: Rows) -> str:
    """A line for weights and a size: the budget at each promise, and what an oracle would save."""
    wanted = ("0.97", "0.98", "0.99")
    cells: dict[str, list[str]] = {}
    for r in rows:
        if r["agreement"] in wanted:
            saved = 1 - float(r["cores_oracle_work"]) / float(r["cores_work"])
            text = f"{r['cores']} cores, {float(r['cores_work']):.3f}, {saved:.1%}"
            cells.setdefault(f"{r['weights']}, {r['size']} px", []).append(text)
    return table(["promise", *wanted], [[name, *budgets] for name, budgets in cells.items()])


def auto(rows: Rows) -> str:
    """A line a promise, on photos that calibrated nothing: kept, and times over the full pass."""
    header = ["", "promise", "photos", "keep it", "mean `keep` (fixed)", "work", "saved",
              "by the oracle"]  # fmt: skip
    times = ["alone: fixed", "auto", "oracle", "in batches: fixed", "auto", "oracle"]
    timed = any(r["auto time alone"] for r in rows)
    ways = ("fixed", "auto", "oracle")

    def saved(r: Mapping[str, str], way: str) -> str:
        return f"{1 - float(r[way]) / float(r['fixed work']):.1%}"

    return table(
        [*header, *(times if timed else ())],
        [
            [
                f"{r['weights']}, {r['size']} px",
                f"{float(r['promise']):g}",
                r["photos"],
                f"{float(r['kept']):.1%}",
                f"{float(r['mean']):.2f} ({float(r['fixed']):g})",
                f"{float(r['work']):.3f}",
                saved(r, "work"),
                saved(r, "oracle work"),
                *(
                    f"{float(time):.3f}" if (time := r[f"{way} time {where}"]) else ""
                    for where in ("alone", "in batches")
                    for way in ways
                    if timed
                ),
            ]
            for r in rows
            if r["dial"] == "keep"
        ],
    )


def elastic_gpu(rows: Rows) -> str:
    keeps = [name.removeprefix("speed-up ") for name in rows[0] if name.startswith("speed-up ")]
    header = ["batch x pixels", "dense flash, ms", *(f"`keep={k}`, ms" for k in keeps)]
    return table(
        [*header, *(f"speed-up at {k}" for k in keeps)],
        [
            [f"{r['batch']} x {r['pixels']}", number(r["dense flash ms"])]
            + [number(r[f"keep {k} ms"]) for k in keeps]
            + [f"{float(r[f'speed-up {k}']):.2f}x" for k in keeps]
            for r in rows
        ],
    )


def embed_precision(rows: Rows) -> str:
    """A line a precision: how fast, and the memory on the way."""
    names = {"before": "0.1, float32"}
    header = ["", "images/s", "times", "CPU ms an image", "memory, MiB, by quarter of the run"]
    quarters = [f"memory quarter {number} MiB" for number in range(1, 5)]
    return table(
        header,
        [
            [
                names.get(r["precision"], f"`--precision {r['precision']}`"),
                number(r["images/s"]),
                f"{float(r['ratio']):.2f}x",
                number(r["CPU ms/image"]),
                ", ".join(f"{float(r[quarter]):.0f}" for quarter in quarters),
            ]
            for r in rows
        ],
    )


def export_precision(rows: Rows) -> str:
    """A line a file."""
    header = ["weights", "pixels", "file", "MB", "ms", "of fp32", "of plain int8", "CLS", "patches"]
    return table(
        header,
        [
            [
                *(r[name] for name in ("weights", "pixels", "file", "MB")),
                number(r["ms"]),
                *(f"{float(r[f'share of {of}']):.2f}x" for of in ("fp32", "plain int8")),
                *(f"{float(r[f'least {of}']):.4f}" for of in ("CLS", "patches")),
            ]
            for r in rows
        ],
    )


def embed(rows: Rows) -> str:
    (row,) = rows
    contenders = {
        "`veca embed`, from reading the weights to the last shard": "embed",
        "the bare model on tensors in memory, a batch on each thread": "bare",
        "the bare model, one batch at a time on both threads": "bare, all threads",
        "the decoder alone": "decoder",
    }
    return table(
        ["", "images/s", "CPU ms an image"],
        [
            [text, number(row[f"{name} images/s"]), number(row[f"{name} CPU ms/image"])]
            for text, name in contenders.items()
        ],
    )


def export_speed(rows: Rows) -> str:
    return table(
        ["cores", "torch, ms", "a file for this budget", "a file for any budget"],
        [
            [
                r["cores"],
                *(number(r[f"{name} ms"]) for name in ("torch", "fixed budget", "open budget")),
            ]
            for r in rows
        ],
    )


def finetune(rows: Rows) -> str:
    sets = {"oxford-pets": "Pets breeds, top-1", "camvid": "CamVid, mIoU"}
    stages = ("frozen, 10-NN", "frozen, linear", "fine-tuned")
    lines = [
        [
            sets[r["dataset"]],
            *(r[name] for name in ("train images", "test images", "size", "steps", "cores")),
            *(_percent(r[name]) for name in stages),
        ]
        for r in rows
    ]
    header = ["", "training images", "test images", "pixels", "steps", "cores", *stages]
    return table(header, lines)


def _percent(share: str | float | None) -> str:
    return f"{100 * float(share):.1f} %" if share else ""


def large_scaling(rows: Rows) -> str:
    header = ["px a side", "patches", "precision", "processes x threads", "minutes",
              "resident memory, GiB", "stored, GB"]  # fmt: skip
    rows = sorted(rows, key=lambda r: (int(r["processes"]), int(r["size"])))
    return table(
        header,
        [
            [
                f"{int(r['size']):,}",
                f"{int(r['patches']):,}",
                r["precision"],
                f"{r['processes']} x {r['threads']}",
                number(float(r["seconds"]) / 60),
                f"{float(r['resident_gib']):.2f}",
                f"{float(r['store_gb']):.2f}",
            ]
            for r in rows
        ],
    )


def large_exactness(rows: Rows) -> str:
    names = {
        "one_process": "one process",
        "two_processes": "two processes",
        "one_from_float64": "from float64",
        "plain_from_float64": "plain forward from float64",
    }
    header = ["picture", "px", *names.values()]
    return table(
        header,
        [
            [r["case"], f"{r['height']} x {r['width']}", *(f"{float(r[k]):.1e}" for k in names)]
            for r in rows
        ],
    )


def large_contexts(rows: Rows) -> str:
    """mIoU, or its difference to that of the whole picture as context, with its interval."""
    header = ["photos", "picture", "px", "image", "overview", "tile", "tile of 1,024 px",
              "tile+overview"]  # fmt: skip
    contexts = ["overview", "tile", "tile of 1024 px", "tile+overview"]
    lines = []
    for group in dict.fromkeys(r["group"] for r in rows):
        found = {r["context"]: r for r in rows if r["group"] == group}
        one = next(iter(found.values()))
        if one["pictures"] in ("alone", "real"):
            continue
        differences = [
            f"{float(r['minus_image']):+.1f} ({float(r['ci_low']):+.1f} to "
            f"{float(r['ci_high']):+.1f})"
            for r in (found[context] for context in contexts)
        ]
        name = f"{one['photos']} of {group.partition(',')[0]}"
        lines.append([
            name, one["pictures"], f"{int(one['size']):,}",
            f"{float(found['image']['miou']):.1f}", *differences,
        ])  # fmt: skip
    return table(header, lines)


def large_seams(rows: Rows) -> str:
    """Of the kinds of pictures that are in the file."""
    kinds = {"mosaic": "mosaics", "enlarged": "enlarged photos", "real": "real pictures"}
    there = [kind for kind in kinds if any(r["pictures"] == kind for r in rows)]
    shifts = any(r["shifted"] for r in rows)
    header = [
        "context",
        *(f"seams: {kinds[kind]}" for kind in there),
        *(["real: cosine after a shift"] if shifts else []),
        "CPU seconds a megapixel",
    ]
    lines = []
    for context in ("image", "overview", "tile", "tile of 1024 px", "tile+overview"):
        own = [r for r in rows if r["context"] == context and r["pictures"] != "alone"]
        cells = [_mean([r["seams"] for r in own if r["pictures"] == kind]) for kind in there]
        shifted = [_mean([r["shifted"] for r in own], 3)] if shifts else []
        lines.append([context, *cells, *shifted, _mean([r["cpu_s_a_megapixel"] for r in own])])
    return table(header, lines)


def _mean(cells: list[str], digits: int = 2) -> str:
    numbers = [float(cell) for cell in cells if cell]
    return f"{sum(numbers) / len(numbers):.{digits}f}" if numbers else ""


TABLES: dict[str, Table] = {
    "model": ("model", model),
    "attention": ("attention", attention),
    "attention-backward": ("attention", attention_backward),
    "train": ("train", train),
    "distill": ("distill", distillation),
    "recorded": ("recorded", recorded),
    "cpu": ("cpu", cpu),
    "cpu-precision": ("cpu_precision", cpu_precision),
    "elastic": ("elastic", elastic),
    "elastic-gpu": ("elastic_gpu", elastic_gpu),
    "calibration": ("calibration", calibration),
    "calibrated-cores": ("calibration", calibrated_cores),
    "auto": ("auto", auto),
    "embed": ("embed", embed),
    "embed-precision": ("embed_precision", embed_precision),
    "export-speed": ("export_speed", export_speed),
    "export-precision": ("export_precision", export_precision),
    "finetune": ("finetune", finetune),
    "weights": ("probes/shipped", scores.weights),
    "dials": ("cpu", scores.dials),
    "probes": ("probes/shipped", scores.probes),
    "probes-short": ("probes/shipped", scores.probes_short),
    "control": ("probes/control", scores.control),
    "budgets": ("probes/shipped", scores.budgets),
    "few": ("probes/few", scores.few),
    "keep": ("probes/keep", scores.keep),
    "large-scaling": ("large_scaling", large_scaling),
    "large-exactness": ("large_exactness", large_exactness),
    "large-contexts": ("large_contexts", large_contexts),
    "large-seams": ("large_contexts", large_seams),
    "precision": ("probes/precision", scores.precision),
}


def filled(text: str) -> str:
    """A document with its tables as the results files have them."""
    return fill(text, TABLES, read)


def fill(text: str, tables: Mapping[str, Table], read: Callable[[str], Rows]) -> str:
    """A document with these tables where it asks for them; `read` finds the rows of a source."""

    def one(match: re.Match[str]) -> str:
        source, build = tables[match[2]]
        return match[1] + build(read(source)) + match[3]

    return _BLOCK.sub(one, text)


def update(documents: Mapping[Path, str], *, check: bool) -> int:
    """Write documents whose text has changed, or with `check` only name them; the exit status."""
    stale = [p for p, text in documents.items() if p.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            atomic_write_text(path, documents[path])
        print(f"{path.relative_to(ROOT)}: {'stale' if check else 'written'}")
    return 1 if check and stale else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if any is stale")


def run(options: argparse.Namespace) -> int:
    paths = [ROOT / name for name in DOCUMENTS]
    return update(
        {path: filled(path.read_text(encoding="utf-8")) for path in paths}, check=options.check
    )
