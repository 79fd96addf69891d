"""Fast inference: the same function as `Veca.forward`, arranged for the hardware.

What changes: q, k and v come from one matrix product, rotary tables of the patches are built once
a grid, each block is one compiled function shared by all layers, residual additions wait for the
norm that reads them, and on CUDA the whole pass is one graph a (shape, budget), so that nothing
is launched from Python. What does not change: the outputs, up to rounding.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple
from typing import cast as cast_to

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from veca import content, onnx_files, rope
from veca._util.compiled import many_shapes
from veca._util.cuda import recording, side_stream
from veca.attention import core_attention
from veca.checks import (
    check_agreement,
    check_budget,
    check_finite,
    check_first,
    check_images,
    check_keep,
    check_model,
    is_auto,
)
from veca.errors import InputError, at_least, check_choice
from veca.feature_model import FeatureModel
from veca.merging import Periphery, batch_plan, merge, merge_plan, unlikeness
from veca.model import Block, CoreMove, Veca
from veca.outputs import CoresOutput, VecaOutput
from veca.precision import (
    DTYPES,
    Fastest,
    at_precision,
    check_precision,
    described,
    fastest,
    measured_at,
    median_times,
)
from veca.rope import Rotation
from veca.weights.tensors import blank

ENGINES = ("auto", "torch", "onnxruntime")
"""What can run it."""

_Key = tuple[int, tuple[int, int], int, float, "int | None"]
"""Of a prepared shape: batch, grid, budget, keep (-1: by content), and how many cores come out
alone."""
_Merges = dict[int, tuple[int, int, "Tensor | None"]]
"""As `veca.merging.batch_plan` has it."""


class BlockWeights(NamedTuple):
    """One layer's weights as the engine wants them: q, k and v stacked, and the move before it."""

    norm_attn: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    norm_ffn: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    move: tuple[Tensor, Tensor]
    """Head weight [2, D] and bias [2] in float32, both times alpha; zero in the first layer."""


