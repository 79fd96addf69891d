"""The plots of README and docs, from the results files: speed, memory, scores, agreement.

python -m benchmarks plot
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.rows import number, read
from benchmarks.scores import (
    CONTROL,
    DRAWN,
    NAMES,
    ROOMS,
    SMALL,
    TEACHER,
    TINY,
    dense_control,
    interval_ends,
    samples_seen,
)
from veca._util.files import atomic_write

IMAGES = Path(__file__).parent.parent / "docs" / "images"
COLOURS = {"dense": "black", "64": "#0072B2", "8": "#E69F00"}


def dense_ms(row: dict[str, str]) -> float:
    return min(float(row["dense flash ms"]), float(row["dense cuDNN ms"]))


def model_plot() -> Figure:
    rows = read("model")
    sizes = {(int(r["batch"]), int(r["pixels"])): r for r in rows}
    shapes = [s for s in ((64, 256), (16, 512), (8, 1024), (2, 2048)) if s in sizes]
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)

    pixels = [size for _, size in shapes]
    for name, label in (
        ("dense", "dense DINOv3-B"),
        ("64", "VECA, 64 cores"),
        ("8", "VECA, 8 cores"),
    ):
        times = [
            (dense_ms(sizes[b, s]) if name == "dense" else float(sizes[b, s][f"veca {name} ms"]))
            / b
            for b, s in shapes
        ]
        key = "dense MiB" if name == "dense" else f"veca {name} MiB"
        memory = [float(sizes[b, s][key]) / b for b, s in shapes]
        left.plot(pixels, times, marker="o", color=COLOURS[name], label=label)
        right.plot(pixels, memory, marker="o", color=COLOURS[name], label=label)
    _log(left, pixels, "ms per image")
    _log(right, pixels, "activations, MiB per image")
    left.legend()

    sweep = next(row for row in rows if row.get("veca 16 ms"))
    budgets = [8, 16, 32, 64]
    middle.plot(
        budgets, [float(sweep[f"veca {c} ms"]) for c in budgets], marker="o", color="#0072B2"
    )
    middle.axhline(dense_ms(sweep), color="black", linestyle="--", label="dense DINOv3-B")
    middle.set_xscale("log", base=2)
    middle.set_xticks(budgets, labels=[str(c) for c in budgets])
    middle.set_xlabel("cores")
    middle.set_ylabel(f"ms, batch of {sweep['batch']} at {sweep['pixels']} px")
    middle.set_ylim(bottom=0)
    middle.grid(alpha=0.3)
    middle.legend()
    figure.suptitle(f"ViT-B/16 size, bfloat16, {rows[0]['gpu']}, torch {rows[0]['torch']}")
    return figure


def speed_plot() -> Figure:
    """The plot of the README: one image against its size, on a GPU and on a CPU core."""
    gpu, cpu = read("model"), read("cpu")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    # The batch that keeps the GPU busy; both networks have the same.
    busy = [r for r in gpu if r["batch"] != "1"]
    _race(
        left,
        [int(r["pixels"]) for r in busy],
        [dense_ms(r) / int(r["batch"]) for r in busy],
        [float(r["veca 64 ms"]) / int(r["batch"]) for r in busy],
        "dense DINOv3-B",
    )
    left.set_title(f"ViT-B size, {gpu[0]['gpu']}, bfloat16", fontsize=10)
    times = {(r["model"], r["cores"], int(r["size"])): float(r["ms"]) for r in cpu}
    sizes = sorted({size for _, _, size in times})
    _race(
        right,
        sizes,
        [times["dense", "", size] for size in sizes],
        [times["veca", "64", size] for size in sizes],
        "the same network, full attention",
    )
    right.set_title(f"ViT-S size, one core of an {cpu[0]['cpu']}, float32", fontsize=10)
    return figure


def _race(
    axis: Axes, pixels: list[int], dense: list[float], veca: list[float], opponent: str
) -> None:
    axis.plot(pixels, dense, marker="o", color=COLOURS["dense"], label=opponent)
    axis.plot(pixels, veca, marker="o", color=COLOURS["64"], label="VECA, 64 cores")
    for x, slow, fast in zip(pixels, dense, veca, strict=True):
        axis.annotate(
            f"{number(slow / fast)}x",
            (x, fast),
            xytext=(0, -16),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=COLOURS["64"],
        )
    _log(axis, pixels, "ms per image")
    axis.margins(y=0.15)
    axis.legend(fontsize=9)


def attention_plot() -> Figure:
    rows = [r for r in read("attention") if r["dtype"] == "bfloat16" and r["cores"] == "64"]
    names = ("one pass, rotating", "one pass", "two SDPA, rotating", "two SDPA", "dense cuDNN")
    colours = ("#0072B2", "#56B4E9", "#E69F00", "#F0C000", "black")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axis = figure.subplots()
    for i, (name, colour) in enumerate(zip(names, colours, strict=True)):
        places = [x + (i - 2) * 0.16 for x in range(len(rows))]
        axis.bar(places, [float(r[f"{name} ms"]) for r in rows], 0.15, color=colour, label=name)
    axis.set_xticks(range(len(rows)), labels=[f"{r['batch']} x {r['patches']}" for r in rows])
    axis.set_xlabel("batch x patches")
    axis.set_ylabel("ms, forward")
    axis.set_yscale("log")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=9)
    axis.set_title(
        f"core attention, 12 heads of 64, 64 cores, bfloat16, {rows[0]['gpu']}", fontsize=11
    )
    return figure


STUDENTS = {SMALL: "#0072B2", TINY: "#E69F00"}
LINES = {TEACHER: ("#009E73", ":"), CONTROL: ("black", "--")}


def budget_plot() -> Figure:
    """Every probe against the budget: the students' curves, the others' levels."""
    rows = [*read("probes/shipped"), *dense_control(), *read(f"probes/intervals/{ROOMS}")]
    figure = Figure(figsize=(16.5, 3.6), layout="constrained")
    for axis, (probe, (title, metric)) in zip(
        figure.subplots(1, len(DRAWN)), DRAWN.items(), strict=True
    ):
        scale = 1.0 if metric == "rmse" else 100.0
        mine = [r for r in rows if r["probe"] == probe]
        for name, colour in STUDENTS.items():
            points = [(int(r["cores"]), scale * float(r[metric])) for r in mine
                      if r["backbone"] == name]  # fmt: skip
            axis.plot(*zip(*points, strict=True), marker="o", color=colour, label=_labelled(name))
            _bars(axis, name, probe, dict(points), colour)
        levels = {r["backbone"]: scale * float(r[metric]) for r in mine}
        for name, (colour, style) in LINES.items():
            if name in levels:
                axis.axhline(levels[name], color=colour, linestyle=style, label=_labelled(name))
        axis.set_title(title + (", less is better" if metric == "rmse" else ""), fontsize=10)
        axis.set_xticks([8, 16, 32, 48, 64])
        axis.set_xlabel("cores")
        axis.grid(alpha=0.3)
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), fontsize=9)
    return figure


def _bars(axis: Axes, name: str, probe: str, scores: dict[int, float], colour: str) -> None:
    """At some budgets, where chance may put the score beside the one with all cores."""
    full, known = scores[max(scores)], interval_ends("full")
    for cores in scores:
        low, high = known.get((name, str(cores), probe), (1.0, 1.0))
        if low < high:
            ends = (
                (full / high, full / low)
                if DRAWN[probe][1] == "rmse"
                else (full * low, full * high)
            )
            axis.plot([cores, cores], ends, marker="_", color=colour, linewidth=1)


def _labelled(name: str) -> str:
    seen = "" if name == TEACHER else f", {samples_seen(name):.1f} M samples"
    return f"{NAMES[name]}{seen}"


def size_plot() -> Figure:
    """Agreement with the teacher against the size of the image."""
    rows = read("agreement")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    measures = (("cls_cos", "global feature"), ("dense_cos", "dense features"))
    for axis, (key, title) in zip(figure.subplots(1, 2), measures, strict=True):
        for name, colour in {**STUDENTS, CONTROL: "black"}.items():
            for cores in ("8", "64") if name in STUDENTS else ("",):
                style = "--" if cores == "8" else "-"
                mine = [r for r in rows if (r["weights"], r["cores"]) == (name, cores)]
                axis.plot(
                    [int(r["size"]) for r in mine],
                    [float(r[key]) for r in mine],
                    marker="o",
                    color=colour,
                    linestyle=style,
                    label=f"{_labelled(name)}{f', C = {cores}' if cores else ''}",
                )
        _pixels(axis, [int(s) for s in dict.fromkeys(r["size"] for r in rows)])
        axis.set_title(f"cosine to the teacher, {title}", fontsize=10)
        axis.set_ylim(0.4, 0.8)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    return figure


def _pixels(axis: Axes, pixels: Sequence[int]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(pixels, labels=[str(p) for p in pixels])
    axis.minorticks_off()
    axis.set_xlabel("image side (pixels)")


def _log(axis: Axes, pixels: list[int], label: str) -> None:
    axis.set_yscale("log")
    _pixels(axis, pixels)
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=IMAGES)


def run(options: argparse.Namespace) -> None:
    figures = {
        "speed": speed_plot,
        "gpu-model": model_plot,
        "gpu-attention": attention_plot,
        "results-budget": budget_plot,
        "results-sizes": size_plot,
    }
    for name, draw in figures.items():
        with atomic_write(options.out / f"{name}.png") as file:
            draw().savefig(file, format="png", dpi=110)
