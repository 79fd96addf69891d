"""Time and memory of networks side by side, on this machine, against resolution and budget.

`bench` measures a VECA network at several budgets beside the same network with full attention;
`race` does the same for any contenders: a name and a callable on a batch of images. The
contenders take turns (A B A B ...), so that a slow moment of the machine hits all of them.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from veca._util.cuda import side_stream
from veca._util.memory import is_out_of_memory, peak_tensor_memory
from veca.bench import runtimes
from veca.checks import check_budget, check_keep
from veca.config import PRESETS, VecaConfig, preset
from veca.dense import DenseVit
from veca.engine import compile_for_inference
from veca.errors import InputError, check_choice, suggest
from veca.model import Veca
from veca.precision import check_precision, in_precision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What can be timed."""
DENSE = "dense"
"""Name of the yardstick: the same network with full attention."""
_Network = TypeVar("_Network", Veca, DenseVit)


@dataclass(frozen=True)
class Contender:
    """Something to measure: `run` takes images [batch, channels, size, size].

    What it returns (tensors, or tuples and mappings of them) must be finite.
    """

    name: str
    run: Callable[[Tensor], object]
    cores: int | None = None
    own_graph: bool = False
    """It replays CUDA graphs of its own, so `BenchPlan.graph` leaves it as it is."""
    keep: float = 1.0
    """The share of patch tokens that go on."""
    precision: str = ""
    """What it computes in; it is set beside the yardstick of the same precision and engine."""
    engine: str = "torch"
    """What runs it."""
    dtype: str | None = None
    """Of the images that it takes; by default the plan's."""

    @property
    def label(self) -> str:
        return _label(self.name, self.cores, self.keep, self.precision, self.engine)


@dataclass(frozen=True)
class BenchPlan:
    """What to measure, and for how long."""

    sizes: tuple[int, ...] = (256, 512, 1024, 2048)
    """Sides of the square images, in pixels."""
    batch: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    """Of the images, and of networks where `precisions` does not say what they compute in."""
    precisions: tuple[str, ...] = ()
    """What networks compute in ("fp32", "bf16", "fp16", "int8"), side by side, each beside the
    dense network in the same precision."""
    engines: tuple[str, ...] = ("torch",)
    """What runs networks ("torch", "onnxruntime", "openvino"), side by side, each beside the dense
    network in the same engine and precision. OpenVINO joins onnxruntime where it is installed."""
    threads: int | None = None
    """CPU threads while measuring; None leaves torch's setting."""
    repeats: int = 5
    """Rounds at each size, at least; in a round each contender runs once."""
    seconds: float = 1.0
    """Time spent on the rounds of each size, at least."""
    limit: float = 120.0
    """No new round begins after this many seconds at one size, whatever `repeats` says."""
    graph: bool = False
    """CUDA only: time the replay of a captured graph, without the cost of launching kernels."""

    def __post_init__(self) -> None:
        for name in ("batch", "repeats"):
            _require_whole(name, getattr(self, name))
        if self.threads is not None:
            _require_whole("threads", self.threads)
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if not self.sizes:
            raise InputError("sizes is empty; give at least one image side in pixels, such as 512.")
        for size in self.sizes:
            _require_whole("sizes", size)
        check_choice("dtype", self.dtype, DTYPES)
        precisions = tuple(dict.fromkeys(check_precision(name) for name in self.precisions))
        object.__setattr__(self, "precisions", precisions)
        for engine in self.engines:
            check_choice("engine", engine, runtimes.ENGINES)
        if not self.engines:
            raise InputError(f"engines is empty; give some of {', '.join(runtimes.ENGINES)}.")
        engines = runtimes.engines_for(tuple(dict.fromkeys(self.engines)), self.device)
        object.__setattr__(self, "engines", engines)
        if self.graph and torch.device(self.device).type != "cuda":
            raise InputError(f"graph replay needs a CUDA device, got {self.device!r}.")


@dataclass(frozen=True)
class BenchRow:
    """One contender at one size. NaN where there is nothing to report; `error` then says why."""

    network: str
    model: str
    """"veca", "dense" or another contender's name."""
    cores: int | None
    size: int
    """Side of the square images, in pixels."""
    batch: int
    device: str
    dtype: str
    threads: int
    mode: str
    """"eager", or "graph" for the replay of a CUDA graph."""
    repeats: int
    ms: float
    """Median time of a batch."""
    spread_ms: float
    """Interquartile range of the times; NaN with fewer than two."""
    fastest_ms: float
    images_per_s: float
    peak_mib: float
    """Peak of live tensor memory in one run, weights and input apart."""
    speedup: float
    """How many times faster than the yardstick: its median time over this one's."""
    error: str = ""
    keep: float = 1.0
    """The share of patch tokens that go on."""
    precision: str = ""
    """What it computes in; "" where only a dtype was asked for."""
    engine: str = "torch"
    """What runs it."""

    @property
    def label(self) -> str:
        return _label(self.model, self.cores, self.keep, self.precision, self.engine)


