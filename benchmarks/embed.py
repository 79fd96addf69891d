"""Throughput and memory of `veca embed` on a CPU, beside the bare model and the bare decoder.

    python -m benchmarks embed
    python -m benchmarks embed --photos PHOTOS --before TREE

Small JPEG files are made, and fresh tiny weights. Then, each in a process of its own:

- embed: all files, from reading the weights to the last shard on the disk;
- bare: as many images through the model, as tensors in memory, a batch on each thread;
- bare, all threads: the same with one batch at a time on all threads (fewer images: on a busy
  machine threads that wait for each other lose their turns);
- decoder: what the workers of `veca embed` do, and nothing else.

The processes take turns of two seconds, all others stopped meanwhile, so that they share the slow
moments of a busy machine; a second counts only while its process runs. The memory of `embed` and
its workers is sampled on the way. Writes results/embed.csv and results/embed_memory.csv.

With --photos: the whole command over photos of yours in each precision, in turns likewise, beside
that of an older version whose tree is at --before (an unpacked archive of a commit). Each has run
once over two photos, so that what is built once for a machine is there. Writes
results/embed_precision.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import veca
from benchmarks.common import print_table, write_csv
from benchmarks.rows import RESULTS, ROOT
from veca.data.pool import ordered_map
from veca.data.sources import open_source
from veca.embed import embed
from veca.embed.settings import Settings
from veca.embed.shards import Decoder
from veca.images import find_images
from veca.weights.names import locate

Row = dict[str, object]
TURN = 2.0
"""Seconds."""
FEWER = 50
"""The fraction of the images on which one batch on all threads is measured."""
BEFORE = "before"
"""The contender of an older version."""
COMMAND = """
import json, resource, sys, time
begin = time.monotonic()
from veca.cli.main import main
if main(sys.argv[2:]):
    sys.exit("veca embed failed")
