"""timm's interface: the module needs only torch; the registry is tested where timm imports."""

from __future__ import annotations

import sys

import pytest
import torch

import veca
from conftest import SMALLEST, stirred
from veca.checks import check_blocks
from veca.errors import InputError, MissingExtraError, WeightsError
from veca.integrations import timm as ours
from veca.integrations.timm import TimmVeca

try:
    import timm
    import timm.models._hub as hub

    WHY_NOT = ""
except Exception as error:  # a torchvision of another torch fails in more ways than ImportError
    timm = None
    WHY_NOT = f"timm does not import here: {type(error).__name__}: {error}"

needs_timm = pytest.mark.skipif(timm is None, reason=WHY_NOT)
needs_folders = pytest.mark.skipif(
    timm is None or not hasattr(hub, "load_model_config_from_path") or not hub.has_hf_hub(),
    reason=WHY_NOT or "this timm opens no folders, or does not know this huggingface_hub",
)
CONFIG = SMALLEST.replace(output_width=20)


@pytest.fixture
def model() -> TimmVeca:
    return stirred(TimmVeca(CONFIG, num_classes=7)).eval().requires_grad_(False)


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 48)


# --------------------------------------------------------------------------------------- the module


@pytest.mark.parametrize("cores", [None, 3])
def test_features_are_the_plain_models(model, images, cores):
    wanted = model.veca(images, cores=cores)
    tokens = model.forward_features(images, cores)
    assert torch.equal(tokens, torch.cat([wanted.cores, wanted.patches], dim=1))
    assert torch.equal(model.forward_head(tokens, pre_logits=True), wanted.cls)
    logits = wanted.cls @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(images, cores), logits)
    assert (model.num_features, model.embed_dim, model.head_hidden_size) == (20, 20, 20)


def test_the_budget_is_a_setting_too(model, images):
    model.cores = 3
    assert model.num_prefix_tokens == 3
    assert torch.equal(model(images), model(images, cores=3))
    assert not torch.equal(model(images), model(images, cores=8))
    with pytest.raises(InputError, match="cores"):
        model(images, cores=9)
    with pytest.raises(InputError, match="cores"):
        TimmVeca(CONFIG, cores=9)


def test_the_share_of_tokens_is_a_setting_too(model):
    images = torch.randn(2, 3, 80, 112)  # 5 x 7 patches
    wanted = model.veca(images, cores=3, keep=0.4)
    tokens = model.forward_features(images, 3, 0.4)
    assert torch.equal(tokens, torch.cat([wanted.cores, wanted.patches], dim=1))
    full = model(images)
    model.keep = 0.4
    assert torch.equal(model.forward_features(images, 3), tokens)
    assert torch.equal(model(images, 3), model(images, cores=3, keep=0.4))
    assert torch.equal(model(images, keep=1), full) and not torch.equal(model(images), full)
    layers = model.veca.forward_intermediates(images, cores=3, norm=False, keep=0.4)
    final, maps = model.forward_intermediates(images, cores=3)
    assert torch.equal(final, tokens)
    assert all(torch.equal(a, b.feature_map()) for a, b in zip(maps, layers, strict=True))
    for wrong in (0, 1.5, "half", float("nan")):
        with pytest.raises(InputError, match="keep"):
            model(images, keep=wrong)
        with pytest.raises(InputError, match="keep"):
            TimmVeca(CONFIG, keep=wrong)


def test_pooling_and_a_new_classifier(model, images):
    patches = model.veca(images, cores=3).patches
    for pool, wanted in {"avg": patches.mean(dim=1), "max": patches.amax(dim=1)}.items():
        model.reset_classifier(5, pool)
        tokens = model.forward_features(images, 3)
        torch.testing.assert_close(model.forward_head(tokens, pre_logits=True, cores=3), wanted)
        assert model(images, 3).shape == (2, 5)
        assert model.get_classifier().out_features == model.num_classes == 5
    model.reset_classifier(0, "token")
    assert torch.equal(model(images), model.veca(images).cls)
    model.reset_classifier(0, "")
    assert model(images, 3).shape == (2, 3 + 6, 20)
    with pytest.raises(InputError, match="'map'"):
        model.reset_classifier(5, "map")
    half = TimmVeca(CONFIG).to(torch.bfloat16)
    half.reset_classifier(2)
    assert half.head.weight.dtype == torch.bfloat16


