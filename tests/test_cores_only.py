"""Where only cores are wanted, the last block runs for them alone: the same numbers, less work."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import veca
from veca.attention import core_attention
from veca.embed.pipeline import ModelRunner
from veca.engine import compile_for_inference
from veca.errors import InputError, OutputKeyError
from veca.model import Veca
from veca.outputs import CoresOutput
from veca.probe.backbone import ElasticBackbone
from veca.rope import Rotation

CONFIG = veca.VecaConfig(depth=3, width=32, heads=2, num_cores=8, output_width=48)
IMAGES = torch.randn(3, 3, 64, 96, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Veca:
    torch.manual_seed(0)
    return veca.create_model(CONFIG).eval()


@pytest.mark.parametrize("backend", ["reference", "sdpa", "auto"])
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_cores_are_those_of_the_whole(backend: str, rows: int, padded: bool) -> None:
    torch.manual_seed(rows)
    q, k, v = (torch.randn(2, 2, 12, 8, requires_grad=True) for _ in range(3))
    tables = {
        "core_rotation": Rotation(torch.randn(2, 5, 4), torch.randn(2, 5, 4)),
        "patch_rotation": Rotation(torch.randn(1, 7, 4), torch.randn(1, 7, 4)),
    }
    counts = torch.tensor([4.0, 1, 0, 2, 1, 1, 16]) if padded else None
    common = {**tables, "multiplicity": counts}
    whole = core_attention(q, k, v, 5, **common, backend="reference")[:, :, :rows]
    found = core_attention(q[:, :, :rows], k, v, 5, **common, backend=backend)
    torch.testing.assert_close(found, whole)
    weights = torch.randn_like(whole)
    wanted = torch.autograd.grad((whole * weights).sum(), (q, k, v))
    got = torch.autograd.grad((found * weights).sum(), (q, k, v))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_q_of_some_patches_is_refused() -> None:
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 12, 8)
    with pytest.raises(InputError, match="shape"):
        core_attention(q, k, k, 5)


@pytest.mark.parametrize("keep", [None, 0.5])
@pytest.mark.parametrize("cores", [1, 5, None])
def test_cores_are_those_of_forward(model, cores, keep) -> None:
    with torch.no_grad():
        whole = model(IMAGES, cores, keep)
        raw = model.tokens(IMAGES, cores, keep)
        alone = model.cores_only(IMAGES, cores, keep)
        first = model.cores_only(IMAGES, cores, keep, first=1)
        native = model.cores_only(IMAGES, cores, keep, first=1, projection=False)
        fast = compile_for_inference(model).cores_only(IMAGES, cores, keep, first=1)
    near = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(alone.cores, whole.cores, **near)
    torch.testing.assert_close(alone.core_xy, whole.core_xy, **near)
    torch.testing.assert_close(first.cls, whole.cls, **near)
    torch.testing.assert_close(first.core_xy, whole.core_xy[:, :1], **near)
    torch.testing.assert_close(native.cls, raw.cls, **near)
    torch.testing.assert_close(fast.cls, whole.cls, **near)
    assert alone.grid == fast.grid == whole.grid and first.cores.shape == (3, 1, 48)


def test_gradients_are_those_of_forward(model) -> None:
    wanted = torch.autograd.grad(model(IMAGES).cls.square().sum(), list(model.parameters()))
    found = torch.autograd.grad(
        model.cores_only(IMAGES, first=1).cls.square().sum(), list(model.parameters())
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_patches_cost_keys_and_values_only(model) -> None:
    def flops(call) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    saved = flops(lambda: model(IMAGES)) - flops(lambda: model.cores_only(IMAGES, first=1))
    c, tokens = CONFIG, 8 + 24 - 1
    linear = 2 * c.width**2 + 3 * c.width * c.hidden_width + c.width * c.output_width
    assert saved >= 2 * 3 * tokens * linear  # q, out, feed-forward and projection of the others


def test_what_comes_out(model) -> None:
    out = model.cores_only(IMAGES[:1])
    assert isinstance(out, CoresOutput) and set(dict(out)) == {"cls", "cores", "core_xy", "grid"}
    assert torch.equal(out["cls"], out.cls) and "cores" in out and "grid 4 x 6" in repr(out)
    with pytest.raises(OutputKeyError, match="patches"):
        out["patches"]
    for bad in (0, 9, 1.5, True):
        with pytest.raises(InputError, match="first"):
            model.cores_only(IMAGES, first=bad)


@pytest.mark.parametrize("width", ["projected", "native"])
def test_features_of_cls_alone_run_no_patches(model, monkeypatch, width: str) -> None:
    both = ModelRunner(model, cores=8, what=("cls", "patches"), dtype="float32", width=width)
    wanted = both(IMAGES).features["cls"]
    monkeypatch.setattr(Veca, "forward", None)
    monkeypatch.setattr(Veca, "tokens", None)
    alone = ModelRunner(model, cores=8, what=["cls"], dtype="float32", width=width)(IMAGES)
    assert list(alone.features) == ["cls"] and alone.grid == (4, 6)
    torch.testing.assert_close(
        torch.from_numpy(alone.features["cls"]), torch.from_numpy(wanted), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("projection", [True, False])
def test_probes_of_cls_alone_run_no_patches(model, monkeypatch, projection: bool) -> None:
    backbone = ElasticBackbone(model, 8, projection=projection)
    pixels = torch.rand(2, 3, 64, 96)
    wanted = backbone.features(pixels, (4, 6)).cls
    monkeypatch.setattr(Veca, "forward", None)
    monkeypatch.setattr(Veca, "tokens", None)
    torch.testing.assert_close(backbone.cls(pixels, (4, 6)), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("keep", [None, 0.5])
def test_the_engine_records_the_cores_alone(keep) -> None:
    torch.manual_seed(0)
    model = veca.create_model(CONFIG.replace(width=64)).eval().cuda()
    engine = compile_for_inference(model, dtype=torch.float32, check_pixels=True)
    for images in (IMAGES.cuda(), IMAGES.flip(0).cuda()):  # recorded, then replayed
        with torch.no_grad():
            whole = model(images, 5, keep)
        for first in (1, None):
            found = engine.cores_only(images, 5, keep, first=first)
            wanted = whole.cores[:, : found.cores.shape[1]]
            torch.testing.assert_close(found.cores, wanted, atol=2e-3, rtol=2e-3)
