"""What is traced: images (and the budget, if it is left open) in, four tensors out."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from veca.errors import ExportError
from veca.merging import LEAST_OPEN_KEEP
from veca.model import Veca
from veca.outputs import VecaOutput

OUTPUTS = ("cls", "patches", "core_tokens", "core_xy")
"""Names of the outputs of every exported file, in this order."""

TRACED_BATCH = 2  # torch.export takes a batch of 1 to be a constant
TRACED_GRID = (3, 5)
"""Patches down and across in the example that is traced when the size is left open."""

MIN_SIDE = 2
"""Patches a side that a traced graph takes at least; a side of 1 would be a graph of its own."""


class Graph(nn.Module):
    """images, and what else is left open, -> the outputs."""

    def __init__(self, model: Veca, cores: int | None, keep: float | None) -> None:
        super().__init__()
        self.model = model
        self.cores = cores
        self.keep = keep

    def forward(self, images: Tensor, *given: Tensor) -> dict[str, Tensor]:
        """`given`: what is open of cores (int64) and keep (float32), in this order, no axes."""
        inputs = list(given)
        cores, keep = self.cores, self.keep
        if cores is None:
            cores = _number(inputs.pop(0), 1, self.model.config.num_cores)
        if keep is None:  # in ten-thousandths, as `merge_plan` takes it then
            parts = (inputs.pop(0) * _PARTS).round().to(torch.int64)
            keep = _number(parts, round(LEAST_OPEN_KEEP * _PARTS), _PARTS)
        return _named(self.model(images, cores=cores, keep=keep))


_PARTS = 10_000


def _number(tensor: Tensor, least: int, most: int) -> int:
    """A whole number that is known when the graph runs."""
    number = cast(int, tensor.item() if torch.compiler.is_compiling() else int(tensor.item()))
    torch._check(number >= least)
    torch._check(number <= most)
    return number


def _named(out: VecaOutput) -> dict[str, Tensor]:
    return dict(zip(OUTPUTS, (out.cls, out.patches, out.cores, out.core_xy), strict=True))


def frozen_copy(model: Veca, dtype: torch.dtype) -> Veca:
    """The same function on the CPU in `dtype`, for inference, from operations any runtime has."""
    model = copy.deepcopy(model).to("cpu", dtype).eval().requires_grad_(False)
    model.backend = "sdpa"
    model.gradient_checkpointing = False
    return model


def trace(
    model: Veca,
    cores: int | None,
    size: tuple[int, int] | None,
    keep: float | None = 1.0,
) -> torch.export.ExportedProgram:
    """The program of a frozen model. What is None is left open; so is the batch.

    Every file takes float32 images, whatever the model's dtype.
    """
    config = model.config
    patch = config.patch_size
    height, width = size or (TRACED_GRID[0] * patch, TRACED_GRID[1] * patch)
    images = torch.zeros(TRACED_BATCH, config.in_channels, height, width)
    open_axes: dict[int, object] = {0: torch.export.Dim("batch", min=1)}
    if size is None:
        open_axes[2] = patch * torch.export.Dim("rows", min=MIN_SIDE)
        open_axes[3] = patch * torch.export.Dim("columns", min=MIN_SIDE)
    graph = Graph(model, cores, keep)
    given: list[Tensor] = []
    if cores is None:
        # Neither 1 nor the whole bank, which tracing might take for something special.
        given.append(torch.tensor(max(1, config.num_cores // 2)))
    if keep is None:
        given.append(torch.tensor(0.5))
    shapes: dict[str, object] = {"images": open_axes}
    if given:
        shapes["given"] = tuple(None for _ in given)
    with torch.no_grad(), quiet():
        try:
            program = torch.export.export(
                graph, (images, *given), dynamic_shapes=shapes, strict=False
            )
        except Exception as error:  # torch.export raises almost any type
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ExportError(
                f"torch.export cannot trace this model ({type(error).__name__}: {reason}); torch "
                f"{torch.__version__} is in use, 2.11 to 2.13 are known to work."
            ) from error
    _forget_origin(program)
    return program


def _forget_origin(program: torch.export.ExportedProgram) -> None:
    """Drop the lines of source, with their paths on this machine, that tracing notes down."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's remarks about its own deprecations and about packages not installed."""
    names = ("torch.onnx", "torch.export", "torch._export", "torch.__trace", "onnxscript")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def report_of(path: Path) -> Path:
    """The report beside an exported file."""
    return path.with_suffix(path.suffix + ".json")
