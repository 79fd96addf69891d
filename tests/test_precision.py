"""Models in bf16 and int8 on a CPU: beside the plain model, and beside int8 by definition."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import veca
from veca import VecaConfig, compile_for_inference, create_model, native
from veca import engine as engine_room
from veca import precision as room
from veca.dense import DenseVit
from veca.embed import embed, extract
from veca.engine import InferenceEngine
from veca.errors import InputError, MissingExtraError
from veca.images.bundled import bundled_photos
from veca.model import Veca
from veca.precision import (
    Processor,
    at_precision,
    check_precision,
    fastest,
    hint,
    in_precision,
    recorded,
)
from veca.quantization import Rounding, emulated, mean_agreement, quantized_rows
from veca.weights import weights_hash


@pytest.fixture(scope="module")
def model() -> Veca:
    torch.manual_seed(0)
    config = VecaConfig(depth=3, width=32, heads=2, num_cores=6, output_width=48, patch_size=8)
    return create_model(config).eval()


IMAGES = torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("precision", "least"), [("bf16", 0.9995), ("int8", 0.998)])
@pytest.mark.parametrize(("cores", "keep"), [(None, None), (1, None), (3, 0.5)])
def test_a_precision_computes_what_the_model_does(
    model: Veca, precision: str, least: float, cores: int | None, keep: float | None
) -> None:
    fast = at_precision(model, precision)
    assert fast.precision == precision and model.precision == "fp32"
    assert weights_hash(fast) == weights_hash(model)
    with torch.no_grad():
        out, wanted = fast(IMAGES, cores, keep), model(IMAGES, cores, keep)
        alone = fast.cores_only(IMAGES, cores, keep, first=1)
        native = fast.tokens(IMAGES, cores, keep)
    assert out.patches.dtype == torch.float32 and out.grid == (6, 8)
    for one, other in ((out.cores, wanted.cores), (alone.cls, wanted.cls)):
        assert torch.cosine_similarity(one, other, dim=-1).min() > least
    # One window more or less may merge.
    similar = torch.cosine_similarity(out.patches, wanted.patches, dim=-1).mean()
    assert similar > (least if keep is None else 0.97)
    assert native.patches.shape == (2, 48, 32)


@pytest.mark.parametrize("fused", [2**22, 0])
@pytest.mark.parametrize(("precision", "least"), [("bf16", 0.9995), ("int8", 0.998)])
def test_the_dense_yardstick_computes_what_it_does(
    model: Veca, monkeypatch: pytest.MonkeyPatch, precision: str, least: float, fused: int
) -> None:
    monkeypatch.setattr(room, "_FUSED", fused)
    torch.manual_seed(0)
    dense = DenseVit(model.config).eval()
    fast = at_precision(dense, precision)
    assert fast.precision == precision and dense.precision == "fp32"
    with torch.no_grad():
        out, wanted = fast(IMAGES), dense(IMAGES)
    assert not torch.equal(out.patches, wanted.patches)
    assert torch.cosine_similarity(out.cls, wanted.cls, dim=-1).min() > least
    assert torch.cosine_similarity(out.patches, wanted.patches, dim=-1).mean() > least


def test_int8_is_its_definition_up_to_rounding(
    model: Veca, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "processor", lambda: Processor("", "test"))  # no bfloat16 about
    ours = Rounding(alpha=None)
    slow = emulated(model, ours)
    for compile in (None, False):
        fast = at_precision(model, "int8", rounding=ours, compile=compile)
        with torch.no_grad():
            found, wanted, plain = fast(IMAGES), slow(IMAGES), model(IMAGES)
        error = (found.patches - wanted.patches).norm()
        assert (
            error < 0.2 * (plain.patches - wanted.patches).norm()
        )  # a sum may round the other way


def test_it_runs_where_gradients_are_kept_and_has_none(model: Veca) -> None:
    assert torch.is_grad_enabled()
    found = at_precision(model, "bf16")(IMAGES).patches
    with torch.no_grad():
        assert torch.equal(found, at_precision(model, "bf16")(IMAGES).patches)
    found.sum().backward()
    assert model.get_submodule("blocks.0.ffn.up").weight.grad is None
    model.zero_grad()


def test_results_are_equal_with_one_thread_and_two(model: Veca) -> None:
    before = torch.get_num_threads()
    images = torch.randn(3, 3, 104, 88)
    try:
        for precision, compile in (("bf16", None), ("int8", None), ("int8", False)):
            fast, found = at_precision(model, precision, compile=compile), []
            for threads in (1, 2):
                torch.set_num_threads(threads)
                with torch.no_grad():
                    found.append(fast(images).patches)
            assert torch.equal(*found)
    finally:
        torch.set_num_threads(before)


needs_compiler = pytest.mark.skipif(
    native.compiled().functions is None, reason=native.compiled().reason
)


@needs_compiler
@pytest.mark.parametrize("bf16", ["", "test"])
@pytest.mark.parametrize(("cores", "keep", "rows"), [(None, None, 2), (3, 0.5, None)])
def test_compiled_it_computes_the_same(
    model: Veca,
    monkeypatch: pytest.MonkeyPatch,
    bf16: str,
    cores: int | None,
    keep: float | None,
    rows: int | None,
) -> None:
    monkeypatch.setattr(room, "processor", lambda: Processor(bf16, "test"))
    monkeypatch.setattr(room, "NUMBERS", 2**11)  # more parts than one
    torch.manual_seed(1)
    images = torch.randn(3, 3, 40, 72)
    fast, slow = (at_precision(model, "int8", compile=value) for value in (True, False))
    with torch.no_grad():
        found, wanted = fast(images, cores, keep), slow(images, cores, keep)
        assert torch.cosine_similarity(found.cores, wanted.cores, dim=-1).min() > 0.9995
        similar = torch.cosine_similarity(found.patches, wanted.patches, dim=-1).mean()
        assert similar > (0.9995 if keep is None else 0.97)
        if rows:
            alone = fast.cores_only(images, cores, keep, first=rows).cores
            torch.testing.assert_close(alone, found.cores[:, :rows], rtol=0, atol=0.02)


@needs_compiler
def test_compiled_steps_are_their_definitions() -> None:
    call = native.compiled().functions
    assert call is not None
    torch.manual_seed(0)
    count, width = 37, 48
    x = torch.randn(count, width) * torch.logspace(-6, 3, count).unsqueeze(1)
    x[5] = 0
    weight, bias = torch.randn(width), torch.randn(width)
    whole, scale = torch.empty(count, width, dtype=torch.int8), torch.empty(count)

    def same(found: torch.Tensor, step: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(
            found * step[:, None], wanted, rtol=0, atol=float(step.max()) * 0.51
        )
        steps, rounded = quantized_rows(wanted)[::-1]
        torch.testing.assert_close(step, steps.squeeze(-1), rtol=1e-4, atol=0)
        assert (found.int() - rounded.int()).abs().max() <= 1
        assert (found == rounded).float().mean() > 0.98

    call("norm", x, weight, bias, 1e-6, count, width, whole, scale)
    same(whole, scale, F.layer_norm(x, (width,), weight, bias, 1e-6))
    for kind, dtype in (("bf16", torch.bfloat16), ("float", torch.float32)):
        mixed = torch.full((2, 3, count + 3, 16), torch.nan, dtype=dtype)
        mixed[1, :, :count] = x.view(count, 3, 16).transpose(0, 1)
        call(f"gather_{kind}", mixed, count, 3, 16, 1, count + 3, whole, scale)
        same(whole, scale, mixed[1, :, :count].transpose(0, 1).reshape(count, width).float())

    sums = torch.randint(-(10**6), 10**6, (count, 2 * width), dtype=torch.int32)
    channel, shift, token = torch.rand(2 * width) * 1e-4, torch.randn(2 * width), torch.rand(count)
    product = sums.float() * channel * token[:, None] + shift
    gate, value = product.chunk(2, dim=1)
    call("gate", sums, channel, shift, token, count, width, whole, scale)
    same(whole, scale, F.silu(gate) * value)

    scores = (torch.randn(5, 23) * 30).bfloat16()
    scores[:, 20:] = torch.nan  # behind the last that counts
    wanted = scores[:, :20].float().softmax(dim=-1).bfloat16()
    call("softmax_bf16", scores, 5, 20, 23)
    torch.testing.assert_close(scores[:, :20], wanted, rtol=2**-7, atol=1e-30)
    assert not scores[:, 20:].any()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_a_batch_is_its_images(model: Veca, precision: str, keep: float) -> None:
    """Whatever products are made for several at once, and for more tokens than there are."""
    fast = at_precision(model, precision)
    images = torch.randn(7, 3, 48, 80)
    together = fast(images, keep=keep)
    for image, cls, patches in zip(images, together.cls, together.patches, strict=True):
        alone = fast(image[None], keep=keep)
        torch.testing.assert_close(alone.cls[0], cls, rtol=0, atol=0.02)
        torch.testing.assert_close(alone.patches[0], patches, rtol=0, atol=0.02)


class BatchedProducts(TorchDispatchMode):
    """Notes the shapes of products over batches of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[torch.Size, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bmm.default:
            self.shapes.add(tuple(x.shape for x in args))
        return func(*args, **(kwargs or {}))


def test_few_shapes_of_products_for_many_of_images(model: Veca) -> None:
    """For each, oneDNN compiles code that it keeps: memory would grow with every new shape."""
    fast = at_precision(model, "bf16")
    batches, widths = (1, 2, 3, 5, 7, 8), range(10, 30)
    with BatchedProducts() as products:
        for batch, width in itertools.product(batches, widths):
            fast(torch.zeros(batch, 3, 8 * 10, 8 * width))
    rooms = {-(-(6 + 10 * width) // 16) for width in widths}
    kinds, powers = 4, 4
    assert len(products.shapes) <= kinds * powers * len(rooms) < 4 * len(batches) * len(widths) / 2


@needs_compiler
def test_compiled_it_can_be_copied_and_sent(model: Veca, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every module can, such as to the workers of a cluster."""
    fast = at_precision(model, "int8", compile=True)
    wanted = fast(IMAGES).patches
    sent = pickle.dumps(fast)
    for other in (copy.deepcopy(fast), pickle.loads(sent)):
        assert torch.equal(other(IMAGES).patches, wanted)
    monkeypatch.setattr(native, "compiled", lambda: native.Compiled(None, "no C++ compiler"))
    with pytest.raises(MissingExtraError, match=r"no C\+\+ compiler.*compile=False"):
        pickle.loads(sent)


def test_without_a_compiler_it_is_torch(model: Veca, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiled", lambda: native.Compiled(None, "no C++ compiler"))
    assert isinstance(at_precision(model, "int8").blocks[0].steps, room.TorchSteps)
    with pytest.raises(InputError, match="no C\\+\\+ compiler"):
        at_precision(model, "int8", compile=True)


@needs_compiler
def test_a_compiler_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path,  # type: ignore[no-untyped-def]
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    found = native.compiled.__wrapped__()
    assert found.functions is None and "no such thing" in found.reason
    monkeypatch.delenv("CXX")
    assert native.compiled.__wrapped__().functions is not None
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 1


@pytest.mark.slow
def test_the_shipped_weights_pass_their_gates() -> None:
    model = veca.load("tiny")
    batches = [model.preprocess(photo, 96).pixels for photo in bundled_photos()[:2]]
    for precision, gate in room.GATES.items():
        assert mean_agreement(at_precision(model, precision), model, batches).passes(gate)


def test_what_cannot_be_is_said(model: Veca) -> None:
    with pytest.raises(InputError, match="int8"):
        check_precision("in8")
    with pytest.raises(InputError, match="fp16"):
        at_precision(model, "fp16")
    with pytest.raises(InputError, match="already"):
        at_precision(at_precision(model, "bf16"), "int8")
    with pytest.raises(InputError, match="dtype"):
        compile_for_inference(model, precision="bf16", dtype=torch.bfloat16)
    with pytest.raises(InputError, match="torch"):
        compile_for_inference(model, precision="bf16", engine="toch")


def test_the_engine_says_what_it_took(model: Veca) -> None:
    engine = compile_for_inference(model, precision="int8", size=32, cores=2)
    assert "int8" in engine.describe()
    with torch.no_grad():
        wanted = at_precision(model, "int8")(IMAGES, 3)
    assert torch.equal(engine(IMAGES, 3).patches, wanted.patches)
    assert torch.equal(engine.cores_only(IMAGES, 3, first=1).cls, wanted.cls)
    assert "float32" in compile_for_inference(model).describe()
    assert torch.equal(
        compile_for_inference(model, precision="fp32")(IMAGES).patches,
        model(IMAGES).patches.detach(),
    )


def test_auto_is_the_model_where_nothing_is_faster(
    model: Veca, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "processor", lambda: Processor("", ""))
    chosen = fastest(model, 32)
    assert chosen.model is model and "no instructions" in chosen.reason
    assert hint(model) is None
    monkeypatch.setattr(room, "processor", lambda: Processor("b", "i"))
    monkeypatch.setattr(room, "GATES", dict.fromkeys(("bf16", "int8"), room.Agreement(2, 2)))
    chosen = fastest(model, 32)
    assert chosen.model is model and "agrees" in chosen.reason
    assert "--precision int8" in str(hint(model))


def test_old_names_are_what_they_were(model: Veca) -> None:
    import copy

    old = in_precision(copy.deepcopy(model), "bfloat16")
    assert old.dtype == torch.bfloat16 and recorded(old) == "bfloat16"
    assert recorded(in_precision(model, "bf16")) == "bf16"
    assert recorded(in_precision(model, "float32")) == recorded(model) == "float32"
    assert recorded(in_precision(copy.deepcopy(model), "fp16")) == "float16"


def test_features_remember_their_precision(model: Veca, tmp_path) -> None:  # type: ignore[no-untyped-def]
    photos = [str(photo) for photo in bundled_photos()[:2]]
    fast = at_precision(model, "int8")
    extract(fast, photos, tmp_path / "f", size=32)
    with pytest.raises(InputError, match="precision"):
        extract(model, photos, tmp_path / "f", size=32)
    assert extract(fast, photos, tmp_path / "f", size=32).reused == 2
    embed(photos, tmp_path / "e", weights=fast, size=32, workers=0)
    with pytest.raises(InputError, match="precision"):
        embed(photos, tmp_path / "e", weights=model, size=32, workers=0)
    embed(photos, tmp_path / "again", weights=fast, size=32, workers=0, threads=2)
    one, other = (
        next((tmp_path / name).rglob("*.parquet")).read_bytes() for name in ("e", "again")
    )
    assert one == other


@pytest.fixture(scope="module")
def onnx_engine(model: Veca, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceEngine]:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VECA_CACHE", str(tmp_path_factory.mktemp("cache")))
        engine = compile_for_inference(model, engine="onnxruntime")
        engine.prepare(1, 32)
        yield engine


@pytest.mark.slow
def test_onnxruntime_computes_what_the_model_does(
    model: Veca, onnx_engine: InferenceEngine
) -> None:
    assert "onnxruntime" in onnx_engine.describe()
    for images, cores in ((IMAGES, 3), (IMAGES[:1, :, :32, :40], None)):
        found, wanted = onnx_engine(images, cores), model(images, cores)
        assert found.grid == wanted.grid
        for name in ("cores", "patches", "core_xy"):
            torch.testing.assert_close(
                getattr(found, name), getattr(wanted, name).detach(), rtol=0, atol=1e-4
            )
    assert onnx_engine.cores_only(IMAGES, 3, first=1).cores.shape == (2, 1, 48)
    with pytest.raises(InputError, match="keep"):
        onnx_engine(IMAGES, keep="auto")


@pytest.mark.slow
def test_threads_of_onnxruntime_are_those_of_torch(onnx_engine: InferenceEngine) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(onnx_engine(IMAGES, 3).patches)
            runner = onnx_engine._runs[1.0, threads]._run  # type: ignore[attr-defined]
            assert runner.session.get_session_options().intra_op_num_threads == threads
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_auto_takes_the_faster_engine_and_tries_only_what_is_prepared(
    model: Veca, onnx_engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = compile_for_inference(model, precision="int8")
    assert "by torch" in other.describe() and "not tried" in other.describe()
    for times, name in (([2.0, 1.0], "by onnxruntime"), ([1.0, 2.0], "by torch")):
        monkeypatch.setattr(engine_room, "median_times", lambda calls, t=times: t)
        text = compile_for_inference(model, precision="fp32").describe()
        assert name in text and f"fp32 {times[0] / times[1]:.2f}x" in text


def test_onnxruntime_refuses_what_it_cannot(model: Veca, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, word in (({"precision": "bf16"}, "bf16"), ({"compile": True}, "compile")):
        with pytest.raises(InputError, match=word):
            compile_for_inference(model, engine="onnxruntime", **options)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match="onnxruntime"):
        compile_for_inference(model, engine="onnxruntime")
