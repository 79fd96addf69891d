"""timm cannot be had everywhere, so a stand-in with its interface is tested; the real one too."""

import sys
import types

import pytest
import torch
from torch import nn

from veca.errors import MissingExtraError
from veca.teachers import TeacherError, load_teacher

CFG = {
    "mean": (0.5, 0.4, 0.3),
    "std": (0.2, 0.3, 0.4),
    "input_size": (3, 64, 64),
    "license": "cc-by-4.0",
}


class PatchEmbed(nn.Module):
    def __init__(self, strict):
        super().__init__()
        self.proj = nn.Conv2d(3, 12, 16, stride=16)
        self.patch_size, self.img_size, self.strict_img_size = (16, 16), (64, 64), strict


class Vit(nn.Module):
    """CLS and two registers before the patches, as timm keeps them."""

    num_features = embed_dim = 12

    def __init__(self, global_pool="avg", dynamic_img_size=False, class_token=True):
        super().__init__()
        assert class_token or global_pool != "token"
        self.patch_embed = PatchEmbed(not dynamic_img_size)
        self.dynamic_img_size = dynamic_img_size
        self.num_reg_tokens = 2
        self.num_prefix_tokens = 2 + class_token
        self.prefix = nn.Parameter(torch.randn(self.num_prefix_tokens, 12))
        self.blocks = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        # With average pooling the norm moves behind the pooling, as in timm.
        self.norm = nn.LayerNorm(12) if global_pool == "token" else nn.Identity()
        self.global_pool = global_pool
        self.pretrained_cfg = CFG

    def forward_features(self, x):
        assert self.dynamic_img_size or x.shape[-2:] == (64, 64)
        x = self.patch_embed.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.prefix.expand(len(x), -1, -1), x], dim=1)
        return self.norm(self.blocks(x))

    def forward_head(self, x, pre_logits=False):
        assert pre_logits
        return x[:, self.num_prefix_tokens :].mean(dim=1)


class Cnn(nn.Module):
    num_features = 6

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 8, stride=8)
        self.feature_info = [{"reduction": 4}, {"reduction": 8}]
        self.pretrained_cfg = CFG

    def forward_features(self, x):
        return self.conv(x)

    def forward_head(self, x, pre_logits=False):
        return x.mean(dim=(2, 3))


class Swin(Vit):
    """Channels last, one size only."""

    def __init__(self):
        super().__init__(class_token=False)
        self.num_prefix_tokens = self.num_reg_tokens = 0
        self.output_fmt = "NHWC"

    def forward_features(self, x):
        return self.patch_embed.proj(x).permute(0, 2, 3, 1)

    def forward_head(self, x, pre_logits=False):
        return x.mean(dim=(1, 2))


@pytest.fixture
def timm(monkeypatch):
    made = []

    def create_model(name, pretrained=False, num_classes=1000, **options):
        assert pretrained and num_classes == 0
        if name == "offline":
            raise OSError("no route to host")
        kinds = {"vit": Vit, "cnn": Cnn, "swin": Swin, "nocls": Vit, "fixed": Vit}
        if name not in kinds:
            raise RuntimeError(f"Unknown model ({name})")
        if name == "nocls":
            options["class_token"] = False
        if name == "fixed" and "dynamic_img_size" in options:
            raise TypeError("unexpected keyword dynamic_img_size")
        made.append(kinds[name](**options))
        return made[-1]

    module = types.ModuleType("timm")
    module.create_model = create_model
    module.made = made
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


def images(pixels):
    mean, std = (torch.tensor(CFG[k]).view(3, 1, 1) for k in ("mean", "std"))
    return (pixels - mean) / std


