"""Models of the real classes with random weights, saved and loaded in the real format."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from veca.errors import MissingExtraError
from veca.teachers import TeacherError, load_teacher
from veca.teachers.huggingface import CLIP_MEAN, CLIP_STD, FAMILIES, require_transformers

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXT = {**SMALL, "hidden_size": 16, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5,) * 3, (0.5,) * 3)
CLIP = (CLIP_MEAN, CLIP_STD)


def normalise(pixels, normalisation):
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in normalisation)
    return (pixels - mean) / std


def states(prefix, **options):
    """CLS first, then `prefix` - 1 registers, then patches."""

    def raw(model, images):
        hidden = model(images, **options).last_hidden_state
        return hidden[:, 0], hidden[:, prefix:]

    return raw


def clip_raw(model, images):
    tower = getattr(model, "vision_model", model)
    output = tower(images, interpolate_pos_encoding=True)
    # The model's own pooled output is the normed CLS; the patches get the same norm.
    return output.pooler_output, tower.post_layernorm(output.last_hidden_state[:, 1:])


def siglip_raw(model, images):
    output = getattr(model, "vision_model", model)(images, interpolate_pos_encoding=True)
    return output.pooler_output, output.last_hidden_state


def naflex_raw(model, images):
    """Patches cut out one by one."""
    batch, _, height, width = images.shape
    patches = [
        images[:, :, y : y + 16, x : x + 16].permute(0, 2, 3, 1).reshape(batch, -1)
        for y in range(0, height, 16)
        for x in range(0, width, 16)
    ]
    patches = torch.stack(patches, dim=1)
    shapes = torch.tensor([[height // 16, width // 16]] * batch)
    mask = torch.ones(patches.shape[:2], dtype=torch.long)
    output = model(patches, pixel_attention_mask=mask, spatial_shapes=shapes)
    return output.pooler_output, output.last_hidden_state


def radio_raw(model, images):
    # Given plain pixels: the saved model normalises by itself.
    hidden = model(images).last_hidden_state
    return torch.cat([hidden[:, 0], hidden[:, 1]], dim=1), hidden[:, 10:]


def dinov3(**options):
    return transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**{"patch_size": 16, **SMALL, **options})
    )


CASES = {
    "dinov3": (lambda: dinov3(num_register_tokens=4), states(5), IMAGENET, 16),
    "dinov3 without registers": (dinov3, states(1), IMAGENET, 16),
    "dinov3 convnext": (
        lambda: transformers.DINOv3ConvNextModel(
            transformers.DINOv3ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])
        ),
        states(1),
        IMAGENET,
        32,
    ),
    "dinov2": (
        lambda: transformers.Dinov2Model(
            transformers.Dinov2Config(patch_size=14, image_size=56, **SMALL)
        ),
        states(1),
        IMAGENET,
        14,
    ),
    "dinov2 with registers": (
        lambda: transformers.Dinov2WithRegistersModel(
            transformers.Dinov2WithRegistersConfig(
                patch_size=14, image_size=56, num_register_tokens=4, **SMALL
            )
        ),
        states(5),
        IMAGENET,
        14,
    ),
    "vit": (
        lambda: transformers.ViTModel(
            transformers.ViTConfig(image_size=64, **SMALL), add_pooling_layer=False
        ),
        states(1, interpolate_pos_encoding=True),
        HALF,
        16,
    ),
    "clip vision": (
        lambda: transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(patch_size=16, image_size=64, **SMALL)
        ),
        clip_raw,
        CLIP,
        16,
    ),
    "clip": (
        lambda: transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config=TEXT, vision_config={"patch_size": 16, "image_size": 64, **SMALL}
            )
        ),
        clip_raw,
        CLIP,
        16,
    ),
    "siglip vision": (
        lambda: transformers.SiglipVisionModel(
            transformers.SiglipVisionConfig(patch_size=16, image_size=64, **SMALL)
        ),
        siglip_raw,
        HALF,
        16,
    ),
    "siglip": (
        lambda: transformers.SiglipModel(
            transformers.SiglipConfig(
                text_config=TEXT, vision_config={"patch_size": 16, "image_size": 64, **SMALL}
            )
        ),
        siglip_raw,
        HALF,
        16,
    ),
    "siglip 2 naflex": (
        lambda: transformers.Siglip2VisionModel(
            transformers.Siglip2VisionConfig(patch_size=16, num_patches=16, **SMALL)
        ),
        naflex_raw,
        HALF,
        16,
    ),
    "radio": (
        lambda: transformers.RadioModel(
            transformers.RadioConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_img_size=128
            )
        ),
        radio_raw,
        CLIP,
        16,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_raw_model(case, save):
    build, raw, normalisation, stride = CASES[case]
    if case == "radio" and not hasattr(transformers, "RadioModel"):
        pytest.skip("this transformers has no RadioModel")
    model = build()
    teacher = load_teacher(save(model))
    grid = (3, 2)
    size = (3 * stride, 2 * stride)
    assert teacher.stride == stride and teacher.input_size(grid) == size
    pixels = torch.rand(2, 3, *size)
    with torch.no_grad():
        images = pixels if case == "radio" else normalise(pixels, normalisation)
        cls, patches = raw(model, images)
    out = teacher.features(pixels, grid)
    assert out.grid == grid and patches.shape[1] == 6
    torch.testing.assert_close(out.cls, cls, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.patches, patches, atol=1e-5, rtol=1e-4)
    assert (teacher.width, teacher.dense_width) == (cls.shape[1], patches.shape[2])
    assert teacher.image_mean == pytest.approx(normalisation[0])
    assert teacher.image_std == pytest.approx(normalisation[1])
    assert torch.equal(teacher.features(pixels, grid).patches, out.patches)
    rough = teacher.bfloat16().features(pixels, grid)
    for exact, other in ((out.cls, rough.cls), (out.patches, rough.patches)):
        assert other.dtype == torch.float32
        assert F.cosine_similarity(exact, other, dim=-1).min() > 0.98
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


@pytest.mark.parametrize("case", [c for c in CASES if "convnext" not in c])
def test_patch_convolution(case, save):
    """On its weights alone, the tokens that enter the model's first block are found again."""
    if case == "radio" and not hasattr(transformers, "RadioModel"):
        pytest.skip("this transformers has no RadioModel")
    build, _, _, stride = CASES[case]
    model = build()
    teacher = load_teacher(save(model))
    weight, bias = teacher.patch_embedding()
    assert weight.shape == (32, 3, stride, stride) and bias.shape == (32,)
    pixels = torch.rand(1, 3, 2 * stride, stride)
    seen = []
    names = ("patch_projection", "patch_embedding", "projection", "patch_embeddings")
    name = next(
        n
        for n, m in teacher.model.named_modules()
        if n.split(".")[-1] in names and not list(m.children())
    )
    module = teacher.model.get_submodule(name)
    module.register_forward_hook(lambda _, __, output: seen.append(output))
    teacher.features(pixels, (2, 1))
    tokens = seen[0] if seen[0].ndim == 3 else seen[0].flatten(2).transpose(1, 2)
    images = normalise(pixels, (teacher.image_mean, teacher.image_std))
    expected = F.conv2d(images, weight, bias, stride=stride).flatten(2).transpose(1, 2)
    torch.testing.assert_close(tokens, expected, atol=1e-5, rtol=1e-4)