def bench(
    model: str | VecaConfig | Veca,
    plan: BenchPlan | None = None,
    *,
    cores: Sequence[int] | None = None,
    keep: Sequence[float] = (1.0,),
    dense: bool = True,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
    on_rows: Callable[[list[BenchRow]], None] | None = None,
) -> list[BenchRow]:
    """Measure a network at each size and budget, beside the same network with full attention.

    Args:
        model: a preset's name or a configuration (fresh weights), saved weights (a folder, a
            file or a hub id), or a model, which is not changed.
        cores: budgets; by default 8 and the whole bank.
        keep: shares of patch tokens that go on, for each of the budgets.
        dense: also measure `DenseVit`, and report speed-ups against it.
        name: what the rows call the network.
        progress: called with a line of text as the work goes on.
        on_rows: called with the rows of each size as soon as they are there.
    """
    plan = plan or BenchPlan()
    network, veca = find_model(model)
    budgets, shares = check(veca.config, plan, cores), check_shares(keep)
    return race(
        contenders_for(veca, budgets, plan, dense=dense, keep=shares),
        plan,
        network=name or network,
        yardstick=DENSE if dense else None,
        channels=veca.config.in_channels,
        progress=progress,
        on_rows=on_rows,
    )


def find_model(model: str | VecaConfig | Veca) -> tuple[str, Veca]:
    """A name for a model, and the model: fresh from a preset or a configuration, or loaded."""
    if isinstance(model, Veca):
        return "veca", model
    with _own_seed():
        if isinstance(model, VecaConfig):
            return "veca", Veca(model)
        if "/" in model or os.sep in model or Path(model).exists():
            from veca import weights

            return Path(model).name, weights.load(model)
        config = preset(model)
        return next(name for name in PRESETS if PRESETS[name] == config), Veca(config)


def check(config: VecaConfig, plan: BenchPlan, cores: Sequence[int] | None = None) -> list[int]:
    """Refuse sizes and budgets that a network cannot take; return the budgets to measure."""
    off_grid = [size for size in plan.sizes if size % config.patch_size]
    if off_grid:
        raise InputError(
            f"sizes must be multiples of the patch size {config.patch_size}, got {off_grid}."
        )
    whole = config.num_cores
    return [check_budget(c, whole) for c in cores or sorted({min(8, whole), whole})]


def check_shares(keep: Sequence[float | str]) -> list[float]:
    """Refuse shares of tokens that cannot be timed; each once."""
    if not keep:
        raise InputError("keep is empty; give at least one share of patch tokens, such as 0.5.")
    return list(dict.fromkeys(check_keep(share) for share in keep))


def contenders_for(
    model: Veca,
    cores: Sequence[int],
    plan: BenchPlan,
    *,
    dense: bool = True,
    keep: Sequence[float] = (1.0,),
) -> list[Contender]:
    """The dense yardstick (if wanted) and one contender a budget and share, on the plan's device.

    All of this once for each of the plan's precisions. On CUDA the inference engine joins, once for
    each; it compiles at each new size, which takes seconds, before anything is timed.
    """
    points = [(budget, share) for budget in cores for share in keep]
    contenders: list[Contender] = []
    for precision in plan.precisions or ("",):
        if "torch" in plan.engines:
            contenders += _contenders_in(precision, model, points, plan, dense)
    for engine in (one for one in plan.engines if one != "torch"):
        known = runtimes.PRECISIONS[engine]
        asked = plan.precisions or ("fp32",)
        if not set(asked) & set(known):
            raise InputError(f"{engine} is measured in {', '.join(known)}, not {', '.join(asked)}.")
        for precision in (one for one in asked if one in known):
            contenders += _contenders_by(engine, precision, model, points, dense)
    return contenders