class InferenceEngine(FeatureModel):
    """Runs a model's weights fast. Made by `compile_for_inference`; call it like the model.

    The first call at a new (batch, height, width, budget, keep) prepares it, which takes seconds on
    CUDA; the last `cache` of them stay prepared. Not thread-safe: CUDA graphs own their buffers.
    """

    device: torch.device
    dtype: torch.dtype

    def __init__(
        self,
        model: Veca,
        *,
        dtype: torch.dtype,
        compile: bool,
        graphs: bool,
        cache: int,
        check_pixels: bool,
    ) -> None:
        self.config, self.name = model.config, model.name
        self.take_origin(model)
        self.dtype, self.device = dtype, model.device
        self.check_pixels = check_pixels
        self._compile, self._graphs = compile, graphs
        self._cache = cache
        self._prepared: OrderedDict[_Key, PreparedShape] = OrderedDict()
        self._pack(model)
        self._embed: Callable[..., Tensor] = _embed
        self._block: Callable[..., tuple[Tensor, Tensor, Tensor]] = _block
        self._merge: Callable[..., tuple[Tensor, Periphery]] = _merge
        self._finish: Callable[..., Tensor] = _finish
        if compile:
            # Blocks, not the model: one compilation serves all layers.
            self._embed = torch.compile(_embed, dynamic=False, fullgraph=True)
            self._block = torch.compile(_block, dynamic=False, fullgraph=True)
            self._merge = torch.compile(_merge, dynamic=False, fullgraph=True)
            self._finish = torch.compile(_finish, dynamic=False, fullgraph=True)

    def describe(self) -> str:
        """What it computes in, with what, and why."""
        name = str(self.dtype).removeprefix("torch.")
        how = ["blocks compiled"] * self._compile + ["CUDA graphs"] * self._graphs
        return f"{name} on {self.device} by torch: {', '.join(how) or 'not compiled'}"

    @torch.inference_mode()
    def __call__(
        self,
        images: Tensor,
        cores: int | str | None = None,
        keep: float | str | None = None,
        agreement: float | None = None,
    ) -> VecaOutput:
        """Features of `images` [B, 3, H, W] (float, normalised), as `Veca.forward`.

        With keep="auto" nothing is replayed from a CUDA graph: what runs depends on the images.
        """
        found, budget, grid = self._run(images, cores, keep, agreement)
        return VecaOutput(found[0][:, :budget], found[0][:, budget:], found[1].tanh(), grid)

    @torch.inference_mode()
    def cores_only(
        self,
        images: Tensor,
        cores: int | str | None = None,
        keep: float | str | None = None,
        *,
        first: int | None = None,
        agreement: float | None = None,
    ) -> CoresOutput:
        """The cores without the patches, for less, as `Veca.cores_only`."""
        found, budget, grid = self._run(images, cores, keep, agreement, first=first, alone=True)
        rows = check_first(first, budget)
        return CoresOutput(found[0], found[1][:, :rows].tanh(), grid)

    def _run(
        self,
        images: Tensor,
        cores: int | str | None,
        keep: float | str | None,
        agreement: float | None,
        first: int | None = None,
        alone: bool = False,
    ) -> tuple[tuple[Tensor, Tensor], int, tuple[int, int]]:
        """Tokens and raw coordinates, the budget, and the grid."""
        c = self.config
        grid = check_images(images, c.in_channels, c.patch_size)
        if self.check_pixels:
            check_finite(images)
        promise = check_agreement(agreement, cores, keep)
        each = promise
        if promise is not None:
            each = self.calibration.of_each(promise, is_auto(cores) + is_auto(keep))
        if each is not None and is_auto(cores):
            budget = self.calibration.budget(grid, each, c.num_cores)
        else:
            budget = check_budget(cores, c.num_cores)
        rows = check_first(first, budget) if alone else None
        if each is not None and is_auto(keep):
            prepared = self._shape(len(images), grid, budget, 1.0, rows, graph=False)
            return self._by_content(prepared, images, each), budget, grid
        share = check_keep(keep)
        return self._shape(len(images), grid, budget, share, rows).run(images), budget, grid

    @property
    def calibration(self) -> content.Calibration:
        """As `Veca.calibration`."""
        return content.calibration_of(self.beside, self.name, self.config.merge_blocks)

    def _by_content(
        self, prepared: PreparedShape, images: Tensor, promise: float
    ) -> tuple[Tensor, Tensor]:
        """The pass in which each image chooses its share where windows merge first."""
        c, grid = self.config, prepared.grid
        begin = c.merge_blocks[0] - 1
        with self.many_shapes():
            state = self._begin(images.to(self.device, self.dtype), prepared)
            state = self._on(state, 0, begin, {}, prepared.rows)
            patches = (state.x + state.delta)[:, prepared.budget :]
            shares = self.calibration.shares(unlikeness(patches, grid), grid, promise)
            if self._compile:
                # All images with as many tokens as the one with the most: else there would be
                # something to compile for every number of images that happen to agree.
                order = [torch.arange(len(images))]
            else:
                chosen = torch.tensor(shares)
                order = [(chosen == share).nonzero().flatten() for share in chosen.unique()]
            parts = []
            for some in order:
                few = [shares[i] for i in some.tolist()]
                plan = batch_plan(c.merge_blocks, few, grid, self.device)
                part = state if len(order) == 1 else state.of(some.to(self.device))
                part = self._on(part, begin, c.depth, plan, prepared.rows)
                parts.append(self._end(part, bool(plan), prepared.rows))
        tokens, raw = zip(*parts, strict=True)
        return content.joined(tokens, order), content.joined(raw, order)

    @torch.inference_mode()
    def prepare(
        self,
        batch: int,
        size: int | tuple[int, int],
        cores: int | None = None,
        keep: float | None = None,
    ) -> PreparedShape:
        """Compile and capture for one batch size, image size in pixels, budget and keep."""
        c = self.config
        budget = check_budget(cores, c.num_cores)
        height, width = (size, size) if isinstance(size, int) else size
        blank = torch.empty(batch, c.in_channels, height, width, device="meta")
        grid = check_images(blank, c.in_channels, c.patch_size)
        return self._shape(batch, grid, budget, check_keep(keep))

    def _shape(
        self,
        batch: int,
        grid: tuple[int, int],
        budget: int,
        keep: float,
        rows: int | None = None,
        graph: bool = True,
    ) -> PreparedShape:
        key = (batch, grid, budget, keep if graph else -1.0, rows)
        prepared = self._prepared.pop(key, None)
        if prepared is None:
            while len(self._prepared) >= self._cache:
                self._prepared.popitem(last=False)
            prepared = PreparedShape(self, batch, grid, budget, keep, rows, graph)
        self._prepared[key] = prepared
        return prepared

    def many_shapes(self) -> AbstractContextManager[object]:
        """What is called in it may compile for any number of shapes."""
        return many_shapes() if self._compile else nullcontext()

    def _pack(self, model: Veca) -> None:
        _check_plain(model)

        def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(t.detach().to(self.dtype, copy=True).contiguous() for t in tensors)

        embed = model.patch_embed
        assert embed.bias is not None
        # A convolution whose stride is its kernel is a matrix product over patches.
        self.embed_weight, self.embed_bias = cast(embed.weight.flatten(1), embed.bias)
        (self.tokens,) = cast(model.bank.tokens)
        self.coordinates = model.bank.coordinates.detach().float().clone()
        self.norm = cast(model.norm.weight, model.norm.bias)
        project = model.project
        self.project: tuple[Tensor, ...] | None = None
        if isinstance(project, torch.nn.Linear):
            self.project = cast(project.weight, project.bias)
        moves = [None, *(cast_to(CoreMove, move) for move in model.moves)]
        self.blocks = [
            _pack_block(cast_to(Block, block), move, cast)
            for block, move in zip(model.blocks, moves, strict=True)
        ]

    def forward(self, images: Tensor, prepared: PreparedShape) -> tuple[Tensor, Tensor]:
        """The whole pass, eagerly: cores and patches [B, C + N, D'], raw coordinates [B, C, 2].

        With `prepared.rows`, so many of the cores alone, [B, rows, D'].
        """
        state = self._begin(images, prepared)
        state = self._on(state, 0, len(self.blocks), prepared.merges, prepared.rows)
        return self._end(state, bool(prepared.merges), prepared.rows)

    def _begin(self, images: Tensor, prepared: PreparedShape) -> _State:
        budget = prepared.budget
        x = self._embed(
            images, self.embed_weight, self.embed_bias, self.tokens[:budget], self.patch_size
        )
        raw = self.coordinates[:budget].expand(x.shape[0], -1, -1).contiguous()
        return _State(
            x, torch.zeros_like(x), raw, prepared.periphery, prepared.rotation, prepared.grid
        )

    def _on(self, state: _State, done: int, end: int, merges: _Merges, rows: int | None) -> _State:
        """Through the blocks from `done` to `end`."""
        c = self.config
        periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction, self.device)
        x, delta, raw, periphery, patch_rotation, grid = state
        budget = raw.shape[1]
        for number, weights in enumerate(self.blocks[done:end], start=done + 1):
            if number in merges:
                x, periphery = self._merge(x, delta, budget, periphery, grid, *merges[number])
                patch_rotation = _tables(periphery.xy, periods, self.dtype)
                delta = torch.zeros_like(x)
            x, delta, raw = self._block(
                x,
                delta,
                raw,
                patch_rotation,
                periods,
                weights,
                budget,
                c.heads,
                c.norm_eps,
                periphery.multiplicity,
                rows if number == len(self.blocks) else None,
            )
        return _State(x, delta, raw, periphery, patch_rotation, grid)

    def _end(self, state: _State, merged: bool, rows: int | None) -> tuple[Tensor, Tensor]:
        x, delta, raw, periphery, _, grid = state
        budget, eps = raw.shape[1], self.config.norm_eps
        if not merged or rows is not None:
            return self._finish(x, delta, self.norm, self.project, eps), raw
        x = self._finish(x, delta, self.norm, self.project, eps)
        return torch.cat([x[:, :budget], periphery.spread(x[:, budget:], grid)], dim=1), raw