def test_global_feature_choices(save):
    clip = CASES["clip"][0]()
    folder = save(clip)
    pixels = torch.rand(2, 3, 48, 32)
    default = load_teacher(folder).features(pixels, (3, 2))
    mean = load_teacher(folder, feature="mean").features(pixels, (3, 2))
    torch.testing.assert_close(mean.cls, default.patches.mean(dim=1))
    projected = load_teacher(folder, feature="projected")
    assert (projected.width, projected.dense_width) == (clip.config.projection_dim, 32)
    out = projected.features(pixels, (3, 2))
    with torch.no_grad():
        expected = clip.visual_projection(default.cls)
    torch.testing.assert_close(out.cls, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.patches, default.patches, atol=1e-6, rtol=1e-5)
    assert projected.describe()["feature"] == "projected"


def test_feature_choices_that_do_not_exist(dinov3):
    _, folder = dinov3
    with pytest.raises(TeacherError, match="feature='projected'"):
        load_teacher(folder, feature="projected")
    with pytest.raises(TeacherError, match="'pooled'"):
        load_teacher(folder, feature="pooled")


def test_clip_files_with_the_names_that_the_hub_has(save):
    """Files there hold the towers of a whole CLIP, as `vision_model.` and `text_model.`."""
    model = CASES["clip"][0]()
    names = set(load_file(save(model) / "model.safetensors"))
    assert "vision_model.pre_layrnorm.weight" in names and "visual_projection.weight" in names


