"""Pictures of any size: how exact, how fast, in how much memory, and with which context.

    python -m benchmarks large exactness      the pass over tiles beside the plain forward
    python -m benchmarks large read           regions from the core memory: equal, and how fast
    python -m benchmarks large ranks          two processes: equal, and the bytes they exchange
    python -m benchmarks large kills          `veca large` killed and resumed: the same bytes?
    python -m benchmarks large scaling        time and resident memory of `veca large` against size
    python -m benchmarks large contexts --voc VOC2012 --camvid CamVid    a head of photos on mosaics

With the shipped tiny weights on the CPU, float32 unless said. Pictures are mosaics of `--photos`,
by default the bundled ones. Differences are the largest ones, in units of the features' mean
magnitude. Each part writes results/large_PART.csv.

`contexts` trains a linear classifier of the classes of VOC 2012, or CamVid, on the patches of
single squares of 512 px, and applies it to other photos: alone, as mosaics, and enlarged. "seams"
is how much farther apart neighbours are across a tile's edge than elsewhere, away from photos'
edges.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

import veca
from benchmarks.common import print_table, write_csv
from benchmarks.rows import RESULTS, read_csv
from veca import rope
from veca.bench import BenchPlan, take_turns
from veca.images import find_images, normalize, read_image
from veca.images.bundled import bundled_photos
from veca.model import Veca
from veca.precision import in_precision

Pixels = np.ndarray[Any, Any]
CELL = 512
TILE = 24
VOID = 255
SETS = "voc-train:256,voc-val:64,camvid:64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--photos", type=Path, help="a folder of photos for mosaics")
    parser.add_argument("--size", type=int, default=4096, help="px a side: exactness, read, ranks")
    parser.add_argument("--sizes", default="4096,8192,16384,32768", help="px a side: scaling")
    parser.add_argument("--pictures", type=Path, help="where the pictures of scaling are kept")
    parser.add_argument("--precision", default="int8", help="scaling")
    parser.add_argument("--memory", default="1GB", help="scaling")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="that share a picture: scaling")
    parser.add_argument("--regions", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--voc", type=Path, help="the folder VOC2012: contexts")
    parser.add_argument("--camvid", type=Path, help="the folder CamVid: contexts")
    parser.add_argument("--sets", default=SETS, help="sets and their photos: contexts")
    parser.add_argument("--train", type=int, default=300, help="photos of the head: contexts")
    parser.add_argument("--mosaics", default="1024,2048,4096,8192", help="px a side: contexts")
    parser.add_argument("--enlarged", default="1024,2048,4096", help="px a side: contexts")
    parser.add_argument("--enlarged-photos", type=int, default=32, help="at 1024 px: contexts")
    parser.add_argument("--context-precision", default="bf16", help="contexts")
    parser.add_argument("--real", type=named, nargs="*", help="NAME=PATH: contexts")


def named(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    return name, Path(path)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    rows = PARTS[options.part](options)
    print_table(rows)
    if options.part in ("read", "kills"):
        write_csv(f"large_{options.part}", rows, device="cpu")


def note(part: str, rows: list[dict[str, object]], key: str = "") -> None:
    """Rows so far: a part that is stopped leaves what it has measured."""
    print(rows[-1], flush=True)
    write_csv(f"large_{part}", rows, device="cpu", key=key)


def mosaic(photos: Path | None, height: int, width: int, seed: int = 0) -> Pixels:
    """Squares of photos, each drawn at random, to fill a picture."""
    draw, out = random.Random(seed), np.empty((height, width, 3), np.uint8)
    squares = squares_of(photos)
    for top in range(0, height, CELL):
        for left in range(0, width, CELL):
            part = out[top : top + CELL, left : left + CELL]
            part[:] = draw.choice(squares)[: part.shape[0], : part.shape[1]]
    return out


@functools.cache
def squares_of(photos: Path | None) -> list[Pixels]:
    """64 of a folder's photos, or the bundled ones."""
    files = find_images([photos]) if photos is not None else bundled_photos()
    return [np.asarray(square(read_image(path))) for path in files[:64]]