class _State(NamedTuple):
    """Where a pass of the engine stands between two blocks."""

    x: Tensor
    delta: Tensor
    """What the block before has yet to add to `x`."""
    raw: Tensor
    periphery: Periphery
    patch_rotation: Rotation
    grid: tuple[int, int]

    def of(self, images: Tensor) -> _State:
        """The same of some images, before any windows have merged."""
        x, delta, raw = (part[images] for part in (self.x, self.delta, self.raw))
        return self._replace(x=x, delta=delta, raw=raw)


class CpuEngine(InferenceEngine):
    """Runs a model's weights on a CPU in one precision. Threads may share it."""

    def __init__(self, chosen: Fastest, *, check_pixels: bool = False) -> None:
        model = chosen.model
        self.config, self.name, self.precision = model.config, model.name, model.precision
        self.take_origin(model)
        self.dtype, self.device = torch.float32, model.device
        self.check_pixels = check_pixels  # which the model looks at in any case
        self.model, self.reason = model, chosen.reason

    def describe(self) -> str:
        return f"{self.precision} on a CPU by torch: {described(self.model)}; {self.reason}"

    @torch.inference_mode()
    def __call__(
        self,
        images: Tensor,
        cores: int | str | None = None,
        keep: float | str | None = None,
        agreement: float | None = None,
    ) -> VecaOutput:
        return self.model(images, cores, keep, agreement)

    @torch.inference_mode()
    def cores_only(
        self,
        images: Tensor,
        cores: int | str | None = None,
        keep: float | str | None = None,
        *,
        first: int | None = None,
        agreement: float | None = None,
    ) -> CoresOutput:
        return self.model.cores_only(images, cores, keep, first=first, agreement=agreement)

    @torch.inference_mode()
    def prepare(  # type: ignore[override]
        self,
        batch: int,
        size: int | tuple[int, int],
        cores: int | None = None,
        keep: float | None = None,
    ) -> None:
        """Run once at a shape, so that what is to be compiled is."""
        height, width = (size, size) if isinstance(size, int) else size
        self(torch.zeros(batch, self.config.in_channels, height, width), cores, keep)


