"""OpenCLIP's image tower written out here, saved in its layout, against the loaded teacher."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from veca.teachers import TeacherError, load_teacher

pytest.importorskip("transformers")

WIDTH, LAYERS, PATCH, SIZE, EMBED = 128, 2, 16, 64, 24
MEAN, STD = [0.48, 0.45, 0.4], [0.26, 0.25, 0.27]


class Block(nn.Module):
    def __init__(self, quick):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, WIDTH // 64, batch_first=True)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH)})
        self.mlp["c_proj"] = nn.Linear(4 * WIDTH, WIDTH)
        self.quick = quick

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        y = self.mlp["c_fc"](self.ln_2(x))
        y = y * torch.sigmoid(1.702 * y) if self.quick else F.gelu(y)
        return x + self.mlp["c_proj"](y)


class Tower(nn.Module):
    def __init__(self, quick):
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.positional_embedding = nn.Parameter(torch.randn((SIZE // PATCH) ** 2 + 1, WIDTH))
        self.ln_pre = nn.LayerNorm(WIDTH)
        self.transformer = nn.ModuleDict(
            {"resblocks": nn.ModuleList(Block(quick) for _ in range(LAYERS))}
        )
        self.ln_post = nn.LayerNorm(WIDTH)
        self.proj = nn.Parameter(torch.randn(WIDTH, EMBED))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)

    def forward(self, x):
        x = self.conv1(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
        x = self.ln_pre(x + self.positional_embedding)
        for block in self.transformer["resblocks"]:
            x = block(x)
        x = self.ln_post(x)
        return x[:, 0], x[:, 1:], x[:, 0] @ self.proj


def write(folder, tower, quick, file="open_clip_model.safetensors", **vision):
    folder.mkdir(exist_ok=True)
    state = {f"visual.{k}": v.detach().clone() for k, v in tower.state_dict().items()}
    state["transformer.resblocks.0.ln_1.weight"] = torch.ones(8)  # the text tower
    state["logit_scale"] = torch.tensor(1.0)
    if file.endswith(".bin"):
        torch.save(state, folder / file)
    else:
        save_file(state, folder / file)
    settings = {"image_size": SIZE, "layers": LAYERS, "width": WIDTH, "patch_size": PATCH, **vision}
    model = {"embed_dim": EMBED, "vision_cfg": settings, "text_cfg": {"width": 8}}
    if quick:
        model["quick_gelu"] = True
    config = {"model_cfg": model, "preprocess_cfg": {"mean": MEAN, "std": STD}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("file", ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"])
def test_features_are_those_of_the_tower(tmp_path, quick, file):
    tower = Tower(quick).eval()
    folder = write(tmp_path / "clip", tower, quick, file)
    pixels = torch.rand(2, 3, SIZE, SIZE)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))
    with torch.no_grad():
        cls, patches, projected = tower((pixels - mean) / std)
    teacher = load_teacher(f"open_clip:{folder}")
    out = teacher.features(pixels, (4, 4))
    torch.testing.assert_close(out.cls, cls, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.patches, patches, atol=1e-4, rtol=1e-4)
    assert teacher.licence == "mit" and teacher.image_std == tuple(STD)
    assert load_teacher(folder).features(pixels, (2, 5)).grid == (2, 5)  # found out by itself
    joint = load_teacher(folder, feature="projected")
    assert (joint.width, joint.dense_width) == (EMBED, WIDTH)
    torch.testing.assert_close(joint.features(pixels, (4, 4)).cls, projected, atol=1e-4, rtol=1e-4)


def test_towers_that_are_something_else(tmp_path):
    tower = Tower(False)
    with pytest.raises(TeacherError, match=r"no open_clip_config\.json"):
        load_teacher(f"open_clip:{tmp_path}")
    folder = write(tmp_path / "a", tower, False, timm_model_name="convnext_base")
    with pytest.raises(TeacherError, match="plain ViT"):
        load_teacher(folder)
    folder = write(tmp_path / "b", tower, False, attentional_pool=True)
    with pytest.raises(TeacherError, match="attentional_pool"):
        load_teacher(folder)
    folder = write(tmp_path / "c", tower, False, layers=3)
    with pytest.raises(TeacherError, match=r"encoder\.layers\.2"):
        load_teacher(folder)
    folder = write(tmp_path / "d", tower, False)
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(TeacherError, match="no weights"):
        load_teacher(folder)
    save_file({"logit_scale": torch.ones(1)}, folder / "open_clip_model.safetensors")
    with pytest.raises(TeacherError, match=r"visual\.conv1\.weight"):
        load_teacher(folder)
    (folder / "open_clip_model.safetensors").write_bytes(b"short")
    with pytest.raises(TeacherError, match=r"/open_clip_model\.safetensors"):
        load_teacher(folder)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    folder = write(tmp_path / "clip", Tower(False), False)
    (folder / "open_clip_model.safetensors").unlink()
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return marker.write_text, ("run",)

    torch.save({"visual.conv1.weight": Evil()}, folder / "open_clip_pytorch_model.bin")
    with pytest.raises(TeacherError, match=r"open_clip_pytorch_model\.bin"):
        load_teacher(folder)
    assert not marker.exists()
