"""Tune the Triton kernels of core attention on the GPU at hand.

    python -m benchmarks tune_attention [--parts check,forward] [--cores 64,8]

First the kernels are compared with a float64 definition, in poisoned memory. Then every launch in
the grids below is timed on every shape: CUDA graphs over several input sets, so that neither
launches nor the cache flatter anyone; medians; bytes that must move over the time, as a share of
what a copy reaches. The best launch of a shape is then timed with other numbers of splits. Worker
processes compile everything beforehand, side by side: they fill Triton's cache on disk.

With --out FOLDER all numbers also go to FOLDER/tune_attention.csv.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import write_csv
from benchmarks.rows import ROOT
from veca.attention import launch as launching
from veca.attention.knobs import Launch, choose_splits, resident, tiled
from veca.attention.launch import launch_backward, launch_forward

SHAPES = ((1, 4096), (32, 256), (32, 1024), (8, 4096), (32, 196), (8, 4000))
"""Batch and patches; the last two fill no tile evenly, as after merging."""
HEADS, WIDTH = 12, 64


class Mode(NamedTuple):
    """What is given beside q, k and v."""

    tables: torch.dtype | None
    dtype: torch.dtype = torch.bfloat16
    counted: bool = False
    """With multiplicity."""


MODES = {
    "plain": Mode(None),
    "fp32 tables": Mode(torch.float32),
    "bf16 tables": Mode(torch.bfloat16),
    "bf16 tables, counted": Mode(torch.bfloat16, counted=True),
    "float32": Mode(torch.float32, torch.float32),
}

COLUMNS = ["pass", "batch", "patches", "cores", "tables", "launch", "splits", "ms", "share"]

GRID = {
    "forward": [
        Launch(64, 4, 3, 4, 128),
        Launch(64, 4, 2, 4, 128),
        Launch(64, 4, 3, 3, 168),
        Launch(64, 4, 2, 3, 168),
        Launch(64, 4, 1, 3, 168),
        Launch(64, 4, 3, 2),
        Launch(64, 4, 3, 3),
        Launch(64, 4, 2, 2),
        Launch(64, 8, 2, 2, 128),
        Launch(128, 8, 2, 1),
        Launch(32, 4, 3, 3, 168),
        Launch(32, 4, 2, 4, 128),
        Launch(64, 4, 2, 3, 168, fused=True),
    ],
    "backward": [
        Launch(64, 4, 3, 2),
        Launch(64, 4, 2, 2),
        Launch(64, 4, 1, 2),
        Launch(64, 8, 2, 1),
        Launch(64, 8, 1, 1),
        Launch(32, 4, 3, 2),
        Launch(32, 4, 2, 2),
        Launch(64, 4, 1, 2, fused=True),
    ],
}
TILED_GRID = [
    Launch(32, 8, 1, 1),
    Launch(32, 8, 1, 2),
    Launch(16, 4, 1, 2),
    Launch(16, 4, 1, 4),
    Launch(32, 4, 1, 2),
]
"""Where the cores do not stay on the chip: float32."""


def describe(launch: Launch) -> str:
    cap = launch.registers or "-"
    roles = "fused" if launch.fused else "roles"
    return f"n{launch.block} w{launch.warps} s{launch.stages} r{cap} {roles} per_sm{launch.per_sm}"


# -- inputs ---------------------------------------------------------------------------------------


class Case:
    """One problem: inputs, what the forward left behind, and a gradient to send back."""

    def __init__(
        self, batch: int, patches: int, cores: int, tables: torch.dtype | None,
        heads: int = HEADS, width: int = WIDTH, dtype: torch.dtype = torch.bfloat16,
        counted: bool = False,
    ) -> None:  # fmt: skip
        tokens = cores + patches
        packed = torch.randn(batch, tokens, 3, heads, width, device="cuda", dtype=dtype)
        self.q, self.k, self.v = (x.transpose(1, 2) for x in packed.unbind(2))
        grad = torch.randn(batch, tokens, heads, width, device="cuda", dtype=dtype)
        self.grad = grad.transpose(1, 2)
        self.tables: list[Tensor | None] = [None] * 4
        if tables is not None:
            core = torch.randn(batch, cores, width // 2, device="cuda")
            patch = torch.randn(1, patches, width // 2, device="cuda")
            parts = (core.cos(), core.sin(), patch.cos(), patch.sin())
            self.tables = [part.to(tables) for part in parts]
        self.cores, self.scale = cores, width**-0.5
        self.out, self.lse = self.q, self.q
        # As after merging: some tokens stand for four patches.
        some = torch.rand(batch, patches, device="cuda") < 0.3
        self.counts = torch.where(some, 4.0, 1.0) if counted else None

    def forward(self, **overrides: Any) -> tuple[Tensor, ...]:
        tail = (*self.tables, self.cores, self.scale, self.counts)
        return launch_forward(self.q, self.k, self.v, *tail, **overrides)

    def backward(self, **overrides: Any) -> tuple[Tensor, ...]:
        saved = (self.grad, self.q, self.k, self.v, self.out, self.lse)
        tables = self.tables[0] is not None
        tail = (*self.tables, self.cores, self.scale, tables, self.counts)
        return launch_backward(*saved, *tail, **overrides)

    def prepare(self) -> Case:
        self.out, self.lse = self.forward()
        return self


# -- correctness ----------------------------------------------------------------------------------


def turned(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None or sin is None:
        return x
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def definition(case: Case) -> list[Tensor]:
    """Output and gradients in float64, by a dense masked softmax."""
    given = (case.q, case.k, case.v, *case.tables[:2])
    leaves = [x.detach().double().requires_grad_() for x in given if x is not None]
    core: list[Tensor | None] = [*leaves[3:]] or [None, None]
    patch = [None if x is None else x.double() for x in case.tables[2:]]
    n = case.cores

    def rotate(x: Tensor) -> Tensor:
        return torch.cat([turned(x[:, :, :n], *core), turned(x[:, :, n:], *patch)], dim=2)

    index = torch.arange(case.q.shape[2], device="cuda")
    seen = (index[:, None] < n) | (index[None, :] < n)
    scores = rotate(leaves[0]) @ rotate(leaves[1]).transpose(-1, -2) * case.scale
    out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ leaves[2]
    return [out.detach(), *torch.autograd.grad(out, leaves, case.grad.double())]


def check(case: Case, name: str, limit: float, **overrides: Any) -> bool:
    clean, launching.empty = launching.empty, poisoned
    try:
        case.out, case.lse = case.forward(**overrides)
        got = [case.out, *case.backward(**overrides)]
    except Exception as problem:  # a launch that does not fit, say: report it and go on
        print(f"FAILED  {name}: {type(problem).__name__}: {str(problem)[:200]}")
        return False
    finally:
        launching.empty = clean
    errors = []
    for a, b in zip(got, definition(case), strict=False):
        errors.append(((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item())
    fine = all(value < limit for value in errors)
    print(f"{'ok    ' if fine else 'WRONG '}  {name}: " + " ".join(f"{e:.1e}" for e in errors))
    return fine


def poisoned(like: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    return like.new_full(shape, float("nan"), dtype=dtype)


CHECKS = (  # batch, heads, patches, cores, width
    (2, 3, 1000, 64, 64),
    (1, 12, 4097, 8, 64),
    (2, 3, 100, 33, 32),
    (2, 3, 257, 64, 128),
    (1, 2, 300, 70, 64),
    (2, 2, 0, 5, 64),
)


def checks() -> Iterator[tuple[str, float, Callable[[], Case]]]:
    for batch, heads, patches, cores, width in CHECKS:
        for tables in (None, torch.float32):
            name = f"bf16 {batch}x{heads}x{patches}+{cores}x{width} {tables or 'plain'}"
            make = functools.partial(Case, batch, patches, cores, tables, heads, width)
            yield name, 1e-2, make
    for patches, cores, width in ((257, 33, 32), (130, 64, 64), (100, 70, 128)):
        name = f"fp32 2x3x{patches}+{cores}x{width}"
        make = functools.partial(Case, 2, patches, cores, torch.float32, 3, width, torch.float32)
        yield name, 1e-5, make


# -- time -----------------------------------------------------------------------------------------


def time_over(calls: list[Callable[[], Any]], replays: int = 15) -> float:
    """Median seconds of one call: all calls in one graph, results kept apart in memory."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()  # compiles and warms up, outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    times = []
    for turn in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    del kept, graph
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy, reads and writes counted."""
    pairs = [torch.empty(2, 1 << 29, device="cuda", dtype=torch.uint8) for _ in range(2)]
    seconds = time_over([functools.partial(pair[0].copy_, pair[1]) for pair in pairs])
    return 2 * (1 << 29) / seconds


def case(batch: int, patches: int, cores: int, mode: Mode) -> Case:
    made = Case(batch, patches, cores, mode.tables, dtype=mode.dtype, counted=mode.counted)
    return made.prepare()


def cases(batch: int, patches: int, cores: int, mode: Mode) -> list[Case]:
    """Enough input sets to overflow the L2 cache several times."""
    count = max(2, min(8, -(-300_000_000 // bytes_moved("forward", batch, patches, cores, mode))))
    return [case(batch, patches, cores, mode) for _ in range(count)]


def bytes_moved(kind: str, batch: int, patches: int, cores: int, mode: Mode) -> int:
    """forward: q, k, v in, out out. backward: q, k, v, dO in, dq, dk, dv out."""
    tensors = 4 if kind == "forward" else 7
    return tensors * batch * (patches + cores) * HEADS * WIDTH * mode.dtype.itemsize


def try_time(calls: list[Callable[[], Any]]) -> float | None:
    try:
        return time_over(calls)
    except Exception as problem:  # most likely out of shared memory
        print(f"    skipped: {type(problem).__name__}: {str(problem).splitlines()[0][:120]}")
        torch.cuda.synchronize()
        return None


def rival_calls(sets: list[Case]) -> dict[str, list[Callable[[], Any]]]:
    """Two SDPA calls, and dense attention over all tokens by cuDNN."""

    def twice(q: Tensor, k: Tensor, v: Tensor, n: int) -> list[Tensor]:
        cores = scaled_dot_product_attention(q[:, :, :n], k, v)
        return [cores, scaled_dot_product_attention(q[:, :, n:], k[:, :, :n], v[:, :, :n])]

    def dense(q: Tensor, k: Tensor, v: Tensor, n: int) -> list[Tensor]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return [scaled_dot_product_attention(q, k, v)]

    def both_ways(run: Callable[..., list[Tensor]], case: Case) -> Any:
        leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
        out = run(*leaves, case.cores)
        grads = [case.grad] if len(out) == 1 else case.grad.tensor_split([case.cores], dim=2)
        return torch.autograd.grad(out, leaves, list(grads))

    calls: dict[str, list[Callable[[], Any]]] = {}
    for name, run in {"two SDPA": twice, "dense cuDNN": dense}.items():
        calls[f"{name} forward"] = [
            functools.partial(run, case.q, case.k, case.v, case.cores) for case in sets
        ]
        calls[f"{name} forward+backward"] = [
            functools.partial(both_ways, run, case) for case in sets
        ]
    return calls


def tune(
    kind: str, shape: tuple[int, int], cores: int, mode: str, bandwidth: float, rows: list[Any]
) -> str:
    """Time every candidate; returns a line that sets the best beside what the tables pick."""
    batch, patches = shape
    given = MODES[mode]
    sets = cases(batch, patches, cores, given)
    size = bytes_moved(kind, batch, patches, cores, given)
    table = given.tables.itemsize if given.tables else 0
    shape_of = {"cores": cores, "patches": patches}
    used = resident(kind, given.dtype.itemsize, WIDTH, table, (9, 0), **shape_of) or tiled(
        given.dtype.itemsize, WIDTH, (9, 0)
    )
    results: list[tuple[float, Launch, int | None]] = []

    def measure(launch: Launch, splits: int | None) -> None:
        overrides = {"launch": launch, "splits": splits}
        seconds = try_time([functools.partial(getattr(case, kind), **overrides) for case in sets])
        if seconds is not None:
            results.append((seconds, launch, splits))

    for launch in candidates(kind, cores, given):
        measure(launch, None)
    for _, launch, _ in sorted(results, key=lambda result: result[0])[:2]:
        roles = 1 if launch.fused else 2
        tiles = -(-patches // launch.block)
        units = torch.cuda.get_device_properties(0).multi_processor_count
        chosen = choose_splits(batch * HEADS * roles, tiles, units, launch)
        others = {max(1, chosen // 2), chosen * 2, chosen + max(1, chosen // 2)} - {chosen}
        for other in sorted(others):
            measure(launch, other)
    results.sort(key=lambda result: result[0])
    print(f"  {batch}x{patches} C={cores} {mode} ({len(sets)} input sets)")
    for place, (seconds, launch, splits) in enumerate(results):
        share = size / seconds / bandwidth
        rows.append(
            [kind, batch, patches, cores, mode, describe(launch), splits or "auto",
             f"{seconds * 1e3:.4f}", f"{share:.3f}"]
        )  # fmt: skip
        in_use = launch == used
        if place < 3 or in_use:
            note = "" if splits is None else f" splits={splits}"
            mine = in_use and splits is None
            print(
                f"    {seconds * 1e3:8.4f} ms  {share:5.2f} of copy  {describe(launch)}{note}"
                f"{'  <- in use' if mine else ''}"
            )
    shipped = time_over([getattr(case, kind) for case in sets])
    seconds, launch, splits = results[0]
    rows.append(
        [kind, batch, patches, cores, mode, "as shipped", "auto", f"{shipped * 1e3:.4f}",
         f"{size / shipped / bandwidth:.3f}"]
    )  # fmt: skip
    return (
        f"{kind:8} {batch:2}x{patches:<5} C={cores:<2} {mode:20} shipped {shipped * 1e3:.4f} ms "
        f"{size / shipped / bandwidth:.2f}, best {seconds * 1e3:.4f} ms "
        f"{size / seconds / bandwidth:.2f} {describe(launch)} splits={splits or 'auto'}"
    )


def candidates(kind: str, cores: int, mode: Mode) -> list[Launch]:
    if mode.dtype == torch.float32:
        return TILED_GRID
    # Few cores take few registers: there only the launches that could differ.
    return GRID[kind] if cores > 16 else GRID[kind][:3] + GRID[kind][-3:-1]


# -- compiling beforehand -------------------------------------------------------------------------


def work(parts: list[str], all_cores: list[int]) -> Iterator[tuple[str, Launch, int, str]]:
    for kind in sorted(set(parts) & set(GRID)):
        for cores in all_cores:
            for mode in MODES:
                for launch in candidates(kind, cores, MODES[mode]):
                    yield kind, launch, cores, mode


def compile_share(parts: list[str], all_cores: list[int], share: str) -> None:
    """Compile every n-th launch by running it once on a small problem, merged and not."""
    mine, count = (int(x) for x in share.split("/"))
    jobs: list[Callable[[], Any]] = []
    if "check" in parts:
        jobs += [functools.partial(compile_check, make) for *_, make in checks()]
    for kind, launch, cores, mode in work(parts, all_cores):
        for splits in (1, 2):
            jobs.append(functools.partial(compile_one, kind, launch, cores, mode, splits))
    for job in jobs[mine::count]:
        try:
            job()
        except Exception:  # reported when it is checked or timed
            continue


def compile_check(make: Callable[[], Case]) -> None:
    make().prepare().backward()


def compile_one(kind: str, launch: Launch, cores: int, mode: str, splits: int) -> None:
    for patches in (256, 250):
        getattr(case(2, patches, cores, MODES[mode]), kind)(launch=launch, splits=splits)


def compile_all(parts: list[str], all_cores: list[int], workers: int) -> None:
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks", "tune_attention", "--parts", ",".join(parts)]
    command += ["--cores", ",".join(map(str, all_cores)), "--compile"]
    running = [subprocess.Popen([*command, f"{i}/{workers}"], cwd=ROOT) for i in range(workers)]
    for process in running:
        process.wait()
    print(f"compiled by {workers} workers in {time.perf_counter() - start:.0f} s")


# -- the whole ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default="check,forward,backward,rivals")
    parser.add_argument("--cores", default="64,8")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, help="folder for tune_attention.csv")
    parser.add_argument("--compile", metavar="I/N", help="only compile this share (workers)")


def run(options: argparse.Namespace) -> None:
    parts = options.parts.split(",")
    kinds = [kind for kind in GRID if kind in parts]
    all_cores = [int(cores) for cores in options.cores.split(",")]
    torch.manual_seed(0)
    if options.compile:
        compile_share(parts, all_cores, options.compile)
        return

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    start = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.workers > 1:
        compile_all(parts, all_cores, options.workers)
    if "check" in parts:
        results = [check(make(), name, limit) for name, limit, make in checks()]
        print("all right" if all(results) else "SOMETHING IS WRONG")
        print(f"checked after {time.perf_counter() - start:.0f} s")
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    rows: list[Any] = []
    summary: list[str] = []
    for kind in kinds:
        for cores in all_cores:
            for mode in MODES:
                print(f"{kind}, {cores} cores, {mode}")
                for shape in SHAPES:
                    summary.append(tune(kind, shape, cores, mode, bandwidth, rows))
    if "rivals" in parts:
        for batch, patches in SHAPES:
            cores = all_cores[0]
            sets = cases(batch, patches, cores, MODES["plain"])[:3]
            print(f"rivals, {batch}x{patches} C={cores}")
            for name, calls in rival_calls(sets).items():
                seconds = try_time(calls)
                if seconds is not None:
                    print(f"    {seconds * 1e3:8.4f} ms  {name}")
                    rows.append(
                        [name, batch, patches, cores, "", "", "", f"{seconds * 1e3:.4f}", ""]
                    )
    if options.out:
        cells = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        write_csv("tune_attention", cells, options.out)
    print(*summary, sep="\n")
    print(f"done after {time.perf_counter() - start:.0f} s")
