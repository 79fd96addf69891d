"""ONNX files, run by onnxruntime alone and compared with the plain model."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import veca
from veca.errors import InputError
from veca.export import ExportError, export_model, load_exported
from veca.images.bundled import bundled_photos
from veca.quantization import Rounding

pytestmark = pytest.mark.slow  # every test here needs an exported file

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
Fail = onnxruntime.capi.onnxruntime_pybind11_state.Fail
InvalidArgument = onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument

NAMES = ["cls", "patches", "core_tokens", "core_xy"]
ROOT = Path(__file__).parents[2]


def session(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def expected(model, images, cores):
    with torch.no_grad():
        out = model(torch.from_numpy(images), cores=cores)
    return [out.cls, out.patches, out.cores, out.core_xy]


@pytest.mark.parametrize("cores", [1, 3, 16])
@pytest.mark.parametrize("shape", [(1, 48, 80), (3, 224, 32), (2, 16, 16), (5, 16, 208)])
def test_one_graph_is_the_model_at_any_batch_size_and_budget(model, onnx_any, shape, cores):
    batch, height, width = shape
    images = np.random.default_rng(0).normal(size=(batch, 3, height, width)).astype(np.float32)
    found = session(onnx_any.path).run(NAMES, {"images": images, "cores": np.array(cores)})
    for value, wanted in zip(found, expected(model, images, cores), strict=True):
        np.testing.assert_allclose(value, wanted.numpy(), rtol=0, atol=2e-5)


def test_the_report_says_what_was_checked(model, onnx_any):
    report = json.loads(onnx_any.report.read_text())
    assert onnx_any.report.name == "small_anycores.onnx.json"
    assert report["sha256"] == hashlib.sha256(onnx_any.path.read_bytes()).hexdigest()
    assert report["bytes"] == onnx_any.path.stat().st_size == onnx_any.bytes
    assert report["weights_sha256"] == veca.weights.weights_hash(model)
    assert report["opset"] >= 18
    verification = report["verification"]
    assert verification["traced"] == {"batch": 2, "patches": [3, 5]}
    assert verification["on"] == "photos of the package"
    checked = {(c["batch"], c["height"], c["width"], c["cores"]) for c in verification["checks"]}
    assert checked == {
        (batch, *size, cores)
        for batch in (1, 3)
        for size in ((96, 64), (32, 112))
        for cores in (1, 8, 16)
    }
    largest = max(max(c["differences"].values()) for c in verification["checks"])
    assert verification["max_difference"] == largest == onnx_any.max_difference
    assert 0 < largest < 1e-3


def test_names_and_facts_are_in_the_file(onnx_any):
    opened = session(onnx_any.path)
    shapes = {entry.name: entry.shape for entry in opened.get_inputs()}
    assert shapes == {"images": ["batch", 3, "16*rows", "16*columns"], "cores": []}
    outputs = {entry.name: entry.shape for entry in opened.get_outputs()}
    assert list(outputs) == NAMES
    assert outputs["core_xy"] == ["batch", "cores", 2]
    assert outputs["cls"] == ["batch", 48]
    facts = json.loads(opened.get_modelmeta().custom_metadata_map["veca"])
    assert facts["image_mean"] == [0.485, 0.456, 0.406]
    assert facts["cores"] == "any"
    assert facts["config"]["depth"] == 2


def test_nothing_of_this_machine_is_in_the_file(onnx_any, torch_any):
    for path in (onnx_any.path, torch_any.path):
        data = path.read_bytes()
        assert str(Path(veca.__file__).parent).encode() not in data
        assert b"site-packages" not in data


@pytest.mark.parametrize("sides", [(50, 64), (64, 79), (10, 16)])
def test_a_size_off_the_grid_is_refused_in_words(onnx_any, sides):
    images = np.zeros((1, 3, *sides), np.float32)
    with pytest.raises(Fail, match=r"height and width .*16"):
        session(onnx_any.path).run(NAMES, {"images": images, "cores": np.array(4)})


@pytest.mark.parametrize("cores", [0, 17, -1])
def test_a_budget_out_of_range_is_refused_in_words(onnx_any, cores):
    images = np.zeros((1, 3, 32, 32), np.float32)
    with pytest.raises(Fail, match=r"cores .*16"):
        session(onnx_any.path).run(NAMES, {"images": images, "cores": np.array(cores)})


def test_fixed_budget_size_and_half_precision(model, tmp_path):
    (entry,) = export_model(model, tmp_path, cores=4, size=(64, 96), precision="fp16")
    assert entry.path.name == "veca_cores4_64x96_float16.onnx"
    assert [(c.batch, c.height, c.width, c.cores) for c in entry.checks] == [
        (1, 64, 96, 4),
        (3, 64, 96, 4),
    ]
    opened = session(entry.path)
    assert [(i.name, i.type, i.shape) for i in opened.get_inputs()] == [
        ("images", "tensor(float)", ["batch", 3, 64, 96])
    ]
    images = np.random.default_rng(1).normal(size=(2, 3, 64, 96)).astype(np.float32)
    found = opened.run(NAMES, {"images": images})
    assert [value.dtype.name for value in found] == ["float16"] * 3 + ["float32"]
    for value, wanted in zip(found, expected(model, images, 4), strict=True):
        np.testing.assert_allclose(value, wanted.numpy(), rtol=0, atol=3e-2)
        # Half precision it is, and not single in disguise.
        assert np.abs(value - wanted.numpy()).max() > 1e-5
    with pytest.raises(InvalidArgument, match=r"(?s)80.*96"):
        opened.run(NAMES, {"images": np.zeros((1, 3, 64, 80), np.float32)})

    exported = load_exported(entry.path)
    assert (exported.cores, exported.size) == (4, (64, 96))
    with pytest.raises(InputError, match="96 x 64"):
        exported(torch.zeros(1, 3, 96, 64))
    with pytest.raises(InputError, match="cores=5"):
        exported(torch.zeros(1, 3, 64, 96), cores=5)


@pytest.mark.parametrize("shape", [(2, 112, 144), (1, 80, 176), (2, 32, 32)])
def test_a_file_that_merges_is_the_model_at_sizes_that_were_not_traced(model, onnx_half, shape):
    """One grid is even, one odd (5 x 11), one has a single window."""
    batch, height, width = shape
    images = model.preprocess(bundled_photos()[:batch], (height, width)).pixels
    with torch.no_grad():
        out = model(images, cores=6, keep=0.5)
        plain = model(images, cores=6)
    opened = session(onnx_half.path)
    found = opened.run(NAMES, {"images": images.numpy(), "cores": np.array(6)})
    for value, wanted in zip(found, (out.cls, out.patches, out.cores, out.core_xy), strict=True):
        np.testing.assert_allclose(value, wanted.numpy(), rtol=0, atol=5e-5)
    assert np.abs(found[1] - plain.patches.numpy()).max() > 1e-3
    exported = load_exported(onnx_half.path)
    assert exported.keep == 0.5
    torch.testing.assert_close(exported(images, 6).patches, out.patches, rtol=0, atol=5e-5)


def test_a_file_says_what_share_goes_on(onnx_half):
    assert onnx_half.path.name == "small_anycores_keep0.5.onnx" and onnx_half.keep == 0.5
    verification = json.loads(onnx_half.report.read_text())["verification"]
    assert {check["keep"] for check in verification["checks"]} == {0.5}
    assert onnx_half.max_difference < 1e-4


def test_one_file_for_any_share_of_tokens_in_int8(model, onnx_int8):
    """Budget, share, batch and size are inputs of one file, whose operators are all standard."""
    onnx = pytest.importorskip("onnx")
    proto = onnx.load(onnx_int8.path)
    assert {node.domain for node in proto.graph.node} == {""}
    kinds = [node.op_type for node in proto.graph.node]
    # Of both blocks but the first way down, and the projection.
    assert kinds.count("MatMulInteger") == 2 * 7 - 1 + 1
    exported = load_exported(onnx_int8.path)
    assert (exported.cores, exported.keep) == (None, None)
    for keep, size in itertools.product((1.0, 0.7, 0.25), ((112, 80), (64, 144))):
        images = model.preprocess(bundled_photos()[:2], size).pixels
        with torch.no_grad():
            wanted = model(images, cores=7, keep=keep)
        found = exported(images, 7, keep)
        agreed = torch.cosine_similarity(found.patches, wanted.patches, dim=-1).mean()
        assert 0.99 < agreed < 1 - 1e-6  # in 8 bit, and not float in disguise
    with pytest.raises(InputError, match="keep"):
        exported(images, 7, 0.2)
    opened = session(onnx_int8.path)
    inputs = {"images": images.numpy(), "cores": np.array(7)}
    with pytest.raises(Fail, match=r"keep .*0\.25"):
        opened.run(NAMES, {**inputs, "keep": np.array(0.2, np.float32)})
    assert onnx_int8.agreement.cls > 0.99 and onnx_int8.dtype == "int8"
    report = json.loads(onnx_int8.report.read_text())
    assert report["verification"]["gate"] == {"cls": 0.9, "patches": 0.9}
    assert {check["keep"] for check in report["verification"]["checks"]} == {1.0, 0.5, 0.25}


def test_onnxruntime_fuses_what_is_written(onnx_int8, tmp_path):
    """Scales into the products of 8 bit, and attention's transposes into its products."""
    onnx = pytest.importorskip("onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(str(onnx_int8.path), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node]
    # All but the first way down.
    assert kinds.count("MatMulIntegerToFloat") == 2 * 7 and "MatMulInteger" not in kinds
    assert kinds.count("FusedMatMul") == 2 * 2  # the scores of cores and of patches, by block


def test_layers_that_the_weights_leave_stay_in_float32(model, tmp_path):
    onnx = pytest.importorskip("onnx")
    quantised = copy.deepcopy(model)
    quantised.quantization = Rounding(leave=("blocks.1.attn.k", "blocks.1.ffn.*", "project"))
    options = {"cores": 4, "size": (32, 32), "precision": "int8", "gate": 0.9}
    (entry,) = export_model(quantised, tmp_path, **options)
    assert load_exported(entry.path).facts["left_in_float32"][0] == "blocks.1.attn.k"
    kinds = [node.op_type for node in onnx.load(entry.path).graph.node]
    # Of the second block the values and what attention gives, as q lies in one layer with k.
    assert kinds.count("MatMulInteger") == 7 + 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_in_two_bytes(model, tmp_path, precision):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    options = {"cores": 4, "size": (64, 96)}
    (entry,) = export_model(model, tmp_path, precision=precision, widen=True, **options)
    assert entry.path.name == f"veca_cores4_64x96_{str(dtype).removeprefix('torch.')}.onnx"
    (single,) = export_model(model, tmp_path, **options)
    assert entry.bytes < 0.7 * single.bytes
    images = model.preprocess(bundled_photos()[:2], (64, 96)).pixels
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        if parameter.numel() >= 256:
            parameter.data = parameter.data.to(dtype).float()
    with torch.no_grad():
        wanted = rounded(images, cores=4).patches
    found = load_exported(entry.path)(images).patches
    # The scale of the scores, a power of two or not, is in the weights before they are rounded.
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2 if precision == "bf16" else 2e-3)