def square(image: Image.Image, how: int = Image.Resampling.BICUBIC) -> Image.Image:
    """The middle of an image, as a square."""
    short = min(image.size)
    left, top = (image.width - short) // 2, (image.height - short) // 2
    box = (left, top, left + short, top + short)
    return image.resize((CELL, CELL), Image.Resampling(how), box=box)


def pixels_of(picture: Pixels) -> Tensor:
    """What the plain forward takes: filled up to whole patches by its last pixels."""
    fill = [(0, -side % 16) for side in picture.shape[:2]]
    filled = torch.from_numpy(np.pad(picture, (*fill, (0, 0)), mode="edge"))
    return normalize(filled.permute(2, 0, 1).float() / 255)[None]


def difference(found: Pixels, wanted: Pixels) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).mean())


# -------------------------------------------------------------------------------------- exactness


@torch.no_grad()
def exactness(options: argparse.Namespace) -> list[dict[str, object]]:
    """One process and two; cases that were measured before stay in the file."""
    model, side = veca.load("tiny").eval(), options.size
    even, odd = mosaic(options.photos, side, side), mosaic(options.photos, side - 37, side - 203)
    mask = np.random.default_rng(1).random((side // 16, side // 16)) < 0.5
    mask[: side // 64] = False  # whole tiles
    cases: list[tuple[str, Pixels, int, Any]] = [
        ("square, 1 core", even, 1, None),
        ("square, 8 cores", even, 8, None),
        ("square, 64 cores", even, 64, None),
        ("odd sides, 64 cores", odd, 64, None),
        ("half masked, 64 cores", even, 64, mask),
    ]
    path = RESULTS / "large_exactness.csv"
    there = read_csv(path) if path.exists() else []
    rows: list[dict[str, object]] = []
    for name, picture, cores, kept in cases:
        known = {"case": name, "height": picture.shape[0], "width": picture.shape[1]}
        if any(all(row[k] == str(v) for k, v in known.items()) for row in there if "case" in row):
            continue
        whole = plain(model, picture, cores, kept)
        # Sums over many tokens round in the plain forward as well: which of the two is nearer?
        exact = plain(copy.deepcopy(model).double(), picture, cores, kept)
        one = veca.large.features(model, picture, cores=cores, mask=kept, memory="4GB", tile=32)
        assert one.features is not None
        two = two_ranks(picture, cores, kept, options.threads)
        rows.append({
            **known, "cores": cores,
            "one_process": difference(one.features, whole[0]),
            "two_processes": difference(two.features, whole[0]),
            "two_from_one": difference(two.features, one.features),
            "one_from_float64": difference(one.features, exact[0]),
            "plain_from_float64": difference(whole[0], exact[0]),
            "cores_one": difference(one.cores.numpy(), whole[1]),
            "cores_from_float64": difference(one.cores.numpy(), exact[1]),
        })  # fmt: skip
        note("exactness", rows, "case")
        del one, two, whole, exact
    return rows or [{"exactness": "all there"}]


def plain(model: Veca, picture: Pixels, cores: int, mask: Any = None) -> tuple[Pixels, Pixels]:
    """Features of the plain forward, of the patches that are there: [h, w, D'] and the cores'."""
    c, pixels = model.config, pixels_of(picture).to(model.dtype)
    grid = (pixels.shape[2] // c.patch_size, pixels.shape[3] // c.patch_size)
    if mask is None:
        out = model(pixels, cores)
        return out.patches[0].view(*grid, -1).numpy(), out.cores[0].numpy()
    there = torch.from_numpy(mask).flatten().nonzero().flatten()
    periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction)
    places = rope.rotation(rope.grid_coordinates(*grid)[there][None], periods)
    patches = model.patch_embed(pixels).flatten(2).transpose(1, 2)[:, there]
    tokens, raw = model.bank.prefix(cores)
    x, raw = torch.cat([tokens[None], patches], dim=1), raw[None]
    for number, block in enumerate(model.blocks):
        raw = model.moves[number - 1](raw, x[:, :cores]) if number else raw
        x = block(x, cores, rope.rotation(raw.tanh(), periods), places)
    x = model.project(model.norm(x))[0]
    found = np.zeros((mask.size, x.shape[1]), np.float32)
    found[there.numpy()] = x[cores:].numpy()
    return found.reshape(*grid, -1), x[:cores].numpy()


# ------------------------------------------------------------------------------------------- read


@torch.no_grad()
def read(options: argparse.Namespace) -> list[dict[str, object]]:
    model, side = veca.load("tiny").eval(), options.size
    picture = mosaic(options.photos, side, side)
    out = veca.large.features(model, picture, memory="8GB", tile=32)
    memory, draw = out.memory, random.Random(0)
    assert memory is not None and out.features is not None
    equal, worst = 0, 0.0
    for _ in range(options.regions):
        rows, columns = draw.randint(1, 12), draw.randint(1, 12)
        row, column = draw.randrange(side // 16 - rows), draw.randrange(side // 16 - columns)
        at = (16 * row, 16 * column)
        pixels = veca.large.region(model, picture, at, (16 * rows, 16 * columns))
        found = model.read(memory, pixels, at).patches[0].view(rows, columns, -1).numpy()
        wanted = out.features[row : row + rows, column : column + columns]
        equal += bool((found == wanted).all())
        worst = max(worst, difference(found, wanted))
    pixels = pixels_of(picture[:512, :512])
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: model.read(memory, pixels, (0, 0)),
        "forward": lambda: model(pixels),
    }
    times = take_turns(calls, BenchPlan(device="cpu", repeats=15, seconds=5))
    ratios = sorted(a / b for a, b in zip(times["read"], times["forward"], strict=True))
    ms = {name: float(np.median(found)) for name, found in times.items()}
    return [{
        "size": side, "regions": options.regions, "equal_to_the_bit": equal, "difference": worst,
        "read_ms": ms["read"], "forward_ms": ms["forward"], "ratio": ratios[len(ratios) // 2],
    }]  # fmt: skip


# ------------------------------------------------------------------------------------------ ranks


class TwoRanks(NamedTuple):
    """What two processes made of a picture."""

    features: Pixels
    cores: Pixels
    exchanged: int
    """Bytes that one of them gave, in all layers together."""


def ranks(options: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    layers = veca.load("tiny").config.depth
    for side in (options.size // 4, options.size // 2, options.size):
        picture = mosaic(options.photos, side, side)
        found = two_ranks(picture, 64, None, options.threads)
        with torch.no_grad():
            whole = plain(veca.load("tiny").eval(), picture, 64)
        rows.append({
            "size": side, "ranks": 2, "patches": difference(found.features, whole[0]),
            "bytes_a_layer": found.exchanged // layers,
            "gradients_float32": _gradients(side, torch.float32) if side <= 1024 else "",
            "gradients_float64": _gradients(side, torch.float64) if side <= 1024 else "",
        })  # fmt: skip
        note("ranks", rows)
    return rows


def two_ranks(picture: Pixels, cores: int, mask: Any, threads: int) -> TwoRanks:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "picture.npy", picture)
        if mask is not None:
            np.save(folder / "mask.npy", mask)
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(_rank, (name, cores, threads), nprocs=2)
        exchanged = int((folder / "exchanged").read_text())
        return TwoRanks(np.load(folder / "features.npy"), np.load(folder / "cores.npy"), exchanged)


def _rank(rank: int, name: str, cores: int, threads: int) -> None:
    torch.set_num_threads(threads)
    folder = Path(name)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    exchanged = [0]
    join = veca.large.ranks.Ranks.join

    def counted(self: Any, part: Any) -> Any:
        found = join(self, part)
        exchanged[0] = self.exchanged
        return found

    veca.large.ranks.Ranks.join = counted  # type: ignore[method-assign]
    picture = np.load(folder / "picture.npy", mmap_mode="r")
    mask = np.load(folder / "mask.npy") if (folder / "mask.npy").exists() else None
    out = veca.large.features(
        veca.load("tiny").eval(), picture, folder / "features.npy",
        cores=cores, mask=mask, group=dist.group.WORLD, tile=32,
    )  # fmt: skip
    if rank == 0:
        np.save(folder / "cores.npy", out.cores.numpy())
        (folder / "exchanged").write_text(str(exchanged[0]))
    dist.destroy_process_group()


def _gradients(side: int, dtype: torch.dtype) -> float:
    """The largest difference of a gradient from one process's, in units of the largest of its
    tensor: a model split over two processes, each with half of the picture."""
    with tempfile.TemporaryDirectory() as name:
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(_gradients_of_rank, (name, side, dtype), nprocs=2)
        parts = [torch.load(Path(name) / f"{rank}.pt") for rank in range(2)]
    model = veca.load("tiny").eval().to(dtype)
    _loss(model(_noise(side).to(dtype)).patches, side, slice(None)).backward()
    worst = 0.0
    for key, parameter in model.named_parameters():
        wanted = parameter.grad
        if wanted is not None and wanted.abs().max() > 0:
            found = parts[0][key] + parts[1][key]
            worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    return worst


def _gradients_of_rank(rank: int, name: str, side: int, dtype: torch.dtype) -> None:
    meet = f"file://{name}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    model = veca.load("tiny").eval().to(dtype)
    split = veca.large.SplitVeca(model, dist.group.WORLD)
    rows = slice(rank * side // 2, (rank + 1) * side // 2)
    out = split(_noise(side)[:, :, rows].to(dtype), at=(rows.start, 0), size=(side, side))
    half = slice(rows.start // 16 * (side // 16), rows.stop // 16 * (side // 16))
    _loss(out.patches, side, half).backward()
    found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    torch.save(found, Path(name) / f"{rank}.pt")
    dist.destroy_process_group()


def _noise(side: int) -> Tensor:
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))


def _loss(patches: Tensor, side: int, part: slice) -> Tensor:
    """Of each patch by itself, so that parts add up."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn((side // 16) ** 2, patches.shape[2], generator=generator)
    return (patches[0] * weights[part].to(patches.dtype)).sum() / len(weights)


# ------------------------------------------------------------------------------------------ kills


def kills(options: argparse.Namespace) -> list[dict[str, object]]:
    """Killed at random moments until it has been killed often enough; then left to end."""
    draw = random.Random(0)
    side = min(options.size, 2048)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        picture = folder / "picture.tif"
        write_tiff(picture, side, options.photos)
        whole, stopped = folder / "whole.zarr", folder / "stopped.zarr"
        first = _begun(_command(picture, whole, "1GB"))
        assert not first.process.wait()
        seconds = time.perf_counter() - first.at
        killed = finished = 0
        while killed < options.kills:
            process = _begun(_command(picture, stopped, "1GB")).process
            try:
                process.wait(seconds * draw.uniform(0.02, 0.4))
                # It came to its end: begin another.
                finished += 1
                assert digest(stopped) == digest(whole)
                subprocess.run(["rm", "-r", str(stopped)], check=True)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                killed += 1
        subprocess.run(_command(picture, stopped, "1GB"), check=True, stdout=subprocess.DEVNULL)
        same = digest(stopped) == digest(whole)
        left = sorted(path.name for path in folder.iterdir())
    return [{
        "size": side, "kills": killed, "ends": finished + 1, "same_bytes": same,
        "left_over": len(left) - 3,
    }]  # fmt: skip


class _Begun(NamedTuple):
    process: subprocess.Popen[str]
    at: float


def _begun(command: list[str]) -> _Begun:
    """A command whose pass has begun: it has said what it will take."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if " tiles of " in line:
            break
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return _Begun(process, time.perf_counter())


def _command(picture: Path, out: Path, memory: str, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "veca", "large", str(picture), "--out", str(out), "--memory", memory,
        "--context", "image", "--spill", "disk", "--device", "cpu", *more,
    ]  # fmt: skip


def digest(folder: Path) -> str:
    """Of all files of a folder, by name and content."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(str(path.relative_to(folder)).encode())
            found.update(path.read_bytes())
    return found.hexdigest()


# ---------------------------------------------------------------------------------------- scaling


def write_tiff(path: Path, side: int, photos: Path | None) -> None:
    """A BigTIFF of JPEG tiles, a mosaic of photos, made a row of tiles at a time."""
    import tifffile

    def tiles() -> Iterator[Pixels]:
        for row in range(-(-side // CELL)):
            height = min(CELL, side - row * CELL)
            band = mosaic(photos, height, side, seed=row)
            for left in range(0, side, CELL):
                yield band[:, left : left + CELL]

    tifffile.imwrite(
        path, tiles(), bigtiff=True, shape=(side, side, 3), dtype=np.uint8, tile=(CELL, CELL),
        photometric="rgb", compression="jpeg", compressionargs={"level": 90},
    )  # fmt: skip


class _Resident(threading.Thread):
    """The most KiB that a process and those it began had resident together, by looking often."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._most, self._over = pid, 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.2):
            listed = subprocess.run(
                ["ps", "-eo", "pid=,ppid=,rss="], capture_output=True, text=True, check=False
            ).stdout
            rows = [[int(x) for x in line.split()] for line in listed.splitlines()]
            ours, before = {self._pid}, 0
            while len(ours) > before:
                before = len(ours)
                ours |= {pid for pid, parent, _ in rows if parent in ours}
            self._most = max(self._most, sum(rss for pid, _, rss in rows if pid in ours))

    def most(self) -> int:
        self._over.set()
        self.join()
        return self._most


def scaling(options: argparse.Namespace) -> list[dict[str, object]]:
    """One after the other; sizes that were measured before stay in the file."""
    rows: list[dict[str, object]] = []
    for side in [int(text) for text in options.sizes.split(",")]:
        with tempfile.TemporaryDirectory(dir=options.pictures) as name:
            folder = options.pictures or Path(name)
            picture, out = folder / f"picture-{side}.tif", Path(name) / "features.zarr"
            if not picture.exists():
                write_tiff(picture, side, options.photos)
            command = _command(
                picture, out, options.memory, "--precision", options.precision,
                "--threads", str(options.threads),
            )  # fmt: skip
            if options.processes > 1:
                shared = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
                command[2:3] = [*shared, str(options.processes), "-m", "veca"]
            start = time.perf_counter()
            process = subprocess.Popen(command)
            resident = _Resident(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - start
            if status:
                raise SystemExit(f"veca large failed at {side} px")
            stored = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        cpu = usage.ru_utime + usage.ru_stime
        rows.append({
            "run": f"{side} px, {options.processes} x {options.threads}", "size": side,
            "precision": options.precision, "processes": options.processes,
            "threads": options.threads,
            "patches": (side // 16) ** 2, "seconds": seconds, "cpu_seconds": cpu,
            "resident_gib": resident.most() / 2**20, "store_gb": stored / 1e9,
        })  # fmt: skip
        note("scaling", rows, "run")
    return rows


# --------------------------------------------------------------------------------------- contexts


class Labelled(NamedTuple):
    """Photos with the classes of their patches, and others that a head is trained on."""

    train: list[tuple[Pixels, Pixels]]
    test: list[tuple[Pixels, Pixels]]
    classes: int


CONTEXTS: dict[str, dict[str, Any]] = {
    "image": {"context": "image"},
    "overview": {"context": "overview"},
    "tile": {"context": "tile"},
    "tile of 1024 px": {"context": "tile", "tile": 56},
    "tile+overview": {"context": "tile+overview"},
}


@torch.no_grad()
def contexts(options: argparse.Namespace) -> list[dict[str, object]]:
    """Groups of rows that were measured before stay in the file and are not measured again."""
    model = in_precision(veca.load("tiny").eval(), options.context_precision)
    wanted = dict(text.split(":") for text in filter(None, options.sets.split(",")))
    path = RESULTS / "large_contexts.csv"
    rows: list[dict[str, object]] = []
    for name, count in wanted.items():
        given = _labelled(options, name, int(count))
        head = None
        for kind, side, pairs in _pictures(options, given.test):
            group = f"{name}, {kind} {side}"
            if path.exists() and any(row["group"] == group for row in read_csv(path)):
                continue
            if head is None:
                head = _ridge(*_patches(model, given.train), given.classes)
            rows += _under_each_context(model, head, kind, side, pairs, {"group": group})
            note("contexts", rows, "group")
    for place in options.real or []:
        group = f"{place[0]}, real"
        if not (path.exists() and any(row["group"] == group for row in read_csv(path))):
            rows += _real(model, place[1], options.size, {"group": group})
            note("contexts", rows, "group")
    return rows or [{"contexts": "all there"}]


def _pictures(
    options: argparse.Namespace, test: list[tuple[Pixels, Pixels]]
) -> Iterator[tuple[str, int, list[tuple[Pixels, Pixels]]]]:
    """Kind, side, and the pictures with their labels; of the largest enlarged ones fewer."""
    yield "alone", CELL, test
    for side in [int(text) for text in options.mosaics.split(",")]:
        if (side // CELL) ** 2 <= len(test):
            yield "mosaic", side, _mosaics(test, side // CELL)
    for side in [int(text) for text in options.enlarged.split(",")]:
        some = test[: max(4, options.enlarged_photos * 1024 // side)]
        yield "enlarged", side, [_enlarged(*pair, side // CELL) for pair in some]


def _under_each_context(
    model: Veca,
    head: Tensor,
    kind: str,
    side: int,
    pairs: list[tuple[Pixels, Pixels]],
    row: dict[str, object],
) -> list[dict[str, object]]:
    """A row for each context; the difference to "image" with its 95 % CI over photos."""
    rows: list[dict[str, object]] = []
    cell = pairs[0][1].shape[0] if kind == "enlarged" else CELL // 16
    base = None
    for context, asked in {"image": CONTEXTS["image"]}.items() if kind == "alone" else (
        CONTEXTS.items()
    ):  # fmt: skip
        photos: list[Pixels] = []
        seams = []
        start = time.process_time()
        for picture, labels in pairs:
            out = veca.large.features(model, picture, width="native", memory="2GB", **asked)
            assert out.features is not None
            photos += _counts(_classes(head, out.features), labels, cell, head.shape[1])
            if kind != "alone":
                edges = CELL // 16 if kind == "mosaic" else 0
                seams.append(_seams(out.features, edges, asked.get("tile", TILE)))
        seconds = time.process_time() - start
        counts = np.stack(photos)
        base = counts if base is None else base
        low, high = _interval(counts, base)
        whole = counts.sum(axis=0)
        rows.append({
            **row, "pictures": kind, "size": side, "photos": len(photos), "context": context,
            "precision": model.precision, "miou": 100 * _miou(whole),
            "minus_image": 100 * (_miou(whole) - _miou(base.sum(axis=0))),
            "ci_low": 100 * low, "ci_high": 100 * high,
            "accuracy": float(100 * whole.trace() / whole.sum()),
            "seams": float(np.mean(seams)) if seams else "", "shifted": "",
            "cpu_s_a_megapixel": 1e6 * seconds / sum(p.shape[0] * p.shape[1] for p, _ in pairs),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def _real(model: Veca, path: Path, side: int, row: dict[str, object]) -> list[dict[str, object]]:
    """The middle of a real picture. "shifted": the mean cosine of the patches' features with those
    in the picture that begins half a tile later, so that tiles, and the extent, differ."""
    whole = veca.large.open_picture(path)
    tall, wide = (min(side, length) // 16 * 16 for length in whole.shape)
    top, left = (
        (length - part) // 2 for length, part in zip(whole.shape, (tall, wide), strict=True)
    )
    picture = whole.window(top, left, tall, wide)
    rows: list[dict[str, object]] = []
    for context, asked in CONTEXTS.items():
        by = asked.get("tile", TILE) // 2
        start = time.process_time()
        out = veca.large.features(model, picture, width="native", memory="2GB", **asked)
        seconds = time.process_time() - start
        part = np.ascontiguousarray(picture[16 * by :, 16 * by :])
        other = veca.large.features(model, part, width="native", memory="2GB", **asked)
        assert out.features is not None and other.features is not None
        same = torch.cosine_similarity(
            torch.from_numpy(out.features[by:, by:]), torch.from_numpy(other.features), dim=-1
        )
        rows.append({
            **row, "pictures": "real", "size": max(tall, wide), "photos": 1, "context": context,
            "precision": model.precision,
            "seams": _seams(out.features, 0, asked.get("tile", TILE)),
            "shifted": float(same.mean()),
            "cpu_s_a_megapixel": 1e6 * seconds / (tall * wide),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def _labelled(options: argparse.Namespace, name: str, count: int) -> Labelled:
    """`voc-train`: photos of the training split that the head is not trained on; the choice of the
    default is made by these. `voc-val` and `camvid` are for reporting alone."""
    if name == "camvid":
        listed = {
            split: [(path, options.camvid / f"{split}annot" / f"{path.stem}.png") for path in files]
            for split in ("train", "val", "test")
            for files in [sorted((options.camvid / split).iterdir())]
        }
        drawn = random.Random(0).sample(listed["test"] + listed["val"], count)
        return Labelled(
            _squares(listed["train"][: options.train], 11, 11), _squares(drawn, 11, 11), 11
        )
    lists = options.voc / "ImageSets" / "Segmentation"
    train, held = [(lists / f"{split}.txt").read_text().split() for split in ("train", "val")]
    random.Random(0).shuffle(train)
    train, rest = train[: options.train], train[options.train :]
    test = (rest if name == "voc-train" else random.Random(0).sample(held, count))[:count]

    def files(names: list[str]) -> list[tuple[Path, Path]]:
        return [
            (
                options.voc / "JPEGImages" / f"{n}.jpg",
                options.voc / "SegmentationClass" / f"{n}.png",
            )
            for n in names
        ]

    return Labelled(_squares(files(train), 21, VOID), _squares(files(test), 21, VOID), 21)


def _squares(
    files: Sequence[tuple[Path, Path]], classes: int, void: int
) -> list[tuple[Pixels, Pixels]]:
    """Squares of photos [512, 512, 3] with the classes of their patches [32, 32]."""
    found = []
    for photo, label in files:
        numbers = np.asarray(square(Image.open(label), Image.Resampling.NEAREST))
        pixels = np.asarray(square(read_image(photo)))
        found.append((pixels, _by_patch(np.where(numbers == void, VOID, numbers), classes)))
    return found


def _counts(found: Pixels, labels: Pixels, cell: int, classes: int) -> list[Pixels]:
    """For each photo of a picture, how often each class was taken for each."""
    counts = []
    for row in range(0, labels.shape[0], cell):
        for column in range(0, labels.shape[1], cell):
            part = np.s_[row : row + cell, column : column + cell]
            known = labels[part] != VOID
            one = np.zeros((classes, classes))
            np.add.at(one, (labels[part][known], found[part][known]), 1)
            counts.append(one)
    return counts


def _interval(counts: Pixels, base: Pixels) -> tuple[float, float]:
    """Of the difference in mIoU, over photos drawn anew 1,000 times."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(1000):
        weight = np.bincount(draw.integers(len(counts), size=len(counts)), minlength=len(counts))
        one, other = (np.tensordot(weight, x, axes=1) for x in (counts, base))
        found.append(_miou(one) - _miou(other))
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def _by_patch(labels: Pixels, classes: int) -> Pixels:
    """The class that most of a patch is of; void where that is less than half."""
    side = len(labels) // 16
    blocks = labels.reshape(side, 16, side, 16).transpose(0, 2, 1, 3).reshape(side, side, 256)
    counts = np.stack([(blocks == number).sum(axis=2) for number in range(classes)])
    return np.where(counts.max(axis=0) >= 128, counts.argmax(axis=0), VOID)


def _patches(
    model: Veca, pairs: Sequence[tuple[Pixels, Pixels]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Of each photo the features of its patches and their classes, where these are known."""
    features, labels = [], []
    for picture, classes in pairs:
        known = torch.from_numpy(classes.ravel() != VOID)
        features.append(model.tokens(pixels_of(picture)).patches[0][known])
        labels.append(torch.from_numpy(classes.ravel().astype(np.int64))[known])
    return features, labels


def _ridge(features: list[Tensor], labels: list[Tensor], classes: int) -> Tensor:
    """A linear classifier [D + 1, classes] by least squares; rare classes count for more."""
    share = torch.cat(labels).bincount(minlength=classes).clamp_min(1).double().rsqrt()
    width = features[0].shape[1] + 1
    gram = torch.zeros(width, width, dtype=torch.double)
    right = torch.zeros(width, classes, dtype=torch.double)
    for part, of in zip(features, labels, strict=True):
        x = _with_one(part.double())
        weighed = share[of][:, None] * x
        gram += x.T @ weighed
        right += weighed.T @ torch.nn.functional.one_hot(of, classes).double()
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(width, dtype=gram.dtype)
    return torch.linalg.solve(gram, right)


def _with_one(features: Tensor) -> Tensor:
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


def _classes(head: Tensor, features: Pixels) -> Pixels:
    flat = torch.from_numpy(features).flatten(0, 1).double()
    found: Pixels = (_with_one(flat) @ head).argmax(dim=1).view(features.shape[:2]).numpy()
    return found


def _mosaics(pairs: Sequence[tuple[Pixels, Pixels]], across: int) -> list[tuple[Pixels, Pixels]]:
    found = []
    for start in range(0, len(pairs) - across**2 + 1, across**2):
        group = pairs[start : start + across**2]
        parts = [
            np.concatenate([
                np.concatenate([pair[kind] for pair in group[row * across : (row + 1) * across]], 1)
                for row in range(across)
            ])
            for kind in (0, 1)
        ]  # fmt: skip
        found.append((parts[0], parts[1]))
    return found


def _enlarged(picture: Pixels, labels: Pixels, times: int) -> tuple[Pixels, Pixels]:
    """One scene, of which a tile shows a part."""
    side = times * CELL
    large = Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(large), labels.repeat(times, axis=0).repeat(times, axis=1)


def _seams(features: Pixels, cell: int, tile: int) -> float:
    """Mean cosine distance of neighbours across tiles' edges, in units of that inside tiles."""
    x = features / np.linalg.norm(features, axis=2, keepdims=True)
    across: list[float] = []
    inside: list[float] = []
    for axis in (0, 1):
        turned = np.moveaxis(x, axis, 0)
        distance = 1 - (turned[1:] * turned[:-1]).sum(axis=2)
        for number, line in enumerate(distance, start=1):
            if cell and number % cell == 0:
                continue
            (across if number % tile == 0 else inside).append(line.mean())
    return float(np.mean(across) / np.mean(inside))


def _miou(counts: Pixels) -> float:
    union = counts.sum(axis=0) + counts.sum(axis=1) - counts.diagonal()
    there = counts.sum(axis=1) > 0
    return float((counts.diagonal()[there] / union[there]).mean())


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, object]]]] = {
    "exactness": exactness,
    "read": read,
    "ranks": ranks,
    "kills": kills,
    "scaling": scaling,
    "contexts": contexts,
}