class OnnxEngine(CpuEngine):
    """Runs a model's weights by onnxruntime on a CPU.

    One file serves every budget, size and batch; a share of tokens has a file of its own. They lie
    in the cache, and the first on a machine takes a minute or two to make and to check.
    """

    def __init__(self, model: Veca, precision: str) -> None:
        onnx_files.require_onnxruntime(precision)
        super().__init__(Fastest(model, "asked for"))
        self.precision = precision
        self._runs: dict[tuple[float, int], Callable[..., VecaOutput]] = {}

    def describe(self) -> str:
        return f"{self.precision} on a CPU by onnxruntime {onnx_files.version()}; {self.reason}"

    @torch.inference_mode()
    def __call__(
        self,
        images: Tensor,
        cores: int | str | None = None,
        keep: float | str | None = None,
        agreement: float | None = None,
    ) -> VecaOutput:
        """As `Veca.forward`, but for keep="auto", which is for torch alone."""
        c = self.config
        grid = check_images(images, c.in_channels, c.patch_size)
        promise = check_agreement(agreement, cores, keep)
        if is_auto(keep):
            raise InputError(
                "keep='auto' chooses image by image, which a file for onnxruntime cannot; give a "
                "number, or take engine='torch'."
            )
        if promise is not None and is_auto(cores):
            cores = self.calibration.budget(grid, promise, c.num_cores)
        budget, share = check_budget(cores, c.num_cores), check_keep(keep)
        key = share, torch.get_num_threads()  # a session keeps its threads
        if key not in self._runs:
            self._runs[key] = onnx_files.opened(self.model, self.precision, share)
        return self._runs[key](images, budget)

    @torch.inference_mode()
    def cores_only(
        self,
        images: Tensor,
        cores: int | str | None = None,
        keep: float | str | None = None,
        *,
        first: int | None = None,
        agreement: float | None = None,
    ) -> CoresOutput:
        """As `Veca.cores_only`; the file computes the patches all the same."""
        out = self(images, cores, keep, agreement)
        rows = check_first(first, out.cores.shape[1])
        return CoresOutput(out.cores[:, :rows], out.core_xy[:, :rows], out.grid)