def test_a_file_of_another_opset_is_refused_in_a_line(onnx_any, tmp_path):
    onnx = pytest.importorskip("onnx")
    proto = onnx.load(onnx_any.path)
    proto.opset_import[0].version = 99
    path = tmp_path / "new.onnx"
    del proto.metadata_props[:]
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ExportError, match=r"new\.onnx.*opset 99.*upgrade") as raised:
        load_exported(path)
    assert "\n" not in str(raised.value)


def test_load_exported_is_called_like_the_model(model, onnx_any):
    exported = load_exported(onnx_any.path)
    assert exported.config == model.config
    images = torch.randn(2, 3, 32, 64)
    with torch.no_grad():
        wanted = model(images, cores=5)
    found = exported(images, cores=5)
    torch.testing.assert_close(found.feature_map(), wanted.feature_map(), rtol=0, atol=2e-5)
    torch.testing.assert_close(found.cls, wanted.cls, rtol=0, atol=2e-5)
    assert found.grid == (2, 4)
    assert exported(images).cores.shape == (2, 16, 48)
    with pytest.raises(InputError, match="40 x 64"):
        exported(torch.zeros(1, 3, 40, 64))
    with pytest.raises(InputError, match="cores"):
        exported(images, cores=17)
    with pytest.raises(InputError, match="NaN"):
        exported(torch.full((1, 3, 32, 32), torch.nan))
    with pytest.raises(InputError, match="'tpu'"):
        load_exported(onnx_any.path, device="tpu")


