"""The convolution kernels against plain definitions; in Triton's interpreter without a GPU."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from torch.nn import functional as F

from interpreter import import_interpreted

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")

if not GPU:
    import_interpreted("veca.teachers.convolution_kernels")

from veca.teachers import convolutions  # noqa: E402
from veca.teachers.efficientnet import (  # noqa: E402
    CENTRED,
    MEAN,
    SAME,
    STD,
    EfficientNetLite,
)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE)


@torch.no_grad()
def random_network(phases: tuple[int, ...]) -> EfficientNetLite:
    """Weights that keep the signal's size from layer to layer."""
    torch.manual_seed(0)
    network = EfficientNetLite("efficientnet-lite0", phases)
    for parameter in network.parameters():
        matrix = parameter.ndim > 1
        parameter.normal_(0, (2 / parameter[0].numel()) ** 0.5 if matrix else 0.3)
    return network


def depthwise_reference(x, weight, bias, stride, pad):
    """The plain definition of `depthwise`, in the dtype of `x`."""
    channels, kernel = len(bias), weight.shape[0]
    image = F.relu6(x.permute(0, 3, 1, 2))
    height, width = (-(-size // stride) for size in image.shape[-2:])
    low = (width - 1) * stride + kernel - pad - image.shape[-1]
    low_y = (height - 1) * stride + kernel - pad - image.shape[-2]
    image = F.pad(image, (pad, low, pad, low_y))
    kernels = weight.permute(2, 0, 1).unsqueeze(1)
    return F.relu6(F.conv2d(image, kernels, bias, stride, groups=channels)).permute(0, 2, 3, 1)


def stem_reference(pixels, weight, bias, pad, mean, std):
    """The plain definition of `stem`, in the dtype of `pixels`."""
    normal = F.pad((pixels - mean) / std, (pad, 2 - pad, pad, 2 - pad))
    height, width = (-(-size // 2) for size in pixels.shape[-2:])
    return F.conv2d(normal, weight, bias, 2)[..., :height, :width].permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "pad"),
    [
        ((2, 7, 9, 40), 3, 1, 1),
        ((3, 5, 5, 16), 5, 1, 2),
        ((1, 33, 2, 72), 5, 1, 2),
        ((2, 8, 6, 33), 3, 2, 1),
        ((2, 8, 12, 40), 5, 2, 1),
        ((2, 7, 9, 24), 5, 2, 2),
        ((1, 6, 6, 16), 3, 2, 0),
    ],
)
def test_depthwise(shape, kernel, stride, pad):
    torch.manual_seed(0)
    x, weight, bias = random(*shape, scale=4), random(kernel, kernel, shape[3]), random(shape[3])
    found = convolutions.depthwise(x, weight, bias, stride, pad)
    wanted = depthwise_reference(x.double(), weight.double(), bias.double(), stride, pad)
    assert 0 < wanted.mean() < 6
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_depthwise_sums_in_float32(dtype):
    torch.manual_seed(0)
    x, weight, bias = (
        t.to(dtype) for t in (random(2, 9, 9, 32, scale=4), random(5, 5, 32), random(32))
    )
    found = convolutions.depthwise(x, weight, bias, 1, 2)
    wanted = depthwise_reference(x.double(), weight.double(), bias.double(), 1, 2)
    # One rounding of a result of at most 6; the interpreter chops instead.
    step = torch.finfo(dtype).eps * 4
    assert (found.double() - wanted).abs().max() <= step


def test_depthwise_reads_nothing_beyond_its_input():
    """Neighbours in memory are NaN: a wrong mask would show."""
    torch.manual_seed(0)
    store = torch.full((4, 6, 6, 24), torch.nan, device=DEVICE)
    store[1:3] = random(2, 6, 6, 24)
    weight, bias = random(5, 5, 24), random(24)
    found = convolutions.depthwise(store[1:3], weight, bias, 2, 1)
    assert found.isfinite().all()


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("size", [(8, 12), (7, 9)])
def test_stem(size, pad):
    torch.manual_seed(0)
    pixels = torch.rand(3, 3, *size).to(DEVICE)
    weight, bias = random(32, 3, 3, 3), random(32)
    found = convolutions.stem(pixels, weight, bias, pad, 0.4, 0.5)
    double = pixels.double(), weight.double(), bias.double()
    wanted = stem_reference(*double, pad, 0.4, 0.5)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("phases", [CENTRED, SAME])
def test_the_fused_network_is_the_network(phases, monkeypatch):
    # cuDNN rounds float32 to TF32 unless told not to.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    network = random_network(phases).to(DEVICE)
    with torch.no_grad():
        if not GPU:  # the interpreter would take minutes over the whole network
            monkeypatch.setattr(convolutions, "depthwise", depthwise_reference)
            monkeypatch.setattr(convolutions, "stem", stem_reference)
        pixels = torch.rand(2, 3, 64, 96, device=DEVICE)
        wanted = network((pixels - MEAN) / STD)
        found = network.fused(pixels)
    assert found.shape == wanted.shape
    assert wanted.std() > 1e-3
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
def test_a_teacher_on_a_gpu_is_fused_and_says_the_same():
    from veca.teachers.efficientnet import EfficientNetTeacher

    teacher = EfficientNetTeacher(random_network(CENTRED), name="random").to(DEVICE)
    pixels = torch.rand(4, 3, 128, 128, device=DEVICE)
    wanted = teacher.features(pixels, (4, 4))
    assert not teacher.fused
    teacher.bfloat16()
    assert teacher.fused
    teacher.compile()
    found = teacher.features(pixels, (4, 4))
    cosine = torch.nn.functional.cosine_similarity(found.patches, wanted.patches, dim=-1)
    assert cosine.min() > 0.99