class PreparedShape:
    """Everything prepared for one (batch, grid, budget, keep, cores that come out alone)."""

    def __init__(
        self,
        engine: InferenceEngine,
        batch: int,
        grid: tuple[int, int],
        budget: int,
        keep: float,
        rows: int | None = None,
        graph: bool = True,
    ) -> None:
        self.engine, self.budget, self.grid, self.rows = engine, budget, grid, rows
        c = engine.config
        periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction, engine.device)
        self.periphery = Periphery(rope.grid_coordinates(*grid, engine.device).unsqueeze(0))
        self.rotation = _tables(self.periphery.xy, periods, engine.dtype)
        plan = merge_plan(c.merge_blocks, keep, grid)
        self.merges: _Merges = {block: (*step, None) for block, step in plan.items()}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.images: Tensor
        """With a graph: the input it reads."""
        self.output: tuple[Tensor, Tensor]
        """With a graph: the tokens and raw coordinates it writes."""
        if graph and engine._graphs:
            size = (grid[0] * c.patch_size, grid[1] * c.patch_size)
            self._capture((batch, c.in_channels, *size))

    def run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if self.graph is None:
            return self.forward(images.to(self.engine.device, self.engine.dtype))
        self.images.copy_(images)
        self.replay()
        # The graph writes into the same memory next time; what we return is the caller's.
        return self.output[0].clone(), self.output[1].clone()

    def replay(self) -> None:
        """Run the graph on what lies in `images`, into `output`."""
        assert self.graph is not None
        self.graph.replay()

    def _capture(self, shape: tuple[int, ...]) -> None:
        engine = self.engine
        self.images = torch.zeros(shape, device=engine.device, dtype=engine.dtype)
        with side_stream(engine.device):
            for _ in range(2):
                self.forward(self.images)
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph):
            self.output = self.forward(self.images)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The pass without the graph: the tokens and raw coordinates."""
        with self.engine.many_shapes():
            return self.engine.forward(images, self)


def compile_for_inference(
    model: Veca,
    *,
    precision: str | None = None,
    engine: str = "auto",
    size: int | tuple[int, int] | None = None,
    cores: int | Sequence[int] | None = None,
    batch: int = 1,
    keep: float | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    graphs: bool | None = None,
    cache: int = 8,
    check_pixels: bool = False,
) -> InferenceEngine:
    """A fast runner of `model`'s weights, which it copies; call the result like the model.

    Args:
        precision: "fp32", "bf16", "fp16" (CUDA), "int8" (CPU), or "auto": on a CPU what a short
            measurement on this machine finds fastest among those that agree with float32. By
            default bfloat16 on CUDA and the model's own elsewhere. `describe()` says what it is.
        engine: "torch"; "onnxruntime" on a CPU, in fp32 or int8, from a file that the first call on
            a machine makes in a minute or two; "auto": torch, or onnxruntime where its file is
            made already and is faster in a short measurement in turns.
        size, cores, batch, keep: prepare these now (pixels, one or several budgets, images a
            batch, share of patch tokens); without `size`, each shape is prepared at its first
            use. A call has its own `cores` and `keep` all the same, by default all.
        dtype: what `precision` was in 0.1.
        compile, graphs: torch.compile the blocks, replay CUDA graphs; default yes on CUDA.
        cache: how many (batch, size, budget, keep) stay prepared.
        check_pixels: look for NaN pixels on every call; on CUDA that waits for the GPU.
    """
    check_model(model, "compile_for_inference")
    on_cuda = model.device.type == "cuda"
    if graphs and not on_cuda:
        raise InputError(
            f"graphs need a model on CUDA, this one is on {model.device}; model.cuda() first."
        )
    cache = at_least("cache", cache)
    check_choice("engine", engine, ENGINES)
    if engine == "onnxruntime":
        if model.device.type != "cpu":
            raise InputError(
                f"engine='onnxruntime' is for CPUs, and this model is on {model.device}; "
                "take engine='torch'."
            )
        if compile:
            raise InputError("engine='onnxruntime' compiles nothing; leave compile out.")
        precision = precision or ("fp32" if dtype is None else None)
    if precision is not None:
        if dtype is not None:
            raise InputError("dtype is what precision was in 0.1; give one of the two.")
        precision = check_precision(precision, "auto")
        if model.device.type == "cpu":
            found = _on_cpu(model, precision, engine, size, cores, compile, check_pixels)
            if size is not None:
                for budget in cores if isinstance(cores, Sequence) else [cores]:
                    found.prepare(batch, size, budget, keep)
            return found
        if precision == "int8":
            raise InputError(f"int8 is for CPUs, and this model is on {model.device}; choose bf16.")
        dtype = DTYPES.get(precision, torch.bfloat16)
    runner = InferenceEngine(
        model,
        dtype=dtype or (torch.bfloat16 if on_cuda else model.dtype),
        compile=on_cuda if compile is None else compile,
        graphs=on_cuda if graphs is None else graphs,
        cache=cache,
        check_pixels=check_pixels,
    )
    if size is not None:
        for budget in cores if isinstance(cores, Sequence) else [cores]:
            runner.prepare(batch, size, budget, keep)
    return runner


def _on_cpu(
    model: Veca,
    precision: str,
    engine: str,
    size: int | tuple[int, int] | None,
    cores: int | Sequence[int] | None,
    compile: bool | None,
    check_pixels: bool,
) -> CpuEngine:
    _check_plain(model)
    ours = copy.deepcopy(model).float().eval()
    budget = cores if isinstance(cores, int) else None
    auto = precision == "auto"
    chosen = Fastest(ours, "asked for")
    if engine == "onnxruntime" and not auto:
        return OnnxEngine(ours, precision)
    if engine != "onnxruntime":
        chosen = (
            fastest(ours, size, budget)
            if auto
            else Fastest(at_precision(ours, precision, compile=compile), "asked for")
        )
    found = CpuEngine(chosen, check_pixels=check_pixels)
    others: tuple[str, ...] = onnx_files.PRECISIONS if auto else (precision,)
    if engine == "auto":
        others = tuple(one for one in others if one in onnx_files.PRECISIONS)
        if not onnx_files.installed():
            return found
        ready = tuple(one for one in others if onnx_files.is_prepared(ours, one))
        if not ready:
            found.reason += "; onnxruntime not tried: engine='onnxruntime' makes its file first"
            return found
        others = ready
    return _faster(found, [OnnxEngine(ours, one) for one in others], size, budget)


def _faster(
    first: CpuEngine,
    others: Sequence[CpuEngine],
    size: int | tuple[int, int] | None,
    cores: int | None,
) -> CpuEngine:
    """The fastest by a short measurement in turns; the first unless another is faster."""
    c = first.config
    height, width = measured_at(c, size)
    images = torch.zeros(1, c.in_channels, height, width)
    runs: list[CpuEngine] = [first, *others]
    medians = median_times([partial(run, images, cores) for run in runs])
    pairs = zip(others, medians[1:], strict=True)
    ratios = ", ".join(f"{run.precision} {medians[0] / taken:.2f}x" for run, taken in pairs)
    best = runs[medians.index(min(medians))]
    best.reason = (
        f"onnxruntime beside torch's {first.precision} at {height} x {width} px: "
        f"{ratios}; torch: {first.reason}"
    )
    return best


def _check_plain(model: Veca) -> None:
    """Refuse a model in which something stands around or in place of a layer (adapters, say).

    Only weights are packed, so that what else it does would be left out without a word.
    """
    for name, expected in blank(model.config).named_modules():
        try:
            found = model.get_submodule(name)
        except AttributeError:
            raise InputError(
                f"compile_for_inference wants the whole model, and {name} is missing."
            ) from None
        fault = ""
        if name and type(found) is not type(expected) and not is_parametrized(found):
            fault = f"a {type(found).__name__} instead of a {type(expected).__name__}"
        elif name and (found._forward_hooks or found._forward_pre_hooks):
            fault = f"a {type(found).__name__} with hooks"
        if fault:
            raise InputError(
                f"compile_for_inference packs plain layers, and {name} is {fault}; merge adapters "
                "into the weights and remove hooks first, or call the model itself."
            )


def _pack_block(
    block: Block, move: CoreMove | None, cast: Callable[..., tuple[Tensor, ...]]
) -> BlockWeights:
    attn, ffn = block.attn, block.ffn
    width = attn.q.weight.shape[1]
    if move is None:
        step = (attn.q.weight.new_zeros(2, width).float(), attn.q.weight.new_zeros(2).float())
    else:
        alpha = move.alpha.detach().float()
        step = (move.head.weight.detach().float() * alpha, move.head.bias.detach().float() * alpha)
    parts = (attn.q, attn.k, attn.v)
    return BlockWeights(
        norm_attn=cast(block.norm_attn.weight, block.norm_attn.bias),  # type: ignore[arg-type]
        qkv=cast(torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])),  # type: ignore[arg-type]
        out=cast(attn.out.weight, attn.out.bias),  # type: ignore[arg-type]
        norm_ffn=cast(block.norm_ffn.weight, block.norm_ffn.bias),  # type: ignore[arg-type]
        up=cast(ffn.up.weight, ffn.up.bias),  # type: ignore[arg-type]
        down=cast(ffn.down.weight, ffn.down.bias),  # type: ignore[arg-type]
        move=step,
    )


def _embed(images: Tensor, weight: Tensor, bias: Tensor, cores: Tensor, patch: int) -> Tensor:
    batch, channels, height, width = images.shape
    rows, columns = height // patch, width // patch
    patches = images.view(batch, channels, rows, patch, columns, patch)
    patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)
    patches = F.linear(patches, weight, bias)
    return torch.cat([cores.expand(batch, -1, -1), patches], dim=1)


def _block(
    x: Tensor,
    delta: Tensor,
    raw: Tensor,
    patch_rotation: Rotation,
    periods: Tensor,
    w: BlockWeights,
    budget: int,
    heads: int,
    eps: float,
    multiplicity: Tensor | None,
    rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer; `delta` is what the layer before still has to add to `x`.

    With `rows` so many of the cores come out, and the other tokens are only seen.
    """
    x = x + delta
    cores = x[:, :budget].float()
    # Two outputs a core: a matrix product would cost a launch of its own.
    raw = raw + (cores.unsqueeze(2) * w.move[0]).sum(dim=-1) + w.move[1]
    angles = ((2.0 * math.pi) * raw.tanh().unsqueeze(-1) / periods).flatten(-2)
    core_rotation = Rotation(angles.cos().to(x.dtype), angles.sin().to(x.dtype))

    width = x.shape[-1]
    y = F.layer_norm(x, (width,), *w.norm_attn, eps)
    if rows is None:
        qkv = F.linear(y, *w.qkv).unflatten(-1, (3, heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    else:
        q = F.linear(y[:, :rows], w.qkv[0][:width], w.qkv[1][:width])
        q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
        kv = F.linear(y, w.qkv[0][width:], w.qkv[1][width:]).unflatten(-1, (2, heads, -1))
        k, v = (part.transpose(1, 2) for part in kv.unbind(2))
        x = x[:, :rows]
    mixed = core_attention(
        q,
        k,
        v,
        budget,
        core_rotation=core_rotation,
        patch_rotation=patch_rotation,
        multiplicity=multiplicity,
    )
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), *w.out)
    y = F.layer_norm(x, (width,), *w.norm_ffn, eps)
    gate, value = F.linear(y, *w.up).chunk(2, dim=-1)
    return x, F.linear(F.silu(gate) * value, *w.down), raw


def _merge(
    x: Tensor,
    delta: Tensor,
    budget: int,
    periphery: Periphery,
    grid: tuple[int, int],
    side: int,
    target: int,
    targets: Tensor | None = None,
) -> tuple[Tensor, Periphery]:
    return merge(x + delta, periphery, grid, side, target, targets, cores=budget)


def _tables(xy: Tensor, periods: Tensor, dtype: torch.dtype) -> Rotation:
    # In the engine's dtype: the kernels read half as much, and round q and k to it anyway.
    return Rotation(*(table.to(dtype) for table in rope.rotation(xy, periods)))


def _finish(
    x: Tensor,
    delta: Tensor,
    norm: tuple[Tensor, Tensor],
    project: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    x = F.layer_norm(x + delta, (x.shape[-1],), *norm, eps)
    return x if project is None else F.linear(x, *project)