def _contenders_by(
    engine: str, precision: str, model: Veca, points: list[tuple[int, float]], dense: bool
) -> Iterator[Contender]:
    """Those of `contenders_for` in another runtime, each from a file that it writes first."""
    as_all: dict[str, Any] = {"precision": precision, "dtype": "float32", "engine": engine}
    ours = copy.deepcopy(model).float().eval()
    if dense:
        with _own_seed():
            yardstick = DenseVit(model.config).eval()
        run = runtimes.runner(engine, yardstick, precision, 1.0)
        yield Contender(DENSE, partial(run, cores=None), **as_all)
    for share in dict.fromkeys(share for _, share in points):
        run = runtimes.runner(engine, ours, precision, share)
        for c in (budget for budget, keep in points if keep == share):
            yield Contender("veca", partial(run, cores=c), c, keep=share, **as_all)


def _contenders_in(
    precision: str, model: Veca, points: list[tuple[int, float]], plan: BenchPlan, dense: bool
) -> Iterator[Contender]:
    """Those of `contenders_for` in one precision; "" is the plan's dtype."""
    device = torch.device(plan.device)
    ours = _in(precision, copy.deepcopy(model).to(device), plan)
    as_all: dict[str, Any] = {
        "precision": precision,
        "dtype": str(ours.dtype).removeprefix("torch."),
    }
    if dense:
        with _own_seed():
            yardstick = DenseVit(model.config).to(device)
        yield Contender(DENSE, _in(precision, yardstick, plan), **as_all)

    def at(run: Callable[..., object], budget: int, share: float) -> Callable[[Tensor], object]:
        return lambda images: run(images, cores=budget, keep=share)

    for c, k in points:
        yield Contender("veca", at(ours, c, k), c, keep=k, **as_all)
    if device.type == "cuda":
        engine = compile_for_inference(ours, dtype=ours.dtype, cache=len(points))
        for c, k in points:
            yield Contender("veca engine", at(engine, c, k), c, own_graph=True, keep=k, **as_all)


def _in(precision: str, network: _Network, plan: BenchPlan) -> _Network:
    plain = network.to(DTYPES[plan.dtype]) if not precision else network.float()
    return (in_precision(plain, precision) if precision else plain).eval()


def race(
    contenders: Sequence[Contender],
    plan: BenchPlan,
    *,
    network: str = "",
    yardstick: str | None = None,
    channels: int = 3,
    progress: Callable[[str], None] | None = None,
    on_rows: Callable[[list[BenchRow]], None] | None = None,
) -> list[BenchRow]:
    """Measure contenders side by side; see `bench`. `yardstick` is a contender's label, or the
    name of one in each precision.

    Each is run once before its time is taken, to warm up, to count its memory and to see that
    what it returns is finite. One that runs out of memory, or returns NaN, gets a row that says
    so, and the others go on. The number of CPU threads is put back afterwards.
    """
    labels = [contender.label for contender in contenders]
    if not labels or len(set(labels)) < len(labels):
        raise InputError(f"contenders need different names or budgets, got {labels}.")
    yardsticks = {_beside(c): c.label for c in contenders if yardstick in (c.name, c.label)}
    if yardstick is not None and not yardsticks:
        raise InputError(f"unknown yardstick {suggest(yardstick, labels)}")
    rows = []
    with _threads(plan.threads), torch.inference_mode():
        for size in plan.sizes:
            trials = _race_at(contenders, size, channels, plan, progress or (lambda _: None))
            base = {name: trials[label].median for name, label in yardsticks.items()}
            batch = [
                _row(
                    c,
                    trials[c.label],
                    size,
                    plan,
                    network,
                    base.get((c.precision, c.engine), math.nan),
                )
                for c in contenders
            ]
            rows += batch
            if on_rows:
                on_rows(batch)
    return rows


def _beside(contender: Contender) -> tuple[str, str]:
    """What contenders share that are set beside one yardstick."""
    return contender.precision, contender.engine


@dataclass
class _Trial:
    """What is known of one contender at one size."""

    call: Callable[[], object] | None = None
    peak: float = math.nan
    times: tuple[float, ...] = ()
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.times) if self.times else math.nan