def test_a_vit_gives_its_normed_tokens(timm):
    teacher = load_teacher("timm:vit")
    pixels = torch.rand(2, 3, 32, 48)
    model = timm.made[-1]
    assert model.global_pool == "token"  # else the last norm would be left out
    with torch.no_grad():
        tokens = model.forward_features(images(pixels))
    out = teacher.features(pixels, (2, 3))
    torch.testing.assert_close(out.cls, tokens[:, 0])
    torch.testing.assert_close(out.patches, tokens[:, 3:])
    assert (teacher.width, teacher.stride, teacher.licence) == (12, 16, "cc-by-4.0")
    assert teacher.name == "timm:vit" and len(teacher.describe()["weights_sha256"]) == 64
    weight, bias = teacher.patch_embedding()
    assert torch.equal(weight, model.patch_embed.proj.weight) and bias.shape == (12,)
    teacher.compile(backend="eager")
    torch.testing.assert_close(teacher.features(pixels, (2, 3)).cls, out.cls)


def test_a_vit_without_cls_uses_its_own_pooling(timm):
    teacher = load_teacher("timm:nocls")
    pixels = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        tokens = timm.made[-1].forward_features(images(pixels))
    out = teacher.features(pixels, (2, 2))
    torch.testing.assert_close(out.patches, tokens[:, 2:])
    torch.testing.assert_close(out.cls, tokens[:, 2:].mean(dim=1))


def test_a_cnn_and_a_channels_last_model(timm):
    pixels = torch.rand(1, 3, 64, 64)
    teacher = load_teacher("timm:cnn")
    assert teacher.stride == 8 and teacher.patch_embedding() is None
    out = teacher.features(pixels, (8, 8))
    with torch.no_grad():
        torch.testing.assert_close(out.feature_map(), timm.made[-1].conv(images(pixels)))
    swin = load_teacher("timm:swin")
    out = swin.features(pixels, (4, 4))
    with torch.no_grad():
        expected = timm.made[-1].patch_embed.proj(images(pixels))
    torch.testing.assert_close(out.feature_map(), expected)
    torch.testing.assert_close(out.cls, expected.mean(dim=(2, 3)))


def test_a_model_of_one_size_is_refused_elsewhere(timm):
    for name in ("fixed", "swin"):
        teacher = load_teacher(f"timm:{name}")
        assert teacher.sizes == ((64, 64),) and teacher.features(torch.rand(1, 3, 64, 64), (2, 2))
        with pytest.raises(TeacherError, match="4 x 4, 2 x 2, 1 x 1"):
            teacher.input_size((3, 3))


def test_errors(timm, monkeypatch):
    with pytest.raises(TeacherError, match="'vitt'"):
        load_teacher("timm:vitt")
    with pytest.raises(TeacherError, match=r"'offline'.*no route to host"):
        load_teacher("timm:offline")
    with pytest.raises(TeacherError, match="'timm:'"):
        load_teacher("timm:")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match="pip install timm"):
        load_teacher("timm:vit")


def test_a_timm_that_cannot_be_imported(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(MissingExtraError, match=r"nms .*torchvision"):
        load_teacher("timm:vit")


def test_with_the_real_timm():
    try:
        import timm
    except Exception as error:
        pytest.skip(f"timm cannot be imported here ({type(error).__name__}: {error})")
    from veca.teachers.timm_models import load_timm

    pixels = torch.rand(1, 3, 64, 48)
    teacher = load_timm("vit_tiny_patch16_224", pretrained=False)
    out = teacher.features(pixels, (4, 3))
    with torch.no_grad():
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in (teacher.image_mean, teacher.image_std))
        tokens = teacher.model.forward_features((pixels - mean) / std)
    torch.testing.assert_close(out.cls, tokens[:, 0])
    torch.testing.assert_close(out.patches, tokens[:, 1:])
    assert isinstance(teacher.model.norm, nn.LayerNorm)
    dinov3 = "vit_small_patch16_dinov3"
    if dinov3 in timm.list_models("*dinov3*"):
        teacher = load_timm(dinov3, pretrained=False)
        assert teacher.features(pixels, (4, 3)).patches.shape == (1, 12, teacher.width)
    for name in ("resnet18", "vit_base_patch16_siglip_224"):
        teacher = load_timm(name, pretrained=False)
        assert teacher.features(pixels, (2, 2)).grid == (2, 2)
