"""ONNX: the traced program as one file, with its checks, facts and plain names inside."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from veca._util.extras import require
from veca._util.files import open_file, parse_json
from veca.config import VecaConfig
from veca.errors import ExportError, InputError
from veca.export.graph import OUTPUTS, quiet
from veca.export.int8_graph import left_weights, quantize_linear_layers
from veca.merging import LEAST_OPEN_KEEP

METADATA = "veca"
"""The key under which a file's metadata holds its facts, as JSON."""

LIMIT = 2**31 - 1  # a protobuf message, which an ONNX file is, cannot be larger
_ROOM = 16 * 2**20  # for everything that is not weights

SEAL = "veca_sha256"
"""The key of the sha256 of the whole file, with zeros in the place of this hash."""

_SMALL = 256  # numbers in a tensor that is not worth storing otherwise
_DIGITS = 64
_INT64 = 7  # TensorProto.DataType
_BEFORE_SEAL = SEAL.encode() + bytes([0x12, _DIGITS])  # the value is the entry's second field

_OPSETS = re.compile(r"Opset (\d+) is under development.* till opset (\d+)", re.DOTALL)
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def require_onnx() -> None:
    """Refuse to start where a library that writing or checking a file needs is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        require(name, "ONNX")


def check_fits(weight_bytes: int) -> None:
    """Refuse weights that one ONNX file cannot hold."""
    if weight_bytes > LIMIT - _ROOM:
        raise ExportError(
            f"the weights take {weight_bytes / 1e9:.1f} GB, but one ONNX file holds at most 2 GB; "
            "export as float16, or to torch-export."
        )


def write(program: torch.export.ExportedProgram, path: Path, facts: dict[str, Any]) -> None:
    """Write a traced program as ONNX.

    Args:
        facts: what a reader of the file should know; kept in its metadata, as JSON. The version
            of the ONNX operators is added to them.
    """
    config = VecaConfig.from_dict(facts["config"])
    onnx = require("onnx", "ONNX")
    require("onnxscript", "ONNX")
    inputs = list(facts["inputs"])
    with quiet():
        try:
            exported = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=inputs,
                output_names=list(OUTPUTS),
                custom_translation_table={
                    torch.ops.aten.repeat_interleave.self_int: _repeat_interleave,
                    torch.ops.aten.sort.stable: _stable_sort,
                },
            )
        except Exception as error:  # the exporter raises its own and almost any other type
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ExportError(
                f"torch.onnx cannot export this model ({type(error).__name__}: {reason}); check "
                "the versions of torch, onnx and onnxscript."
            ) from error
    assert exported is not None  # it is None only when a path is given
    proto = exported.model_proto
    _plain_names(proto, config.patch_size)
    left = left_weights(proto, tuple(facts.get("left_in_float32", ())))
    _forget_origin(proto)
    if facts["size"] == "dynamic":
        _check_grid(onnx, proto, config.patch_size)
    if facts["cores"] == "any":
        _check_budget(onnx, proto, config.num_cores)
    if facts.get("keep") == "any":
        _check_share(onnx, proto)
    if facts["dtype"] == "int8":
        quantize_linear_layers(onnx, proto, left)
    if facts["dtype"] in ("float16", "bfloat16") and facts["computes_in"] == "float32":
        _store_in_two_bytes(onnx, proto, getattr(torch, facts["dtype"]))
    proto.producer_name = "veca"
    proto.producer_version = facts["versions"]["veca"]
    facts["opset"] = max(entry.version for entry in proto.opset_import if not entry.domain)
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA, json.dumps(facts)
    entry = proto.metadata_props.add()
    entry.key, entry.value = SEAL, "0" * _DIGITS
    onnx.checker.check_model(proto)
    content = bytearray(proto.SerializeToString())
    place = content.rindex(_BEFORE_SEAL) + len(_BEFORE_SEAL)
    content[place : place + _DIGITS] = hashlib.sha256(content).hexdigest().encode()
    with path.open("wb") as file:
        file.write(content)


def check_seal(path: Path) -> None:
    """Refuse a file that is not what was written; one without a hash, as of 0.1, passes."""
    with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = content.rfind(_BEFORE_SEAL)
        if place < 0:
            return
        place += len(_BEFORE_SEAL)
        recorded, end = content[place : place + _DIGITS], place + _DIGITS
        with memoryview(content) as whole, whole[:place] as before, whole[end:] as after:
            digest = hashlib.sha256(before)
            digest.update(b"0" * _DIGITS)
            digest.update(after)
    if recorded != digest.hexdigest().encode():
        raise ExportError(
            f"{path} is not what was exported (its sha256 differs from the one recorded in it); "
            "export it again."
        )


def _repeat_interleave(self: Any, repeats: Any, dim: Any = None, output_size: Any = None) -> Any:
    """aten.repeat_interleave of one axis; onnxscript's own mixes up the axes if `repeats` is open.

    It would put the repeats before the elements, and so would repeat the whole instead of each.
    """
    from onnxscript import opset18 as op

    one, flat = op.Constant(value_ints=[1]), op.Constant(value_ints=[-1])
    times = op.Constant(value_ints=[repeats]) if isinstance(repeats, int) else repeats
    shape = op.Concat(one, op.Reshape(times, flat), axis=0)
    return op.Reshape(op.Expand(op.Unsqueeze(self, one), shape), flat)


def _stable_sort(
    self: Any, stable: Any = None, dim: int = -1, descending: bool = False
) -> tuple[Any, Any]:
    """aten.sort that keeps the order of equals, which onnxscript lacks: TopK of all there are.

    Of equal elements TopK puts the one of the lower index first, as ONNX defines it.
    """
    from onnxscript import opset18 as op

    axis = op.Constant(value_ints=[dim])
    count = op.Gather(op.Shape(self), axis)
    # Runtimes sort few types; what is sorted here are float32 and small whole numbers.
    numbers = self if self.dtype.is_floating_point() else op.Cast(self, to=_INT64)
    values, places = op.TopK(numbers, count, axis=dim, largest=int(descending), sorted=1)
    return op.CastLike(values, self), places


def _plain_names(proto: Any, patch_size: int) -> None:
    """Call the open axes batch, rows and columns instead of s34, s39 and s94.

    With an open budget, the first number that tracing knows nothing about is `cores`.
    """
    images = proto.graph.input[0].type.tensor_type.shape.dim
    patterns = {0: r"(\w+)", 2: rf"{patch_size}\*(\w+)", 3: rf"{patch_size}\*(\w+)"}
    names = {}
    for axis, plain in ((0, "batch"), (2, "rows"), (3, "columns")):
        found = re.fullmatch(patterns[axis], images[axis].dim_param)
        if found:
            names[found[1]] = plain
    if any(value.name == "cores" for value in proto.graph.input):
        names["u0"] = "cores"
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.HasField("dim_param"):
                axis.dim_param = re.sub(
                    r"[A-Za-z_]\w*",
                    lambda word: names.get(word[0], word[0]),
                    axis.dim_param,
                )


def _forget_origin(proto: Any) -> None:
    """Drop the notes about the source code, with paths on this machine, that tracing makes."""
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.initializer, *graph.value_info):
        del part.metadata_props[:]
        part.ClearField("doc_string")
    for value in (*graph.input, *graph.output):
        del value.metadata_props[:]
        value.ClearField("doc_string")


def _check_grid(onnx: Any, proto: Any, patch: int) -> None:
    """Make a size off the patch grid an error; a convolution alone would drop the last pixels.

    ONNX has nothing to raise an error with, but a reshape to another number of pixels does, and
    its name, which runtimes put into the message, says what is wrong.
    """
    node = onnx.helper.make_node
    checked = _rename_uses(proto, "images")
    nodes = [
        node("Shape", ["images"], ["veca_shape"]),
        node("Div", ["veca_shape", "veca_unit"], ["veca_whole"]),
        node("Mul", ["veca_whole", "veca_unit"], ["veca_on_grid"]),
        node(
            "Reshape",
            ["images", "veca_on_grid"],
            [checked],
            name=f"image height and width must be multiples of {patch}",
            allowzero=1,
        ),
    ]
    _prepend(onnx, proto, nodes, {"veca_unit": np.array([1, 1, patch, patch])})


def _check_budget(onnx: Any, proto: Any, num_cores: int) -> None:
    """Make a budget outside 1..M an error, by the same means."""
    node = onnx.helper.make_node
    checked = _rename_uses(proto, "cores")
    nodes = [
        node("Clip", ["cores", "veca_one", "veca_bank"], ["veca_in_range"]),
        node("Sub", ["cores", "veca_in_range"], ["veca_outside"]),
        node("Abs", ["veca_outside"], ["veca_distance"]),
        node("Add", ["veca_distance", "veca_ones"], ["veca_count"]),
        node(
            "Reshape",
            ["cores", "veca_count"],
            ["veca_cores"],
            name=f"cores must be from 1 to {num_cores}",
        ),
        # Not a second reshape: runtimes merge the two and drop the first.
        node("Gather", ["veca_cores", "veca_first"], [checked]),
    ]
    values = {
        "veca_one": np.array(1),
        "veca_bank": np.array(num_cores),
        "veca_ones": np.array([1]),
        "veca_first": np.array(0),
    }
    _prepend(onnx, proto, nodes, values)


def _check_share(onnx: Any, proto: Any) -> None:
    """Make a share of tokens outside its range an error, in the same way."""
    node = onnx.helper.make_node
    checked = _rename_uses(proto, "keep")
    whole = {"to": onnx.TensorProto.INT64}
    nodes = [
        node("Clip", ["keep", "veca_keep_least", "veca_keep_most"], ["veca_keep_in_range"]),
        node("Equal", ["keep", "veca_keep_in_range"], ["veca_keep_inside"]),
        node("Not", ["veca_keep_inside"], ["veca_keep_outside"]),
        node("Cast", ["veca_keep_outside"], ["veca_keep_more"], **whole),
        node("Add", ["veca_keep_more", "veca_keep_ones"], ["veca_keep_count"]),
        node(
            "Reshape",
            ["keep", "veca_keep_count"],
            ["veca_keep"],
            name=f"keep must be from {LEAST_OPEN_KEEP} to 1",
        ),
        node("Gather", ["veca_keep", "veca_keep_first"], [checked]),
    ]
    values = {
        "veca_keep_least": np.float32(LEAST_OPEN_KEEP),
        "veca_keep_most": np.float32(1),
        "veca_keep_ones": np.array([1]),
        "veca_keep_first": np.array(0),
    }
    _prepend(onnx, proto, nodes, values)


def _store_in_two_bytes(onnx: Any, proto: Any, dtype: torch.dtype) -> None:
    """Keep the large tensors in two bytes a number; runtimes widen them when they load the file."""
    kinds = {torch.float16: onnx.TensorProto.FLOAT16, torch.bfloat16: onnx.TensorProto.BFLOAT16}
    nodes = []
    for entry in proto.graph.initializer:
        value = onnx.numpy_helper.to_array(entry)
        if value.dtype != np.float32 or value.size < _SMALL:
            continue
        bits = torch.from_numpy(value.copy()).to(dtype).view(torch.int16).numpy()
        name = f"{entry.name}_{str(dtype).removeprefix('torch.')}"
        stored = onnx.helper.make_tensor(name, kinds[dtype], value.shape, bits.tobytes(), raw=True)
        nodes.append(
            onnx.helper.make_node("Cast", [stored.name], [entry.name], to=onnx.TensorProto.FLOAT)
        )
        entry.CopyFrom(stored)
    _prepend(onnx, proto, nodes, {})


def _rename_uses(proto: Any, name: str) -> str:
    """Let every node read `name` + "_checked" instead of the input `name`."""
    checked = f"{name}_checked"
    for node in proto.graph.node:
        for i, read in enumerate(node.input):
            if read == name:
                node.input[i] = checked
    return checked


def _prepend(onnx: Any, proto: Any, nodes: list[Any], values: Mapping[str, Any]) -> None:
    """Put nodes before all others, with the whole numbers and float32 that they read."""
    graph = proto.graph
    for name, value in values.items():
        kind = np.float32 if value.dtype == np.float32 else np.int64
        graph.initializer.append(onnx.numpy_helper.from_array(value.astype(kind), name))
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])


class OnnxRunner:
    """An ONNX file in onnxruntime: tensors in, a dict of tensors out, nothing checked."""

    def __init__(self, path: str | os.PathLike[str], device: str = "cpu") -> None:
        runtime = require("onnxruntime", "ONNX")
        provider = _PROVIDERS.get(device.partition(":")[0])
        if provider is None or provider not in runtime.get_available_providers():
            raise InputError(
                f"onnxruntime cannot run on {device!r} here; it has "
                f"{', '.join(runtime.get_available_providers())}."
            )
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised; no need to print it as well
        options.intra_op_num_threads = torch.get_num_threads()
        # Products of 8 bit overflow on old processors (AVX2), unless onnxruntime takes care.
        options.add_session_config_entry("session.x64quantprecision", "1")
        if not Path(path).exists():
            raise InputError(f"there is no file {path}.")
        try:
            check_seal(Path(path))
        except (OSError, ValueError) as error:  # ValueError: an empty file has no map
            if isinstance(error, ExportError):
                raise
            raise ExportError(f"cannot read {path} ({error}); export it again.") from error
        self._path = path
        try:
            self.session = runtime.InferenceSession(os.fspath(path), options, providers=[provider])
        except Exception as error:  # onnxruntime's own classes share no base
            newer = _OPSETS.search(str(error))
            if newer:
                raise ExportError(
                    f"{path} is of opset {newer[1]} of ONNX, and onnxruntime {runtime.__version__} "
                    f"knows opset {newer[2]} at most; upgrade onnxruntime, or export it again here."
                ) from error
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ExportError(
                f"{path} cannot be opened by onnxruntime {runtime.__version__} ({reason}); it may "
                "be damaged or made for a newer one."
            ) from error
        self._inputs = [entry.name for entry in self.session.get_inputs()]

    @property
    def facts(self) -> dict[str, Any]:
        """What the file says of itself; empty if it was not made by `export_model`."""
        held = self.session.get_modelmeta().custom_metadata_map.get(METADATA)
        where = f"{METADATA} in the metadata of {self._path}"
        return {} if held is None else parse_json(held, where, ExportError)

    def __call__(
        self, images: Tensor, cores: int | None = None, keep: float = 1.0
    ) -> dict[str, Tensor]:
        values: dict[str, Any] = {"images": images.detach().to("cpu", torch.float32).numpy()}
        if "cores" in self._inputs:
            values["cores"] = np.array(cores, dtype=np.int64)
        if "keep" in self._inputs:
            values["keep"] = np.array(keep, dtype=np.float32)
        found = self.session.run(list(OUTPUTS), values)
        return {n: torch.from_numpy(np.asarray(v)) for n, v in zip(OUTPUTS, found, strict=True)}
