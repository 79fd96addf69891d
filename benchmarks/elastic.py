"""Merging patches (`keep`) beside fewer cores and smaller images: time and agreement.

    python -m benchmarks elastic --photos SQUARES --large SQUARES_OF_1024
    python -m benchmarks elastic --gpu

For the shipped weights at 512 and 1024 px, each point beside the full pass (64 cores, every patch):
the mean cosine of CLS and patches with it, and its time, in float32 on one core, in turns, as the
median over the photos of the ratios of the processor's time. Features of smaller images are
enlarged bilinearly. "plain walk" is the network as in 0.1, without a line about merging. Photos are
squares of at least the size, which choose nothing; `python -m research.elastic photos` makes such
folders.

Two and a half hours of one core. `--only` measures a part, `--agreement` (on a GPU, say) takes the
cosines alone and `--times` the times of `--timed` photos, `--join` brings two such files together;
each row says where both came from. Writes results/elastic.csv.

`--gpu`: the compiled engine of ViT-B size, fresh weights, bfloat16, beside a dense ViT of its width
with FlashAttention, both as CUDA graphs, in turns. Writes results/elastic_gpu.csv.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import veca
from benchmarks.common import capture, print_table, time_side_by_side, write_csv
from benchmarks.rows import RESULTS, read_csv, write_rows
from veca import rope
from veca.bench import machine
from veca.dense import DenseVit
from veca.images import EXTENSIONS
from veca.model import Block, Veca

SIZES = (512, 1024)
KEEPS = (0.5, 0.45, 0.4, 0.33, 0.25)
KEEPS_OF_FEW = ((0.25, 48), (0.25, 24))
"""With so many cores."""
CORES = (8,)
SMALLER = (3 / 4, 1 / 2)
BOTH = ((7 / 8, 16), (3 / 4, 16))
"""Shares of the size, with so many cores."""
PLAIN = "plain walk"
GPU_SHAPES = ((8, 1024), (8, 512), (1, 1024), (1, 512))
GPU_KEEPS = (1.0, 0.5, 0.33)

Features = tuple[Tensor, Tensor]
"""CLS [B, D] and patches [B, D, h, w]."""


class Point(NamedTuple):
    """A way to run the network on photos of one size."""

    name: str
    keep: float = 1.0
    cores: int = 64
    pixels: int = 0
    """Side of the images that go in."""

    def run(self, model: Veca, images: Tensor, side: int) -> Features:
        """On images of this point's size, with features on the grid of `side` pixels."""
        if self.name == PLAIN:
            out = plain_walk(model, images)
        else:
            out = model(images, cores=self.cores, keep=self.keep)
        patches = out.feature_map()
        if self.pixels < side:
            grid = side // model.config.patch_size
            patches = F.interpolate(patches, (grid, grid), mode="bilinear", align_corners=False)
        return out.cls, patches


def points(side: int) -> list[Point]:
    """The full pass first."""

    def pixels(share: float) -> int:
        return round(side * share / 16) * 16

    return [
        Point("full", pixels=side),
        Point(PLAIN, pixels=side),
        *(Point("keep", keep=keep, pixels=side) for keep in KEEPS),
        *(Point("keep", keep=keep, cores=cores, pixels=side) for keep, cores in KEEPS_OF_FEW),
        *(Point("cores", cores=cores, pixels=side) for cores in CORES),
        *(Point("size", pixels=pixels(share)) for share in SMALLER),
        *(Point("cores and size", cores=cores, pixels=pixels(share)) for share, cores in BOTH),
    ]


def plain_walk(model: Veca, images: Tensor) -> veca.VecaOutput:
    """The network with all its cores, as published: what `keep=1` must not be slower than."""
    c = model.config
    patches = model.patch_embed(images)
    grid = (patches.shape[-2], patches.shape[-1])
    patches = patches.flatten(2).transpose(1, 2)
    tokens, raw = model.bank.prefix(c.num_cores)
    x = torch.cat([tokens.expand(len(images), -1, -1), patches], dim=1)
    periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction, x.device)
    patch_rotation = rope.rotation(rope.grid_coordinates(*grid, x.device).unsqueeze(0), periods)
    raw = raw.unsqueeze(0)
    for number, block in enumerate(model.blocks):
        if number:
            raw = model.moves[number - 1](raw, x[:, : c.num_cores])
        core_rotation = rope.rotation(raw.tanh(), periods)
        x = cast(Block, block)(x, c.num_cores, core_rotation, patch_rotation, model.backend)
    x = model.project(model.norm(x))
    return veca.VecaOutput(x[:, : c.num_cores], x[:, c.num_cores :], raw.tanh(), grid)