def _race_at(
    contenders: Sequence[Contender],
    size: int,
    channels: int,
    plan: BenchPlan,
    progress: Callable[[str], None],
) -> dict[str, _Trial]:
    start = time.perf_counter()
    trials = {contender.label: _Trial() for contender in contenders}
    images: dict[str, Tensor] = {}
    for contender in contenders:
        progress(f"{size} px: {contender.label}, first run")
        try:
            dtype = contender.dtype or plan.dtype
            if dtype not in images:
                images[dtype] = _images(size, channels, plan, DTYPES[dtype])
            trials[contender.label] = _prepare(contender, images[dtype], plan)
        except Exception as error:
            trials[contender.label] = _Trial(error=_memory_error(error, plan))
    calls = {label: trial.call for label, trial in trials.items() if trial.call is not None}
    # Preparing was the warm-up; a round more settles caches, unless runs are long anyway.
    warm_up = time.perf_counter() - start < plan.limit / 4
    times = take_turns(
        calls,
        plan,
        warm_up=warm_up,
        progress=lambda done: progress(f"{size} px: round {done + 1}"),
    )
    for label, taken in times.items():
        trials[label].times = tuple(taken)
    return trials


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    plan: BenchPlan,
    *,
    warm_up: bool = True,
    progress: Callable[[int], None] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each call, taken in turns: one of each in every round."""
    timer = _timer(torch.device(plan.device))
    times: dict[str, list[float]] = {label: [] for label in calls}
    for call in calls.values() if warm_up else ():
        timer(call)
    start, done = time.perf_counter(), 0
    while calls:
        elapsed = time.perf_counter() - start
        enough = done >= plan.repeats and elapsed >= plan.seconds
        if done and (enough or elapsed >= plan.limit):
            break
        if progress:
            progress(done)
        for label, call in calls.items():
            times[label].append(timer(call))
        done += 1
    return times


def _images(size: int, channels: int, plan: BenchPlan, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(plan.batch, channels, size, size, generator=generator)
    return images.to(plan.device, dtype)


def _prepare(contender: Contender, images: Tensor, plan: BenchPlan) -> _Trial:
    if images.is_cuda:
        # Compiles kernels and takes the libraries' workspaces, which are not this run's memory.
        contender.run(images)
    output, peak = peak_tensor_memory(lambda: contender.run(images), images.device)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(output)):
        return _Trial(error="output is not finite")
    if not all(tensor.numel() for tensor in _tensors(output)):
        return _Trial(error="output is empty")
    del output
    if plan.graph and not contender.own_graph:
        return _Trial(_captured(contender.run, images), peak)
    return _Trial(lambda: contender.run(images), peak)


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))


def _captured(run: Callable[[Tensor], object], images: Tensor) -> Callable[[], object]:
    """The run as a CUDA graph; the replay writes into the same output each time."""
    with side_stream():
        run(images)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(images)

    def replay() -> object:
        graph.replay()
        return output

    return replay


def _timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """A function that runs a call and returns the milliseconds it took on `device`."""

    def by_clock(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) * 1e3

    def by_events(call: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return by_events if device.type == "cuda" else by_clock


def _memory_error(error: Exception, plan: BenchPlan) -> str:
    """What a row says of an error that means "out of memory"; any other is raised again."""
    if not is_out_of_memory(error):
        raise error
    if torch.device(plan.device).type == "cuda":
        torch.cuda.empty_cache()
    return "out of memory"


def _row(
    contender: Contender, trial: _Trial, size: int, plan: BenchPlan, network: str, base: float
) -> BenchRow:
    ms, times = trial.median, trial.times
    spread = math.nan
    if len(times) > 1:
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        spread = high - low
    return BenchRow(
        network=network,
        model=contender.name,
        cores=contender.cores,
        size=size,
        batch=plan.batch,
        device=str(plan.device),
        dtype=contender.dtype or plan.dtype,
        threads=torch.get_num_threads(),
        mode="graph" if plan.graph else "eager",
        repeats=len(times),
        ms=ms,
        spread_ms=spread,
        fastest_ms=min(times, default=math.nan),
        images_per_s=plan.batch / ms * 1e3,
        peak_mib=trial.peak / 2**20,
        speedup=base / ms,
        error=trial.error,
        keep=contender.keep,
        precision=contender.precision,
        engine=contender.engine,
    )


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """torch's number of CPU threads, which belongs to the process, changed for a while."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _own_seed() -> Iterator[None]:
    """Random numbers that are the same each time and leave the caller's generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _label(name: str, cores: int | None, keep: float, precision: str, engine: str) -> str:
    parts = [name] if cores is None else [name, f"{cores} core{'s' * (cores != 1)}"]
    parts += [] if keep == 1 else [f"keep {keep:g}"]
    parts += [] if precision in ("", "fp32") else [precision]
    return ", ".join(parts if engine == "torch" else [*parts, engine])


def _require_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be whole numbers of at least 1, got {value!r}.")