def test_the_head_takes_the_budget_of_the_tokens(model, images):
    """Not that of the model: other tokens would count as patches, or patches as cores."""
    model.reset_classifier(0, "avg")
    model.cores = 6
    wanted = model.veca(images, cores=3).patches.mean(dim=1)
    tokens = model.forward_features(images, cores=3)
    torch.testing.assert_close(model.forward_head(tokens), wanted)
    torch.testing.assert_close(model.forward_head(tokens.clone(), cores=3), wanted)
    torch.testing.assert_close(model.forward_head(model.forward_features(images)), model(images))
    with pytest.raises(InputError, match="cores=4"):
        model.forward_head(tokens, cores=4)
    model.cores = None
    torch.testing.assert_close(model.forward_head(tokens), wanted)
    with pytest.raises(InputError, match="8 tokens"):
        model.forward_head(tokens[:, :8].clone())


@pytest.mark.slow
def test_compiling_takes_a_budget(model, images):
    model.reset_classifier(0, "avg")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images, 3), model(images, 3))


def test_intermediates(model, images):
    layers = model.veca.forward_intermediates(images, cores=3, norm=False)
    final, maps = model.forward_intermediates(images, cores=3)
    assert torch.equal(final, model.forward_features(images, 3))
    assert all(torch.equal(a, b.feature_map()) for a, b in zip(maps, layers, strict=True))

    normed = model.veca.forward_intermediates(images, cores=3, layers=(1, 3))
    tokens = model.forward_intermediates(
        images,
        indices=[0, -1],
        cores=3,
        norm=True,
        output_fmt="NLC",
        return_prefix_tokens=True,
        intermediates_only=True,
    )
    for (patches, prefix), wanted in zip(tokens, normed, strict=True):
        assert torch.equal(patches, wanted.patches)
        assert torch.equal(prefix, wanted.cores)

    found = model.forward_intermediates(
        images, indices=1, output_dict=True, return_prefix_tokens=True
    )
    assert sorted(found) == ["image_features", "image_intermediates", "image_intermediates_prefix"]
    with pytest.raises(InputError, match="NHWC"):
        model.forward_intermediates(images, output_fmt="NHWC")


def test_stopping_early(model, images):
    ran = []
    for number, block in enumerate(model.veca.blocks):
        block.register_forward_hook(lambda *_, n=number: ran.append(n))
    model.forward_intermediates(images, indices=[0], stop_early=True, intermediates_only=True)
    assert ran == [0]
    ran.clear()
    # The final features are asked for as well, so all blocks have to run.
    final, _ = model.forward_intermediates(images, indices=[0], stop_early=True)
    assert ran == [0, 1, 2]
    assert torch.equal(final, model.forward_features(images))


def test_pruning(model, images):
    wanted = model.forward_intermediates(images, indices=[0, 1], intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1], prune_norm=True) == [0, 1]
    assert len(model.veca.blocks) == 2
    assert len(model.veca.moves) == 1
    found = model.forward_intermediates(images, indices=[0, 1], intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("indices", "wanted"),
    [(None, [0, 1, 2]), (2, [1, 2]), ([0, 2], [0, 2]), ((-1, 0), [0, 2]), ([-3], [0])],
)
def test_indices(indices, wanted):
    assert check_blocks(indices, 3) == wanted


@pytest.mark.parametrize("indices", [0, 4, [3], [-4], []])
def test_bad_indices(indices):
    with pytest.raises(InputError, match="blocks"):
        check_blocks(indices, 3)


def test_parameters_fall_into_groups(model):
    import re

    names = {name for name, _ in model.named_parameters()}
    assert model.no_weight_decay() <= names
    groups = model.group_matcher()
    patterns = [groups["stem"], *(pattern for pattern, _ in groups["blocks"])]
    for name in names - {"head.weight", "head.bias"}:
        assert sum(bool(re.match(pattern, name)) for pattern in patterns) == 1, name