def load(files: Sequence[Path], side: int, config: veca.VecaConfig) -> Tensor:
    """[P, 3, side, side], normalised."""

    def one(file: Path) -> Tensor:
        return veca.preprocess(file, (side, side), model=config).pixels

    with ThreadPoolExecutor() as pool:
        return torch.cat(list(pool.map(one, files)))


def by_lot(file: Path) -> str:
    """An order that says nothing about a photo but its name, so that any part is a fair one."""
    return hashlib.sha256(file.stem.encode()).hexdigest()


def cosines(a: Features, b: Features) -> Tensor:
    """CLS and patches of each photo: [B, 2]."""
    cls = F.cosine_similarity(a[0], b[0], dim=-1)
    return torch.stack([cls, F.cosine_similarity(a[1], b[1], dim=1).mean(dim=(1, 2))], dim=1)


class Found(NamedTuple):
    """What was found of a point, photo by photo."""

    ms: list[float]
    cosines: list[Tensor]


@torch.inference_mode()
def race(
    model: Veca, files: Sequence[Path], side: int, device: str, seconds: float
) -> dict[Point, Found]:
    """Every point on one photo after the other, until `seconds` are over.

    Milliseconds are of the thread's own time: with one thread the same as by the clock on an idle
    machine, and hardly disturbed by what else runs.
    """
    model = model.to(device)
    asked = points(side)
    found = {point: Found([], []) for point in asked}
    start = time.monotonic()
    for number, file in enumerate([files[0], *files]):  # the first one twice, to warm up
        images = {
            pixels: load([file], pixels, model.config).to(device)
            for pixels in {point.pixels for point in asked}
        }
        full: Features | None = None
        for point in asked:
            begin = time.thread_time()
            features = point.run(model, images[point.pixels], side)
            ms = 1000 * (time.thread_time() - begin)
            full = full or features
            if number:
                found[point].ms.append(ms)
                found[point].cosines.append(cosines(features, full).cpu())
        if number and time.monotonic() - start > seconds:
            break
    model.to("cpu")
    return found


def ahead(row: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> bool:
    """Whether no (cores, size) point that takes as long, or less, agrees as well in either."""
    others = [r for r in rows if r["point"] not in ("full", PLAIN, "keep")]
    return all(
        _of(r, "cls") < _of(row, "cls") and _of(r, "patches") < _of(row, "patches")
        for r in others
        if _of(r, "time") <= 1.02 * _of(row, "time")
    )


def _of(row: Mapping[str, object], name: str) -> float:
    return float(cast(float, row[name]))


def measured(
    name: str, side: int, files: Sequence[Path], kept: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, object]]:
    """The rows of one network at one size; what is not measured now is that of `kept`."""
    model = veca.load(name).eval()
    print(f"{name}, {side} px, {len(files)} photos", flush=True)
    found = race(model, files, side, options.device, options.seconds)
    agreed, taken = not options.times, not options.agreement
    rows = []
    for point in points(side):
        row = {
            "set": f"{name} {side}",
            "weights": name,
            "size": side,
            "point": point.name,
            "keep": point.keep,
            "cores": point.cores,
            "pixels": point.pixels,
        }
        old = kept.get(identity(row), {})
        if agreed:
            where = machine(options.device)
            cls, patches = torch.cat(found[point].cosines).mean(dim=0).tolist()
            row |= {"cls": cls, "patches": patches, "photos": len(found[point].cosines)}
            row["agreement on"] = f"{where.gpu or where.cpu}, torch {where.torch}"
        else:
            row |= {n: old.get(n, "") for n in ("cls", "patches", "photos", "agreement on")}
        if taken:
            full = found[points(side)[0]].ms
            row["ms"] = statistics.median(found[point].ms)
            row["time"] = statistics.median(
                ms / whole for ms, whole in zip(found[point].ms, full, strict=True)
            )
            row["timed photos"] = len(full)
            row["time on"] = machine("cpu").cpu
        else:
            row |= {n: old.get(n, "") for n in ("ms", "time", "timed photos", "time on")}
        rows.append(row)
    complete = all(row[part] != "" for row in rows for part in ("cls", "time"))
    for row in rows:
        asked = complete and row["point"] == "keep"
        row["ahead"] = _said(row, rows) if asked else ""
    return rows


