"""Networks by other runtimes: both from ONNX files that `veca.export` traces and writes."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from veca import onnx_files
from veca._util.extras import require
from veca.dense import DenseVit
from veca.errors import ExportError, InputError
from veca.export.api import file_facts
from veca.export.arranged import arrange
from veca.export.graph import frozen_copy, trace
from veca.export.onnx_file import OnnxRunner, write
from veca.model import Veca
from veca.outputs import VecaOutput

ENGINES = ("torch", "onnxruntime", "openvino")
"""What can run a network; OpenVINO comes as a guest with onnxruntime where it is installed."""
PRECISIONS = {"onnxruntime": ("fp32", "int8"), "openvino": ("fp32", "bf16", "int8")}
"""What they are asked to compute in."""
_HINTS = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}
_CLOSE = {"fp32": 0.99999, "int8": 0.98}
Run = Callable[..., Any]


def engines_for(asked: tuple[str, ...], device: str) -> tuple[str, ...]:
    """The engines to measure; InputError where they cannot run."""
    others = [engine for engine in asked if engine != "torch"]
    if others and torch.device(device).type != "cpu":
        raise InputError(f"{others[0]} is measured on a CPU, and the device is {device}.")
    for engine in others:
        require(engine, f"engine {engine}")
    guest = "onnxruntime" in asked and importlib.util.find_spec("openvino") is not None
    return tuple(dict.fromkeys((*asked, "openvino"))) if guest else asked


def runner(engine: str, network: Veca | DenseVit, precision: str, keep: float) -> Run:
    """A network in a runtime: `run(images, cores=...)` gives tensors."""
    weights = "int8" if precision == "int8" else "fp32"
    if isinstance(network, Veca):
        file = onnx_files.file_for(network, weights, keep)
        return _opened(engine, file, precision)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dense.onnx"
        export_dense(network, file, weights)
        return _opened(engine, file, precision)


def export_dense(network: DenseVit, path: Path, precision: str) -> None:
    """The yardstick as an ONNX file for any size, as the export has it for VECA."""
    onnx_files.require_onnxruntime(precision)
    model: Any = _AsVeca(network)
    facts = file_facts(model, "onnx", 1, 1.0, None, precision, "", widen=False)
    arranged = arrange(frozen_copy(model, torch.float32))
    write(trace(arranged, 1, None), path, facts)
    images = torch.randn(1, network.config.in_channels, *[4 * network.config.patch_size] * 2)
    with torch.inference_mode():
        wanted = network(images).patches
    found = OnnxRunner(path)(images)["patches"]
    if torch.cosine_similarity(found, wanted, dim=-1).mean() < _CLOSE[precision]:
        raise ExportError(f"the dense network in {precision} is not what torch computes.")


class _AsVeca(nn.Module):
    """A dense network with the outputs of VECA, one core."""

    quantization = None

    def __init__(self, network: DenseVit) -> None:
        super().__init__()
        self.network = network
        self.config, self.blocks = network.config, network.blocks

    def forward(self, images: Tensor, cores: int = 1, keep: float = 1.0) -> VecaOutput:
        out = self.network(images)
        xy = images.new_zeros(images.shape[0], 1, 2)
        return VecaOutput(out.cls.unsqueeze(1), out.patches, xy, out.grid)


def _opened(engine: str, file: Path, precision: str) -> Run:
    if engine == "onnxruntime":
        return _threaded(lambda: OnnxRunner(file))
    content = file.read_bytes()
    return _threaded(lambda: _Openvino(content, precision))


def _threaded(make: Callable[[], Any]) -> Run:
    """With as many threads as torch has at the call."""
    made: dict[int, Any] = {torch.get_num_threads(): make()}

    def run(images: Tensor, cores: int | None = None) -> Any:
        threads = torch.get_num_threads()
        if threads not in made:
            made[threads] = make()
        return made[threads](images, cores)

    return run


class _Openvino:
    def __init__(self, content: bytes, precision: str) -> None:
        openvino = require("openvino", "OpenVINO")
        core = openvino.Core()
        hints = {
            "INFERENCE_PRECISION_HINT": _HINTS[precision],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._model = core.compile_model(core.read_model(content), "CPU", hints)
        self._takes = {name for entry in self._model.inputs for name in entry.names}

    def __call__(self, images: Tensor, cores: int | None) -> list[Tensor]:
        given: dict[str, Any] = {"images": images.numpy()}
        if "cores" in self._takes:
            given["cores"] = torch.tensor(cores).numpy()
        found = self._model(given)
        with contextlib.suppress(KeyError):
            return [torch.from_numpy(found[name].copy()) for name in ("cls", "patches")]
        raise ExportError("OpenVINO does not give what the file says.")
