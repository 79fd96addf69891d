"""Markdown tables from the results files, put where the documents ask for them.

    PYTHONPATH=src python benchmarks/tables.py

A document asks with a pair of comments, `<!-- table: model -->` and `<!-- end table -->`; what
stands between them is written here and nowhere else. The tests check that nothing is stale.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import learning
import scores
from rows import ROOT, Rows, number, read, table
from veca._util.files import atomic_write_text

DOCUMENTS = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "choosing-a-budget",
            "embedding",
            "export",
            "performance",
            "results",
            "training-log",
        )
    ),
    "weights/veca_small_patch16/README.md",
    "src/veca/assets/weights/veca_tiny_patch16/README.md",
)
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


def _stage(students: dict[str, tuple[str, str]], by: str) -> Callable[[Rows], str]:
    """A table of students, each a run and a name in it, by "samples" or by "size"."""
    return partial(learning.stage, students=students, by=by)


def _means(run: str, **before: str) -> Callable[[Rows], str]:
    """A table of small and tiny of a run beside those shipped before, by their runs."""
    return partial(learning.means, run=run, before=before)


TABLES: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "model": ("model", model),
    "attention": ("attention", attention),
    "attention-backward": ("attention", attention_backward),
    "train": ("train", train),
    "distill": ("distill", distillation),
    "recorded": ("recorded", recorded),
    "cpu": ("cpu", cpu),
    "embed": ("embed", embed),
    "export-speed": ("export_speed", export_speed),
    "probes": ("probes", scores.probes),
    "probes-short": ("probes", scores.probes_short),
    "control": ("control", scores.control),
    "controlled": ("control", scores.controlled),
    "costs": ("control", scores.costs),
    "gains": ("probes", scores.gains),
    "budgets": ("probes", scores.budgets),
    "intervals": ("intervals", scores.intervals),
    "few": ("few", scores.few),
    "rooms": ("intervals", scores.rooms),
    "seeds": ("seeds", scores.seeds),
    "controlled-seeds": (f"control/{scores.SECOND[0].dense}", scores.controlled_seeds),
    "agreement": ("agreement", learning.agreement),
    "goals": ("probes", scores.goals),
    "positions": ("positions", learning.positions),
    "routing": ("routing", learning.routing),
    "teacher-sizes": ("teacher_sizes", learning.teacher_sizes),
    "stage-1": ("training", _stage(learning.controlled("coco-1"), "samples")),
    "stage-2": ("training", _stage(learning.controlled("coco-2"), "size")),
    "search": ("training", learning.search),
    "stage-1-longer": ("training", _stage(learning.apart("small-1", "tiny-1"), "samples")),
    "stage-2-longer": ("training", _stage(learning.apart("small-2", "tiny-2"), "size")),
    "dense-longer": (
        "training",
        _stage(learning.controlled_apart("small-1", "dense-1"), "samples"),
    ),
    "dense-longer-sizes": (
        "training",
        _stage(learning.controlled_apart("small-2", "dense-2"), "size"),
    ),
    "pair-1": ("training", _stage(learning.pair("pair-1"), "samples")),
    "pair-2": ("training", _stage(learning.pair("pair-2"), "size")),
    "stage-1-further": ("training", _stage(learning.siblings("further-1"), "samples")),
    "stage-2-further": ("training", _stage(learning.siblings("further-2"), "size")),
    "at-192": ("training", _stage(learning.siblings("at192"), "samples")),
    "at-192-sizes": ("training", _stage(learning.siblings("at192-sizes"), "size")),
    "on-192": ("training", _stage(learning.siblings("on192"), "samples")),
    "on-192-sizes": ("training", _stage(learning.siblings("on192-sizes"), "size")),
    "again-1": ("training", _stage(learning.siblings("again-1"), "samples")),
    "again-2": ("training", _stage(learning.siblings("again-2"), "size")),
    "again-means": ("training", _means("again-2", small="on192-sizes", tiny="on192-sizes")),
    "again-192": ("training", _stage(learning.siblings("again192"), "samples")),
    "again-192-sizes": ("training", _stage(learning.siblings("again192-sizes"), "size")),
    "dense-again-1": (
        "training",
        _stage(learning.controlled_apart("again-1", "dense-again-1"), "samples"),
    ),
    "dense-again-2": (
        "training",
        _stage(learning.controlled_apart("again-2", "dense-again-2"), "size"),
    ),
    "dense-192": ("training", _stage(learning.controlled_apart("again192", "dense192"), "samples")),
    "dense-192-sizes": (
        "training",
        _stage(learning.controlled_apart("again192-sizes", "dense192-sizes"), "size"),
    ),
    "again-192-means": (
        "training",
        _means("again192-sizes", small="on192-sizes", tiny="again-2"),
    ),
    "basis": ("basis", learning.basis),
    "first-core": ("first_core", learning.first_core),
    "by-heart": ("by_heart", learning.by_heart),
}
"""Name -> the main results file, or the folder of them, and what makes the table."""


def filled(text: str) -> str:
    """A document with its tables as the results files have them."""

    def fill(match: re.Match[str]) -> str:
        source, build = TABLES[match[2]]
        return match[1] + build(read(source)) + match[3]

    return _BLOCK.sub(fill, text)


if __name__ == "__main__":
    for name in DOCUMENTS:
        path = ROOT / name
        atomic_write_text(path, filled(path.read_text(encoding="utf-8")))