def joined(files: Sequence[Path]) -> list[dict[str, str]]:
    """Rows with times of one file and cosines of another."""
    ours, theirs = (read_csv(file) for file in files)
    found = {identity(row): row for row in theirs}
    rows = []
    for row in ours:
        other = found[identity(row)]
        rows.append({name: row[name] or other.get(name, "") for name in row})
    for row in rows:
        same = [r for r in rows if r["set"] == row["set"]]
        row["ahead"] = _said(row, same) if row["point"] == "keep" else ""
    return rows


def _said(row: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> str:
    return "yes" if ahead(row, rows) else "no"


def identity(row: dict[str, Any]) -> str:
    """What a row is about, however its numbers were written."""
    names = ("weights", "size", "point", "cores", "pixels")
    return " ".join([*(str(row[n]) for n in names), f"{float(row['keep']):g}"])


def on_gpu(options: argparse.Namespace) -> None:
    """Times of the engine and the dense network, both as graphs."""
    torch.manual_seed(0)
    model = veca.create_model(options.preset).cuda().eval()
    engine = veca.compile_for_inference(model, cache=2 * len(GPU_KEEPS))
    dense = DenseVit(model.config).cuda().to(torch.bfloat16).eval()
    for block in dense.blocks:
        block.compile(dynamic=False)
    rows: list[dict[str, object]] = []
    for batch, side in GPU_SHAPES:
        images = torch.randn(batch, 3, side, side, device="cuda", dtype=torch.bfloat16)

        def flash(images: Tensor = images) -> object:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return dense(images)

        with torch.inference_mode():
            torch._dynamo.reset()
            calls: dict[str, Callable[[], object]] = {"dense flash": capture([flash])}
            for keep in GPU_KEEPS:
                prepared = engine.prepare(batch, side, keep=keep)
                prepared.images.copy_(images)
                calls[f"keep {keep:g}"] = prepared.replay
            taken = time_side_by_side(calls)
        row: dict[str, object] = {"batch": batch, "pixels": side}
        row |= {f"{name} ms": ms for name, ms in taken.items()}
        full = taken["keep 1"]
        row |= {f"time at {keep:g}": taken[f"keep {keep:g}"] / full for keep in GPU_KEEPS[1:]}
        row |= {f"speed-up {k:g}": taken["dense flash"] / taken[f"keep {k:g}"] for k in GPU_KEEPS}
        rows.append(row)
        print_table(rows[-1:])
        write_csv("elastic_gpu", rows, options.out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--photos", type=Path, help="folder of squares, for 512 px")
    parser.add_argument("--large", type=Path, help="folder of squares of 1024 px and more")
    parser.add_argument("--weights", nargs="+", default=["tiny", "small"])
    parser.add_argument("--only", nargs="+", metavar="WEIGHTS-SIZE", help="such as tiny-512")
    parser.add_argument("--limit", type=int, default=150, help="photos")
    parser.add_argument("--timed", type=int, default=12, help="photos of --times")
    parser.add_argument("--seconds", type=float, default=7200.0, help="no new photo after these")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--agreement", action="store_true", help="cosines alone; times stay")
    part.add_argument("--times", action="store_true", help="times alone; cosines stay")
    parser.add_argument("--device", default="cpu", help="for the cosines")
    parser.add_argument("--join", type=Path, nargs=2, metavar="FILE", help="of times, of cosines")
    parser.add_argument("--gpu", action="store_true", help="times of the engine on this GPU")
    parser.add_argument("--preset", default="base", help="with --gpu")
    parser.add_argument("--out", type=Path, default=RESULTS)


def run(options: argparse.Namespace) -> int:
    if options.gpu:
        on_gpu(options)
        return 0
    if options.join:
        write_rows(options.out / "elastic.csv", joined(options.join))
        return 0
    torch.set_num_threads(1)
    path = options.out / "elastic.csv"
    shown: list[dict[str, object]] = []
    for name, side in itertools.product(options.weights, SIZES):
        if options.only and f"{name}-{side}" not in options.only:
            continue
        folder = options.photos if side == SIZES[0] else options.large
        if folder is None:
            continue
        found = (file for file in folder.iterdir() if file.suffix.lower() in EXTENSIONS)
        files = sorted(found, key=by_lot)[: options.timed if options.times else options.limit]
        if not files:
            raise SystemExit(f"no photos in {folder}.")
        kept = {identity(row): row for row in (read_csv(path) if path.is_file() else [])}
        rows = measured(name, side, files, kept, options)
        write_csv("elastic", rows, options.out, device="cpu", key="set")
        print_table(rows)
        shown += rows
    if not shown:
        print("nothing to measure: give --photos, --large or both, or --gpu.")
    return 0 if shown else 2
