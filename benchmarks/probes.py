"""Every probe of the README in one go: several weights beside their teacher, at every budget.

    python -m benchmarks probes \
        --pets data/oxford-pets --camvid data/camvid --scau data/scau-rgbd --nyu data/nyu \
        --weights small=runs/small/weights --weights tiny=runs/tiny/weights \
        --teacher efficientnet-lite2

Runs `veca probe` for Pets (10-NN, linear, trimaps), CamVid and depth of SCAU and NYUv2, whichever
folders are given, at the sizes, shares of tokens and precisions asked for, and leaves one folder of
results for each, a table of all scores (summary.md, summary.csv) and report.html. Each run's record
holds the command that repeats it alone. Features are kept in the cache of `veca probe`, so that
what is there already is not computed again.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from veca._util.files import atomic_write_text
from veca.cli.main import main as veca
from veca.probe import Run, read_run, write_report
from veca.probe.table import dials, metric_title, ordered, show_metric, turned_to

BUDGETS = "8,16,...,64"
GPU_BATCH = 128
"""Images in a forward pass on a GPU; the protocols' own are for CPUs. No score depends on it."""


class Probe(NamedTuple):
    name: str
    """The folder of its results."""
    task: str
    dataset: str
    data: str
    """The option that gives the folder of the data."""


PROBES = (
    Probe("pets-knn", "knn", "oxford-pets", "pets"),
    Probe("pets-linear", "linear", "oxford-pets", "pets"),
    Probe("pets-trimaps", "segmentation", "pets-trimaps", "pets"),
    Probe("camvid", "segmentation", "camvid", "camvid"),
    Probe("scau-depth", "depth", "scau-rgbd", "scau"),
    Probe("nyuv2-depth", "depth", "nyuv2", "nyu"),
)


def run(options: argparse.Namespace) -> int:
    wanted = [
        probe
        for probe in PROBES
        if getattr(options, probe.data) and (not options.only or probe.name in options.only)
    ]
    if not wanted:
        print("nothing to probe; give --pets, --camvid, --scau or --nyu.", file=sys.stderr)
        return 2
    failed, runs = [], {}
    for probe in wanted:
        start = time.perf_counter()
        code = veca(command(probe, options))
        print(f"{probe.name}: {time.perf_counter() - start:.0f} s", flush=True)
        if code:
            failed.append(probe.name)
        else:
            runs[probe.name] = read_run(options.out / probe.name)
    if runs:
        atomic_write_text(options.out / "summary.md", summary_markdown(runs))
        atomic_write_text(options.out / "summary.csv", summary_csv(runs))
        write_report(options.out)
        print(summary_markdown(runs))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    folders = {"pets": "Oxford-IIIT Pet", "camvid": "CamVid", "scau": "SCAU RGB-D", "nyu": "NYUv2"}
    for name, what in folders.items():
        parser.add_argument(f"--{name}", type=Path, help=f"folder of {what}")
    parser.add_argument("--weights", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--teacher", default="efficientnet-lite2", help="'' for none")
    parser.add_argument("--baseline", action="append", default=[])
    parser.add_argument("--cores", default=BUDGETS)
    parser.add_argument("--keep", help="shares of patch tokens, such as 0.42,1; by default all")
    parser.add_argument("--size", help="pixels; by default the protocol's")
    parser.add_argument("--precision", help="such as fp32,int8; by default the protocol's")
    parser.add_argument("--protocol", default="quick")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int, help=f"on a GPU {GPU_BATCH} by default")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache", type=Path, help="folder that keeps features")
    parser.add_argument("--no-cache", action="store_true", help="keep no features")
    parser.add_argument("--no-time", action="store_true", help="measure no milliseconds")
    parser.add_argument("--verify", action="store_true", help="compare with scikit-learn")
    parser.add_argument("--only", nargs="+", choices=[probe.name for probe in PROBES])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/probes"), help="folder of the records"
    )


def command(probe: Probe, options: argparse.Namespace) -> list[str]:
    """The words of one `veca probe`."""
    words = ["probe", probe.task, "--data", str(getattr(options, probe.data))]
    words += ["--dataset", probe.dataset, "--protocol", options.protocol]
    for source in options.weights:
        words += ["--weights", source]
    if options.teacher:
        words += ["--teacher", options.teacher]
    if options.weights:
        words += ["--cores", options.cores]
    for name in ("keep", "size", "precision"):
        given = getattr(options, name)
        words += [f"--{name}", given] if given else []
    for name, values in (("baseline", options.baseline), ("set", options.set)):
        for value in values:
            words += [f"--{name}", value]
    batch = options.batch_size
    on_gpu = options.device.startswith("cuda")
    if batch is None and (on_gpu or (options.device == "auto" and torch.cuda.is_available())):
        batch = GPU_BATCH
    for name, value in (("batch-size", batch), ("threads", options.threads)):
        words += [f"--{name}", str(value)] if value else []
    words += ["--cache", str(options.cache)] if options.cache else []
    words += ["--no-cache"] if options.no_cache else []
    words += ["--verify"] if options.verify else []
    words += ["--no-time"] if options.no_time else []
    return [*words, "--device", options.device, "--out", str(options.out / probe.name),
            "--overwrite"]  # fmt: skip


def _scores(runs: dict[str, Run]) -> dict[tuple[str, ...], dict[str, float]]:
    """By backbone, dials and size, its score in every probe."""
    table: dict[tuple[str, ...], dict[str, float]] = {}
    turned = dials(*runs.values())
    for name, run in runs.items():
        for row in ordered(run.rows):
            place = (row.name, *turned_to(row, turned), str(row.size))
            table.setdefault(place, {})[name] = run.score(row)
    return table


def _heads(runs: dict[str, Run]) -> list[str]:
    return ["backbone", *dials(*runs.values()), "px"]


def summary_markdown(runs: dict[str, Run]) -> str:
    """One row a backbone, budget and size, one column a probe."""
    heads = [*_heads(runs), *(f"{n}, {metric_title(r.metric)}" for n, r in runs.items())]
    lines = ["| " + " | ".join(heads) + " |", "|" + "|".join(["---", *["---:"] * len(heads[1:])])]
    lines[1] += "|"
    for place, scores in _scores(runs).items():
        shown = [
            show_metric(run.metric, scores[name]) if name in scores else ""
            for name, run in runs.items()
        ]
        lines.append("| " + " | ".join([*place, *shown]) + " |")
    return "\n".join(lines) + "\n"


def summary_csv(runs: dict[str, Run]) -> str:
    """The same with all digits: shares of 1, or metres."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_heads(runs), *(f"{n} {r.metric}" for n, r in runs.items())])
    for place, scores in _scores(runs).items():
        writer.writerow([*place, *(f"{scores[n]:.6g}" if n in scores else "" for n in runs)])
    return out.getvalue()