def test_files_that_are_not_ours(tmp_path):
    with pytest.raises(InputError, match=r"none\.onnx"):
        load_exported(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(ExportError, match=r"bad\.onnx"):
        load_exported(tmp_path / "bad.onnx")
    with pytest.raises(InputError, match=r"model\.bin.*\.onnx"):
        load_exported(tmp_path / "model.bin")


def test_the_example_needs_neither_torch_nor_veca(model, onnx_any, tmp_path):
    Image.effect_mandelbrot((90, 60), (-2, -1, 1, 1), 50).convert("RGB").save(tmp_path / "a.png")
    script = (
        "import sys, runpy; sys.modules['torch'] = sys.modules['veca'] = None;"
        f"sys.argv = ['x', {str(onnx_any.path)!r}, 'a.png', '--cores', '6', '--side', '64'];"
        f"runpy.run_path({str(ROOT / 'examples' / 'onnx_features.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "feature_map  float32 [4, 6, 48]" in done.stdout
    found = np.load(tmp_path / "features.npz")
    batch = veca.preprocess(tmp_path / "a.png", size=64)
    with torch.no_grad():
        wanted = model(batch.pixels, cores=6)
    np.testing.assert_allclose(found["cls"], wanted.cls.numpy(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["patches"], wanted.patches.numpy(), rtol=0, atol=1e-4)