def test_gradient_checkpointing(model):
    model.set_grad_checkpointing()
    assert model.veca.gradient_checkpointing
    model.set_grad_checkpointing(False)
    assert not model.veca.gradient_checkpointing


def test_what_timm_wants_to_know(model):
    assert model.feature_info[1] == {"module": "veca.blocks.1", "num_chs": 32, "reduction": 16}
    assert model.pretrained_cfg["mean"] == CONFIG.image_mean
    assert model.pretrained_cfg["classifier"] == "head"
    assert isinstance(model.get_submodule(model.pretrained_cfg["first_conv"]), torch.nn.Conv2d)


def test_a_timm_that_is_missing_or_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match="pip install timm"):
        ours.register()

    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.setattr(ours.importlib, "import_module", broken)
    with pytest.raises(MissingExtraError, match="torchvision::nms"):
        ours.register()


# ------------------------------------------------------------------------------------ the registry


@needs_timm
def test_names_are_registered():
    assert timm.list_models("veca_*") == sorted(veca.PRESETS)
    ours.register()
    ours.register()
    model = timm.create_model(
        "veca_tiny_patch16", num_classes=10, cores=16, keep=0.5, drop_rate=0.1
    )
    assert isinstance(model, TimmVeca) and model.keep == 0.5
    assert (model.num_classes, model.cores, model.head_drop.p) == (10, 16, 0.1)
    assert model.veca.config == veca.PRESETS["veca_tiny_patch16"]
    assert model.pretrained_cfg["architecture"] == "veca_tiny_patch16"
    assert (
        timm.create_model("veca_tiny_patch16", in_chans=4, img_size=512).veca.config.in_channels
        == 4
    )


@needs_timm
def test_features_only(images):
    net = timm.create_model("veca_tiny_patch16", features_only=True, out_indices=(2, -2), cores=8)
    net.eval().requires_grad_(False)
    assert net.feature_info.channels() == [192, 192]
    assert net.feature_info.reduction() == [16, 16]
    assert net.feature_info.module_name() == ["veca.blocks.2", "veca.blocks.10"]
    assert len(net.model.veca.blocks) == 11
    assert [tuple(x.shape) for x in net(images)] == [(2, 192, 2, 3)] * 2
    half = timm.create_model("veca_tiny_patch16", features_only=True, out_indices=(8,), keep=0.5)
    half.eval().requires_grad_(False)
    (found,) = half(images)
    walk = list(half.model.veca.walk(images, keep=0.5))
    assert torch.equal(found.flatten(2).transpose(1, 2), walk[-1].spread()[:, 64:])
    default = timm.create_model("veca_tiny_patch16", features_only=True)
    assert len(default.feature_info.channels()) == 4


@needs_timm
def test_pretrained_is_what_veca_loads(images, tmp_path, monkeypatch):
    plain = stirred(veca.create_model("tiny", output_width=24)).eval().requires_grad_(False)
    veca.save(plain, tmp_path / "veca_tiny_patch16")
    file = {"file": str(tmp_path / "veca_tiny_patch16")}
    model = timm.create_model(
        "veca_tiny_patch16", pretrained=True, pretrained_cfg_overlay=file, num_classes=0
    ).eval()
    assert torch.equal(model(images), plain(images).cls)
    net = timm.create_model(
        "veca_tiny_patch16", pretrained=True, pretrained_cfg_overlay=file, features_only=True
    ).eval()
    wanted = plain.forward_intermediates(images, norm=False)[-1].feature_map()
    assert torch.equal(net(images)[-1], wanted)
    with pytest.raises(InputError, match=r"192.*384"):
        timm.create_model("veca_small_patch16", pretrained=True, pretrained_cfg_overlay=file)
    grey = timm.create_model(
        "veca_tiny_patch16", pretrained=True, pretrained_cfg_overlay=file, in_chans=1, num_classes=0
    ).eval()
    one = images[:, :1]
    wanted = plain(one.expand(-1, 3, -1, -1)).cls
    torch.testing.assert_close(grey(one), wanted, atol=1e-4, rtol=1e-4)  # summed in another order
    assert grey.in_chans == 1
    veca.save(veca.create_model("tiny", in_channels=4), tmp_path / "four")
    four = {"file": str(tmp_path / "four")}
    with pytest.raises(InputError, match="in_chans=1"):
        timm.create_model(
            "veca_tiny_patch16", pretrained=True, pretrained_cfg_overlay=four, in_chans=1
        )