def test_siglip_without_its_head_gives_the_mean(save):
    config = transformers.SiglipVisionConfig(patch_size=16, image_size=64, **SMALL)
    config.vision_use_head = False
    out = load_teacher(save(transformers.SiglipVisionModel(config))).features(
        torch.rand(1, 3, 64, 64), (4, 4)
    )
    torch.testing.assert_close(out.cls, out.patches.mean(dim=1))


def test_normalisation_and_licence_come_from_the_folder(dinov3):
    _, folder = dinov3
    assert load_teacher(folder).licence == "unknown"
    card = (
        "---\nlicense: other\nlicense_name: dinov3-license\ntags:\n- x\n---\n# Card\nlicense: no\n"
    )
    (folder / "README.md").write_text(card)
    mean, std = [0.43, 0.411, 0.296], [0.213, 0.156, 0.143]
    processor = {"image_mean": mean, "image_std": std, "do_normalize": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    teacher = load_teacher(folder)
    assert teacher.image_mean == tuple(mean) and teacher.image_std == tuple(std)
    assert teacher.licence == "dinov3-license"
    (folder / "preprocessor_config.json").unlink()
    nested = {"image_processor": processor}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert load_teacher(folder).image_mean == tuple(mean)
    processor["do_normalize"] = False
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert load_teacher(folder).image_std == (1.0, 1.0, 1.0)


def test_specs_for_a_folder_and_what_it_describes(dinov3, monkeypatch):
    import hashlib

    _, folder = dinov3
    described = load_teacher(f"transformers:{folder}").describe()
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert described["weights_sha256"] == digest
    assert described["architecture"] == "DINOv3ViTModel" and described["feature"] == "cls"
    assert described["source"] == f"transformers:{folder}"
    json.dumps(described)
    monkeypatch.chdir(folder.parent)
    assert load_teacher("./model").width == load_teacher("model").width == 32


def test_bfloat16_keeps_the_rotation_exact(dinov3):
    _, folder = dinov3
    pixels = torch.rand(1, 3, 64, 64)
    exact = load_teacher(folder)
    rough = load_teacher(folder, dtype=torch.bfloat16)
    assert rough.model.rope_embeddings.inv_freq.dtype == torch.float32
    assert rough.model.norm.weight.dtype == rough.dtype == torch.bfloat16
    cosine = F.cosine_similarity(
        rough.features(pixels, (4, 4)).patches, exact.features(pixels, (4, 4)).patches, dim=-1
    )
    assert cosine.min() > 0.99
    mixed = load_teacher(folder, dtype=torch.bfloat16, autocast=True)
    assert mixed.weight_dtype == torch.float32 and mixed.dtype == torch.bfloat16
    with pytest.raises(TeacherError, match="dtype"):
        load_teacher(folder, autocast=True)


def test_one_compilation_serves_all_blocks(save):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    teacher = load_teacher(save(dinov3(num_hidden_layers=10)))
    pixels = torch.rand(1, 3, 48, 48)
    before = teacher.features(pixels, (3, 3))
    teacher.compile(backend=backend)
    for size in (3, 4, 3):
        after = teacher.features(pixels, (size, size))
    assert torch.equal(after.patches, before.patches)
    assert len(graphs) == 2  # one a size: ten each would pass torch's limit of 8


# ------------------------------------------------------------------------------------- refusals


def test_missing_weights_are_never_drawn_at_random(dinov3):
    _, folder = dinov3
    path = folder / "model.safetensors"
    state = load_file(path)
    dropped = next(name for name in state if "layer.1" in name)
    del state[dropped]
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(TeacherError, match=r"layer\.1"):
        load_teacher(folder)


def test_weights_of_another_shape(dinov3):
    _, folder = dinov3
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(TeacherError, match="DINOv3ViTModel"):
        load_teacher(folder)


def test_no_weights_beside_the_config(dinov3):
    _, folder = dinov3
    (folder / "model.safetensors").unlink()
    with pytest.raises(TeacherError, match=r"no weights.*model\.safetensors"):
        load_teacher(folder)


def test_damaged_files(dinov3):
    _, folder = dinov3
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TeacherError, match="DINOv3ViTModel"):
        load_teacher(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(TeacherError, match=r"config\.json .*line 1"):
        load_teacher(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(TeacherError, match=r"config\.json.*list"):
        load_teacher(folder)


def test_unsupported_type_and_empty_folder(tmp_path):
    with pytest.raises(TeacherError, match=r"no config\.json"):
        load_teacher(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(TeacherError, match="'bert'"):
        load_teacher(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TeacherError, match="type None"):
        load_teacher(tmp_path)


CODE = """
import pathlib
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

pathlib.Path(MARKER).write_text("run")


class Conditioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("norm_mean", torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1))
        self.register_buffer("norm_std", torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1))

    def forward(self, x):
        return (x - self.norm_mean) / self.norm_std


class RADIOConfig(PretrainedConfig):
    def __init__(self, patch_size=16, **kwargs):
        self.patch_size = patch_size
        super().__init__(**kwargs)


class RADIOModel(PreTrainedModel):
    config_class = RADIOConfig

    def __init__(self, config):
        super().__init__(config)
        self.conditioner = Conditioner()
        self.patches = nn.Conv2d(3, 8, 16, stride=16)
        self.post_init()

    def make_preprocessor_external(self):
        taken, self.conditioner = self.conditioner, nn.Identity()
        return taken

    def forward(self, x):
        features = self.patches(self.conditioner(x)).flatten(2).transpose(1, 2)
        return torch.cat([features.mean(1), features.amax(1), features.amin(1)], 1), features
"""


def test_code_of_a_repository_runs_only_when_allowed(tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder, marker = tmp_path / "radio", tmp_path / "marker"
    folder.mkdir()
    (folder / "hf_model.py").write_text(CODE.replace("MARKER", repr(str(marker))))
    kinds = {"AutoConfig": "hf_model.RADIOConfig", "AutoModel": "hf_model.RADIOModel"}
    (folder / "config.json").write_text(json.dumps({"auto_map": kinds, "patch_size": 16}))
    weight, bias = torch.randn(8, 3, 16, 16), torch.randn(8)
    state = {"patches.weight": weight, "patches.bias": bias}
    state["conditioner.norm_mean"] = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    state["conditioner.norm_std"] = torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(TeacherError, match="allow_remote_code"):
        load_teacher(folder)
    assert not marker.exists()

    teacher = load_teacher(folder, allow_remote_code=True)
    assert marker.exists() and (teacher.width, teacher.dense_width, teacher.stride) == (24, 8, 16)
    assert teacher.image_mean == pytest.approx((0.1, 0.2, 0.3))
    pixels = torch.rand(2, 3, 32, 48)
    out = teacher.features(pixels, (2, 3))
    images = normalise(pixels, ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)))
    patches = F.conv2d(images, weight, bias, stride=16).flatten(2).transpose(1, 2)
    torch.testing.assert_close(out.patches, patches, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.cls[:, 8:16], patches.amax(1), atol=1e-4, rtol=1e-4)
    equal = load_teacher(folder, allow_remote_code=True, feature="mean")
    assert equal.width == equal.dense_width == 8


def test_without_transformers(monkeypatch, dinov3):
    _, folder = dinov3
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"\[hf\]"):
        load_teacher(folder)


@pytest.mark.slow
def test_a_broken_torchvision_does_not_matter(tmp_path):
    """It is there, so transformers would import it, and that fails."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    info = tmp_path / "torchvision-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99.0\n")
    script = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from veca.teachers.huggingface import find_class
        print(find_class("DINOv3ViTModel").__name__)
        """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300
    )
    assert run.stdout.split() == ["DINOv3ViTModel"], run.stderr


def test_every_family_is_in_this_transformers():
    package = require_transformers()
    missing = {
        family.architecture
        for family in FAMILIES.values()
        if not hasattr(package, family.architecture)
    }
    assert missing <= {"RadioModel"}  # younger than transformers 5


@pytest.mark.parametrize(
    "mean", [3, [1, 2], ["a", "b", "c"], [1, 2, 10**400], [[1, 2, 3]], {"r": 1}, [True, 1, 1]]
)
def test_odd_normalisation_is_refused(mean, tmp_path):
    dinov3().save_pretrained(tmp_path)
    fields = {"image_mean": mean, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(TeacherError, match=r"preprocessor_config\.json: image_mean"):
        load_teacher(tmp_path)
