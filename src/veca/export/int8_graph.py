"""The linear layers of an ONNX graph as `veca.quantization` defines int8, by standard operators.

Activations are unsigned with 128 for zero, for which runtimes have fast kernels, and the scale of a
product is put together so that onnxruntime fuses it into the product:

    integers(x) @ integers(W) * (largest row scale * column scale) * (row scale / largest) + bias
"""

from __future__ import annotations

import ast
from collections.abc import Container
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from veca.model import Veca
from veca.quantization import LARGEST, Rounding, quantized_weight

LEAST_CHANNELS = 16
"""Layers with fewer outputs stay as they are: they cost nothing, and what they give is a place."""
_ZERO = 128
_LEAST = 1e-30
"""Of the largest number of a token, which its others are divided by."""
_SCOPES = "pkg.torch.onnx.name_scopes"
"""Where torch's exporter notes the module that a node comes from."""
_JOINED = {
    "real": ("q", "k"),
    "imaginary": ("q", "k"),
    "gate": ("up",),
}
"""The last part of the name of an arranged layer -> of the layers it is made of."""
ROUNDING = Rounding(leave=("blocks.0.ffn.down",))
"""What files in int8 round. The first way down has the largest outliers beside what it adds, and
with one core every patch hears of it; in float32 it costs 2 % of the time. The output projection,
which the engine leaves, would cost 10."""


def rounding_of(model: Veca) -> Rounding:
    """Which layers of a model are rounded in a file: as its weights say, or else `ROUNDING`."""
    return model.quantization or ROUNDING


def left_weights(proto: Any, leave: tuple[str, ...]) -> set[str]:
    """Names of the constants in products that stay as they are, by the modules' names.

    It reads notes that torch's exporter makes beside the nodes.
    """
    return {
        node.input[1]
        for node in proto.graph.node
        if node.op_type == "MatMul" and _is_left(_module(node), leave)
    }


def _module(node: Any) -> str:
    """The module that a node comes from, as the model calls it; empty where it comes from none."""
    notes = {note.key: note.value for note in node.metadata_props}
    scopes = ast.literal_eval(notes.get(_SCOPES, "[]"))
    return str(scopes[-2]).removeprefix("model.") if len(scopes) > 1 else ""


def _is_left(module: str, leave: tuple[str, ...]) -> bool:
    room, _, last = module.rpartition(".")
    names = [f"{room}.{one}" if room else one for one in _JOINED.get(last, (last,))]
    return any(fnmatchcase(name, pattern) for name in names for pattern in leave)


def quantize_linear_layers(onnx: Any, proto: Any, left: Container[str] = ()) -> int:
    """Change, in place, every product with a constant matrix that is large enough; how many.

    Args:
        left: names of constants that stay as they are.
    """
    graph = _Graph(onnx, proto.graph)
    nodes, changed = list(proto.graph.node), 0
    del proto.graph.node[:]
    for node in nodes:
        weight = graph.matrix(node)
        if weight is None or weight in left:
            proto.graph.node.append(node)
        else:
            changed += 1
            proto.graph.node.extend(graph.product(node, weight))
    graph.drop_unused()
    del proto.graph.value_info[:]  # what is known of tensors that are not there any more
    return changed


class _Graph:
    def __init__(self, onnx: Any, graph: Any) -> None:
        self.onnx, self.graph = onnx, graph
        self.held = {entry.name: entry for entry in graph.initializer}
        self.made: set[str] = set()

    def matrix(self, node: Any) -> str | None:
        """The name of the weight of a linear layer, if a node is one that is worth it."""
        if node.op_type != "MatMul" or node.input[1] not in self.held:
            return None
        weight = self.held[node.input[1]]
        float32 = weight.data_type == self.onnx.TensorProto.FLOAT
        worth = len(weight.dims) == 2 and weight.dims[1] >= LEAST_CHANNELS
        return str(node.input[1]) if float32 and worth else None

    def product(self, node: Any, weight: str) -> list[Any]:
        (x, _), (out,) = node.input, node.output
        nodes = self._activations(x, self.held[weight].dims[0])
        values = self.onnx.numpy_helper.to_array(self.held[weight])
        rows, scales = quantized_weight(torch.from_numpy(values.T.copy()))
        whole, scale = np.ascontiguousarray(rows.numpy().T), scales.numpy()
        channels = whole.shape[1]
        matrix = self._constant(f"{weight}_int8", whole)
        column = self._constant(f"{weight}_scale", scale)
        zero = self._constant("veca_zero", np.array(_ZERO, np.uint8))
        shape = f"{x}_{channels}_shape"
        if shape not in self.made:
            self.made.add(shape)
            last = self._constant(f"veca_{channels}", np.array([channels]))
            nodes.append(self._node("Concat", [f"{x}_outer", last], shape, axis=0))
        return [
            *nodes,
            self._node("MatMulInteger", [f"{x}_int8", matrix, zero], f"{out}_int32"),
            self._node("Cast", [f"{out}_int32"], f"{out}_float", to=self.onnx.TensorProto.FLOAT),
            self._node("Mul", [f"{x}_largest", column], f"{out}_scale"),
            self._node("Mul", [f"{out}_float", f"{out}_scale"], f"{out}_scaled"),
            self._node("Mul", [f"{out}_scaled", f"{x}_share"], f"{out}_rows"),
            self._node("Reshape", [f"{out}_rows", shape], out),
        ]

    def _activations(self, x: str, channels: int) -> list[Any]:
        """Nodes that give a tensor as whole numbers, once for all layers that read it."""
        if f"{x}_int8" in self.made:
            return []
        self.made.add(f"{x}_int8")
        rows = self._constant(f"veca_rows_{channels}", np.array([-1, channels]))
        axis = self._constant("veca_last", np.array([-1]))
        least = self._constant("veca_least", np.array(_LEAST, np.float32))
        top = self._constant("veca_top", np.array(LARGEST, np.float32))
        helper = self.onnx.helper
        zeros = helper.make_tensor("value", self.onnx.TensorProto.UINT8, [1], [_ZERO])
        return [
            self._node("Shape", [x], f"{x}_outer", end=-1),
            self._node("Reshape", [x, rows], f"{x}_tokens"),
            self._node("Abs", [f"{x}_tokens"], f"{x}_abs"),
            self._node("ReduceMax", [f"{x}_abs", axis], f"{x}_max", keepdims=0),
            self._node("Max", [f"{x}_max", least], f"{x}_range"),
            self._node("Div", [f"{x}_range", top], f"{x}_row"),
            self._node("Shape", [f"{x}_row"], f"{x}_count"),
            self._node("ConstantOfShape", [f"{x}_count"], f"{x}_zeros", value=zeros),
            self._node(
                "QuantizeLinear", [f"{x}_tokens", f"{x}_row", f"{x}_zeros"], f"{x}_int8", axis=0
            ),
            self._node("ReduceMax", [f"{x}_row"], f"{x}_largest", keepdims=0),
            self._node("Div", [f"{x}_row", f"{x}_largest"], f"{x}_relative"),
            self._node("Unsqueeze", [f"{x}_relative", axis], f"{x}_share"),
        ]

    def _node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> Any:
        return self.onnx.helper.make_node(kind, inputs, [output], **attributes)

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        if name not in self.made:
            self.made.add(name)
            self.graph.initializer.append(self.onnx.numpy_helper.from_array(value, name))
        return name

    def drop_unused(self) -> None:
        read = {name for node in self.graph.node for name in node.input}
        kept = [entry for entry in self.graph.initializer if entry.name in read]
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)
