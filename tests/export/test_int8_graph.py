"""One linear layer in an ONNX graph of 8 bit, against the definition of int8."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from veca.export.int8_graph import quantize_linear_layers
from veca.quantization import quantized_linear_reference, quantized_weight

onnx = pytest.importorskip("onnx", reason="the extra `export` is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")


def graph(weights):
    """x [batch, rows, inputs] -> x @ w for each of the weights [inputs, outputs]."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(len(weights))]
    held = [onnx.numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    inputs = [helper.make_tensor_value_info("x", kind, ["batch", "rows", weights[0].shape[0]])]
    outputs = [
        helper.make_tensor_value_info(f"y{i}", kind, ["batch", "rows", w.shape[1]])
        for i, w in enumerate(weights)
    ]
    return helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, held),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=9,
    )


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(24, n)).astype(np.float32) for n in (32, 20, 2)]


def test_layers_compute_the_definition(weights):
    proto = graph(weights)
    assert quantize_linear_layers(onnx, proto) == 2  # two outputs are not worth it
    onnx.checker.check_model(proto, full_check=True)
    kinds = [node.op_type for node in proto.graph.node]
    assert kinds.count("QuantizeLinear") == 1  # of what both read
    assert {i.name for i in proto.graph.initializer}.isdisjoint({"w0", "w1"})
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    x = np.random.default_rng(1).normal(size=(2, 5, 24)).astype(np.float32)
    x[0, 0] *= 1000  # the other tokens keep their digits
    x[1, 2] = 0
    found = session.run(None, {"x": x})
    assert [y.shape for y in found] == [(2, 5, 32), (2, 5, 20), (2, 5, 2)]
    for y, weight in zip(found[:2], weights, strict=False):
        whole, scale = quantized_weight(torch.from_numpy(weight.T.copy()))
        wanted = quantized_linear_reference(torch.from_numpy(x), whole, scale, None)
        torch.testing.assert_close(torch.from_numpy(y), wanted, rtol=1e-5, atol=1e-6)
        assert not y[1, 2].any()
    np.testing.assert_allclose(found[2], x @ weights[2], rtol=1e-4, atol=1e-4)