@needs_timm
def test_a_device_and_a_dtype():
    model = timm.create_model("veca_tiny_patch16", device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


@needs_timm
def test_pictures_are_normalised_as_the_weights_want(tmp_path):
    half = (0.5, 0.5, 0.5)
    veca.save(veca.create_model("tiny", image_mean=half, image_std=half), tmp_path)

    def data_config(**options):
        given = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path), **options}}
        return timm.data.resolve_model_data_config(timm.create_model("veca_tiny_patch16", **given))

    assert (data_config()["mean"], data_config()["std"]) == (half, half)
    assert data_config(mean=(0.1, 0.2, 0.3))["mean"] == (0.1, 0.2, 0.3)  # asked for

    veca.save(veca.create_model("tiny", in_channels=4), tmp_path)
    assert data_config()["input_size"] == (4, 512, 512)


@needs_timm
def test_shipped_weights_are_listed_and_tags_are_not_known():
    assert "veca_tiny_patch16" in timm.list_models("veca*", pretrained=True)
    for pretrained in (False, True):
        with pytest.raises(InputError, match="'foo'"):
            timm.create_model("veca_tiny_patch16.foo", pretrained=pretrained)


@needs_folders
@pytest.mark.parametrize("safe", [False, True])
def test_folders_of_timm_come_back(images, tmp_path, safe):
    plain = stirred(veca.create_model("tiny", output_width=24, image_mean=(0.5, 0.5, 0.5)))
    veca.save(plain, tmp_path / "plain")
    file = {"file": str(tmp_path / "plain")}
    model = timm.create_model(
        "veca_tiny_patch16",
        pretrained=True,
        pretrained_cfg_overlay=file,
        num_classes=5,
        cores=8,
        global_pool="avg",
    ).eval()
    args = {"config": plain.config.to_dict(), "cores": 8, "global_pool": "avg"}
    if "cores" in model._model_args:  # timm notes by itself how a model was made
        args = None
    timm.models.save_for_hf(model, tmp_path / "timm", model_args=args, safe_serialization=safe)
    again = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert torch.equal(again(images), model(images))
    assert (again.cores, again.veca.config) == (8, plain.config)
    assert tuple(again.pretrained_cfg["mean"]) == (0.5, 0.5, 0.5)
    bare = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True, num_classes=0)
    assert torch.equal(bare.veca.norm.weight, plain.norm.weight)
    if safe:
        with pytest.raises(WeightsError, match="written by timm"):
            veca.load(tmp_path / "timm")


@needs_folders
def test_a_repository_of_timm_is_never_taken_for_the_shipped_weights(monkeypatch):
    asked = []

    def fetch(repository, **options):
        asked.append(repository)
        return TimmVeca(veca.PRESETS["veca_tiny_patch16"], num_classes=0).state_dict()

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", fetch)
    held = {"source": "hf-hub", "hf_hub_id": "me/mine", "num_classes": 0}
    timm.create_model("veca_tiny_patch16", pretrained=True, pretrained_cfg=held)
    assert asked == ["me/mine"]


@needs_timm
def test_layer_decay_takes_the_groups(model):
    from timm.optim import create_optimizer_v2

    model.requires_grad_(True)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    scales = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    first = scales[id(model.veca.blocks[0].attn.q.weight)]
    second = scales[id(model.veca.blocks[1].attn.q.weight)]
    assert scales[id(model.veca.patch_embed.weight)] < first < second