uses = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
used = sum(use.ru_utime + use.ru_stime for use in uses)
images = int(sys.argv[1])
print(json.dumps({"images": images, "begin": begin, "end": time.monotonic(), "used": used}))
"""
"""What runs `veca embed` of any version, and says what `run_one` says."""


def make_images(folder: Path, count: int, side: int) -> None:
    """JPEG files of smooth colours with some noise, in folders of a thousand."""
    rng = np.random.default_rng(0)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + rng.integers(-9, 10, smooth.shape), 0, 255).astype(np.uint8)
        path = folder / f"{i // 1000:03d}" / f"{i:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy).save(path, quality=90)


# ---------------------------------------------------------------------------- what is measured


def run_embed(folder: Path, options: Any) -> int:
    report = embed(
        folder / "images",
        folder / "out",
        weights=folder / "weights",
        cores=options.cores,
        size=(options.side, options.side),
        batch_size=options.batch,
        workers=options.threads,
        threads=options.threads,
    )
    return report.images


def run_bare(folder: Path, options: Any) -> int:
    torch.set_num_threads(1)
    one, batches = _bare(folder, options), options.images // options.batch
    with ThreadPoolExecutor(
        options.threads, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for _ in pool.map(lambda _: one(), range(batches)):
            pass
    return batches * options.batch


def run_bare_all_threads(folder: Path, options: Any) -> int:
    torch.set_num_threads(options.threads)
    one, batches = _bare(folder, options), max(1, options.images // options.batch // FEWER)
    for _ in range(batches):
        one()
    return batches * options.batch


def _bare(folder: Path, options: Any) -> Callable[[], None]:
    model = veca.load(folder / "weights")
    pixels = torch.randn(options.batch, 3, options.side, options.side)

    @torch.inference_mode()
    def one() -> None:
        model(pixels, cores=options.cores)

    return one


def run_decoder(folder: Path, options: Any) -> int:
    settings = Settings.of(
        veca.load(folder / "weights"),
        cores=options.cores,
        size=(options.side, options.side),
        fast_jpeg=False,
        patches=False,
        dtype="float16",
        batch_size=options.batch,
        shard_rows=2048,
    )
    source = open_source(folder / "images")
    jobs = (np.arange(i, min(i + 16, len(source))) for i in range(0, len(source), 16))
    return sum(map(len, ordered_map(Decoder(source, settings), jobs, options.threads)))


CONTENDERS: dict[str, Callable[[Path, Any], int]] = {
    "embed": run_embed,
    "bare": run_bare,
    "bare, all threads": run_bare_all_threads,
    "decoder": run_decoder,
}


def run_one(name: str, folder: Path, options: Any) -> None:
    """In a process of its own: do it, and say when it began and ended."""

    def processor() -> float:
        uses = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(use.ru_utime + use.ru_stime for use in uses)

    begin, used = time.monotonic(), processor()
    images = CONTENDERS[name](folder, options)
    end = time.monotonic()
    told = {"images": images, "begin": begin, "end": end, "used": processor() - used}
    print(json.dumps(told), flush=True)


# ---------------------------------------------------------------------------- taking turns


@dataclass
class Contender:
    """A process with its workers, stopped unless it is its turn."""

    name: str
    process: subprocess.Popen[str]
    turns: list[tuple[float, float]] = field(default_factory=list)
    """(from, to) of each stretch of time it was running."""
    memory: list[Row] = field(default_factory=list)

    def turn(self) -> None:
        start = time.monotonic()
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            self.process.wait(TURN)
        except subprocess.TimeoutExpired:
            self.sample()
            os.killpg(self.process.pid, signal.SIGSTOP)
        self.turns.append((start, time.monotonic()))

    def sample(self) -> None:
        """Note the memory of the process and its workers."""
        children = children_of(self.process.pid)
        own, others = memory(self.process.pid), sum(map(memory, children))
        self.memory.append(
            {
                "seconds": sum(end - start for start, end in self.turns),
                "process MiB": own,
                "workers": len(children),
                "workers MiB": others,
                "together MiB": own + others,
            }
        )

    def result(self) -> dict[str, float]:
        """Images a second of its own turns, and processor time."""
        out, _ = self.process.communicate()
        if self.process.returncode:
            raise RuntimeError(f"{self.name} failed")
        told = json.loads(out.splitlines()[-1])
        seconds = sum(
            max(0.0, min(end, told["end"]) - max(start, told["begin"])) for start, end in self.turns
        )
        return {
            "images": told["images"],
            "images/s": told["images"] / seconds,
            "CPU ms/image": 1000 * told["used"] / told["images"],
        }


def memory(pid: int) -> float:
    """MiB of a process that no file holds; pages shared with its workers count in proportion.

    Without the libraries' code, which all contenders share: its share grows when one of them ends.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0.0
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith("Pss_Anon:")), 0.0)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def race(
    commands: Mapping[str, Sequence[str]], folder: Path, paths: Mapping[str, Path] | None = None
) -> list[Contender]:
    """Let Python with these arguments take turns; `paths` has a PYTHONPATH for some of them."""
    environment = {**os.environ, "VECA_CACHE": str(folder / "cache")}
    contenders = []
    for name, words in commands.items():
        path = (paths or {}).get(name)
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT if path is None else folder,
            stdout=subprocess.PIPE,
            text=True,
            env=environment if path is None else {**environment, "PYTHONPATH": str(path)},
            preexec_fn=os.setpgrp,
        )
        os.killpg(process.pid, signal.SIGSTOP)
        contenders.append(Contender(name, process))
    left = list(contenders)
    try:
        while left:
            for contender in list(left):
                contender.turn()
                if contender.process.poll() is not None:
                    left.remove(contender)
    finally:
        for contender in left:
            os.killpg(contender.process.pid, signal.SIGKILL)
    return contenders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=int, help="10,000 made ones, or 2,000 of --photos")
    parser.add_argument("--side", type=int, default=96, help="pixels, of files and for the model")
    parser.add_argument("--photos", nargs="+", help="photos of yours: precisions beside each other")
    parser.add_argument("--before", type=Path, help="with --photos: the tree of an older version")
    parser.add_argument("--precisions", default="fp32,bf16,int8", help="with --photos")
    parser.add_argument("--weights", default="tiny", help="with --photos")
    parser.add_argument("--size", type=int, default=224, help="with --photos: short side in pixels")
    parser.add_argument("--cores", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.only:
        run_one(options.only, options.folder, options)
        return
    if options.photos:
        write_csv("embed_precision", precisions(options), options.out, device="cpu")
        return
    options.images = options.images or 10_000
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        veca.save(veca.create_model("veca_tiny_patch16"), folder / "weights")
        make_images(folder / "images", options.images, options.side)
        before = os.getloadavg()[0]
        words = ["-m", "benchmarks", "embed", *_words(options), "--folder", str(folder)]
        contenders = race({one: [*words, "--only", one] for one in CONTENDERS}, folder)
    results = {contender.name: contender.result() for contender in contenders}
    rows = [summary(results, contenders[0].memory, options, before)]
    write_csv("embed", rows, options.out, device="cpu")
    write_csv("embed_memory", contenders[0].memory, options.out, device="cpu")
    for key, value in rows[0].items():
        print(f"{key:>32}  {value:.4g}" if isinstance(value, float) else f"{key:>32}  {value}")


def precisions(options: argparse.Namespace) -> list[Row]:
    """`veca embed` of photos in each precision, beside that of an older version: a row each."""
    found = find_images(options.photos)[: options.images or 2_000]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        (folder / "first").mkdir()
        for photo in found[:2]:
            shutil.copyfile(photo, folder / "first" / photo.name)
        for number, photo in enumerate(found):
            shutil.copyfile(photo, folder / "images" / f"{number:06d}{photo.suffix}")
        weights = locate(options.weights)
        paths = {} if options.before is None else {BEFORE: options.before.resolve() / "src"}
        commands = {}
        for one in [*paths, *options.precisions.split(",")]:
            words = [str(len(found)), "embed", str(folder / "images"), "--out", str(folder / one)]
            words += ["--weights", str(weights), "--size", str(options.size), "--device", "cpu"]
            words += ["--workers", str(options.threads), "--threads", str(options.threads)]
            words += [] if one == BEFORE else ["--precision", one]
            commands[one] = ["-c", COMMAND, *words]
        firsts = {
            one: [w.replace(str(folder / "images"), str(folder / "first")) for w in words]
            for one, words in commands.items()
        }
        for contender in race(firsts, folder, paths):
            contender.result()
            shutil.rmtree(folder / contender.name)
        before = os.getloadavg()[0]
        contenders = race(commands, folder, paths)
    results = {contender.name: contender.result() for contender in contenders}
    first = next(iter(results.values()))["images/s"]
    rows: list[Row] = []
    for contender in contenders:
        result = results[contender.name]
        row: Row = {"weights": options.weights, "size": options.size, "threads": options.threads}
        row |= {"precision": contender.name, **result, "ratio": result["images/s"] / first}
        row |= memory_by_quarter([float(str(m["together MiB"])) for m in contender.memory])
        rows.append({**row, "load before": before, "load after": os.getloadavg()[0]})
    print_table(rows)
    return rows


def _words(options: argparse.Namespace) -> list[str]:
    """The command line of a contender: what all of them share."""
    names = ("images", "side", "cores", "batch", "threads")
    return [word for name in names for word in (f"--{name}", str(getattr(options, name)))]


def summary(
    results: dict[str, dict[str, float]], samples: list[Row], options: Any, before: float
) -> Row:
    row: Row = {
        "images": int(results["embed"]["images"]),
        "pixels": options.side,
        "cores": options.cores,
        "batch": options.batch,
        "threads": options.threads,
    }
    for name, result in results.items():
        row |= {f"{name} {key}": value for key, value in result.items() if key != "images"}
    bare = max(results["bare"]["images/s"], results["bare, all threads"]["images/s"])
    limit = min(bare, results["decoder"]["images/s"])
    row["limit images/s"] = limit
    row["share of the limit"] = results["embed"]["images/s"] / limit
    row["share by CPU time"] = results["bare"]["CPU ms/image"] / results["embed"]["CPU ms/image"]
    row |= memory_by_quarter([float(str(sample["together MiB"])) for sample in samples])
    row["load before"], row["load after"] = before, os.getloadavg()[0]
    return row


def memory_by_quarter(together: list[float]) -> Row:
    """The median of each quarter of the run, and the peak."""
    quarters = np.array_split(np.array(together), 4)
    medians = {f"memory quarter {i} MiB": float(np.median(q)) for i, q in enumerate(quarters, 1)}
    return {**medians, "memory peak MiB": max(together)}
