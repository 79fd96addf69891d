"""The classes of transformers: the plain model's numbers, its folders, and the usual interfaces."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import veca
from conftest import stirred
from veca import Veca, VecaConfig, create_model
from veca.errors import ConfigError, ImageError, InputError, MissingExtraError, WeightsError

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("transformers 5 or newer is needed", allow_module_level=True)

from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402

import veca.integrations.transformers as hf  # noqa: E402
from veca.integrations.transformers import availability, folder  # noqa: E402

CONFIG = VecaConfig(depth=3, width=64, heads=2, num_cores=16, output_width=48)
PROVENANCE = {"teacher": {"name": "a teacher", "licence": "mit"}, "steps": 12, "licence": "cc0-1.0"}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def plain() -> Veca:
    return stirred(create_model(CONFIG)).eval()


@pytest.fixture
def saved(plain, tmp_path):
    """A folder of `veca.save`."""
    return veca.save(plain, tmp_path / "plain", provenance=PROVENANCE)


@pytest.fixture
def images():
    return torch.randn(2, 3, 48, 80)


@pytest.fixture
def photo():
    return Image.effect_mandelbrot((100, 60), (-2, -1, 1, 1), 50).convert("RGB")


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


# ---------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("cores", [None, 1, 5])
@torch.no_grad()
def test_the_numbers_are_the_plain_models_bit_for_bit(plain, saved, images, cores):
    model = transformers.AutoModel.from_pretrained(saved)
    assert type(model) is hf.VecaModel
    assert not model.training
    wanted, found = plain(images, cores=cores), model(images, cores=cores)
    assert torch.equal(found.pooler_output, wanted.cls)
    assert torch.equal(found.patches, wanted.patches)
    assert torch.equal(found.cores, wanted.cores)
    assert torch.equal(found.core_xy, wanted.core_xy)
    assert torch.equal(found.feature_map, wanted.feature_map())
    tokens = torch.cat([wanted.cores, wanted.patches], dim=1)
    assert torch.equal(found.last_hidden_state, tokens)
    assert torch.equal(model(images, cores=cores, return_dict=False)[0], tokens)


@torch.no_grad()
def test_hidden_states_and_attentions(plain, saved, images):
    model = hf.VecaModel.from_pretrained(saved)
    out = model(images, cores=4, output_hidden_states=True, output_attentions=True)
    assert torch.equal(out.pooler_output, plain(images, cores=4).cls)
    assert len(out.hidden_states) == 4
    layers = plain.forward_intermediates(images, cores=4, norm=False)
    for state, layer in zip(out.hidden_states[1:], layers, strict=True):
        assert torch.equal(state, torch.cat([layer.cores, layer.patches], dim=1))
    embedded = plain.patch_embed(images).flatten(2).transpose(1, 2)
    assert torch.equal(out.hidden_states[0][:, 4:], embedded)
    assert torch.equal(out.hidden_states[0][0, :4], plain.bank.tokens[:4])
    maps = plain.attention_maps(images, cores=4, per_head=True)  # [B, L, H, C, h, w]
    assert torch.equal(torch.stack(out.attentions, dim=1), maps.flatten(-2))


@torch.no_grad()
def test_a_share_of_the_tokens(plain, saved, tmp_path):
    images = torch.randn(2, 3, 80, 112)  # 5 x 7 patches
    model = transformers.AutoModel.from_pretrained(saved, keep=0.4)
    wanted, few = plain(images, keep=0.4), plain(images, cores=4, keep=0.5)
    found = model(images)
    assert torch.equal(found.pooler_output, wanted.cls)
    assert torch.equal(found.patches, wanted.patches)
    assert torch.equal(found.feature_map, wanted.feature_map())
    assert torch.equal(model(images, cores=4, keep=0.5).patches, few.patches)
    assert torch.equal(model(images, keep=1).patches, plain(images).patches)

    out = model(images, cores=4, output_hidden_states=True, output_attentions=True)
    assert torch.equal(out.pooler_output, plain(images, cores=4, keep=0.4).cls)
    layers = plain.forward_intermediates(images, cores=4, norm=False, keep=0.4)
    assert len(out.hidden_states) == 4 and out.hidden_states[0].shape == (2, 4 + 35, 64)
    for state, layer in zip(out.hidden_states[1:], layers, strict=True):
        assert torch.equal(state, torch.cat([layer.cores, layer.patches], dim=1))
    maps = plain.attention_maps(images, cores=4, per_head=True, keep=0.4)
    assert torch.equal(torch.stack(out.attentions, dim=1), maps.flatten(-2))

    model.save_pretrained(tmp_path / "again")
    assert hf.VecaModel.from_pretrained(tmp_path / "again").config.keep == 0.4
    assert torch.equal(veca.load(tmp_path / "again")(images).cls, plain(images).cls)
    plainer = hf.VecaModel.from_pretrained(saved)
    assert plainer.config.keep is None and "keep" not in plainer.config.to_dict()
    for wrong in (0, 1.5, "half", float("nan")):
        with pytest.raises(InputError, match="keep"):
            model(images, keep=wrong)
        with pytest.raises(InputError, match="keep"):
            transformers.AutoModel.from_pretrained(saved, keep=wrong)


@torch.no_grad()
def test_maps_and_logits_with_a_share_of_the_tokens(plain, saved):
    images = torch.randn(2, 3, 64, 96)
    backbone = transformers.AutoBackbone.from_pretrained(saved, out_indices=[1, 3], keep=0.4)
    wanted = plain.forward_intermediates(images, layers=(1, 3), keep=0.4)
    for share in (None, 0.4):
        maps = backbone(images, keep=share).feature_maps
        assert all(torch.equal(a, b.feature_map()) for a, b in zip(maps, wanted, strict=True))
    classifier = hf.VecaForImageClassification.from_pretrained(saved, num_labels=3, keep=0.4)
    logits = classifier.classifier(plain(images, keep=0.4).cls)
    torch.testing.assert_close(classifier(images).logits, logits)
    assert classifier.base_model.config.keep == 0.4


@torch.no_grad()
def test_a_budget_in_the_configuration(plain, saved, images):
    model = transformers.AutoModel.from_pretrained(saved, cores=3)
    assert model.config.cores == 3
    assert torch.equal(model(images).pooler_output, plain(images, cores=3).cls)
    assert torch.equal(model(images, cores=7).pooler_output, plain(images, cores=7).cls)
    with pytest.raises(InputError, match="cores"):
        model(images, cores=17)
    with pytest.raises(InputError, match="48 x 50"):
        model(images[..., :50])
    with pytest.raises(InputError, match="cores"):
        transformers.AutoModel.from_pretrained(saved, cores=17)


def test_gradient_checkpointing_keeps_the_gradients(plain, images):
    model = hf.VecaModel.from_veca(plain).train()
    gradients = []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        torch.manual_seed(3)  # coordinates are augmented in training
        model.zero_grad()
        model(images).last_hidden_state.square().mean().backward()
        gradients.append(plain.blocks[0].attn.q.weight.grad.clone())
    assert plain.gradient_checkpointing
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_the_way_transformers_says(plain, images, reentrant):
    """Its classes find the blocks, its function is called, and gradients are those without it."""
    model = hf.VecaModel.from_veca(plain).train()
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert len(layers) == 3 and not model.is_gradient_checkpointing
    passes = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: passes.append(module))
    gradients = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
            layers[1].gradient_checkpointing = False  # as its every_n_layers leaves some out
        torch.manual_seed(3)
        passes.clear()
        model.zero_grad()
        model(images).last_hidden_state.square().mean().backward()
        assert len(passes) == (5 if enable else 3)
        gradients.append({n: p.grad.clone() for n, p in plain.named_parameters()})
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted, msg=name)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_gradients_are_retained_on_hidden_states(plain, saved, images):
    backbone = hf.VecaBackbone.from_pretrained(saved, out_indices=[1, 3])
    classifier = hf.VecaForImageClassification.from_pretrained(saved, num_labels=3)
    for model in (hf.VecaModel.from_veca(plain), backbone, classifier):
        out = model(images, output_hidden_states=True)
        for state in out.hidden_states:
            state.retain_grad()
        last = out.feature_maps[-1] if model is backbone else out[0]
        last.flatten()[0].backward()
        assert all(state.grad is not None for state in out.hidden_states)
        assert all(state.grad.abs().sum() > 0 for state in out.hidden_states)


def test_the_parts_that_transformers_asks_for(plain, saved, tmp_path):
    classifier = hf.VecaForImageClassification.from_pretrained(saved, num_labels=3, cores=5)
    bare = classifier.base_model
    assert type(bare) is hf.VecaModel and bare.veca is classifier.veca and bare.config.cores == 5
    bare.save_pretrained(tmp_path / "bare")
    assert same(veca.load(tmp_path / "bare"), plain)
    layer = torch.nn.Conv2d(3, 64, 16, 16)
    classifier.set_input_embeddings(layer)
    assert classifier.get_input_embeddings() is layer


def test_fresh_weights_start_as_published():
    config = hf.VecaConfig(depth=2, width=64, heads=2, num_cores=16)
    for model in (transformers.AutoModel.from_config(config), hf.VecaModel(config)):
        assert torch.equal(model.veca.moves[0].alpha, torch.tensor(0.01))
        assert torch.equal(model.veca.norm.weight, torch.ones(64))
        assert model.veca.bank.tokens.std().item() == pytest.approx(64**-0.5, rel=0.1)
        assert model.veca.blocks[1].ffn.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
        xy = model.veca.bank.coordinates.tanh()
        assert 0.6 < xy.abs().max() < 0.951


# ---------------------------------------------------------------------------------------- folders


def test_round_trip_and_back_to_the_plain_model(plain, saved, tmp_path):
    model = transformers.AutoModel.from_pretrained(saved)
    out = tmp_path / "hf"
    model.save_pretrained(out)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "provenance.json",
    ]
    loaded = veca.load(out)
    assert same(loaded, plain)
    assert loaded.config == CONFIG
    assert veca.weights.read_provenance(out)["teacher"] == PROVENANCE["teacher"]
    again = transformers.AutoModel.from_pretrained(out)
    assert same(again.veca, plain)
    assert again.provenance["steps"] == 12
    settings = json.loads((out / "preprocessor_config.json").read_text())
    assert settings == hf.VecaImageProcessor.from_config(model.config).to_dict()
    fields = json.loads((out / "config.json").read_text())
    assert fields["model_type"] == "veca"
    assert fields["architectures"] == ["VecaModel"]
    assert {name: fields[name] for name in CONFIG.to_dict()} == CONFIG.to_dict()


def test_settings_of_transformers_do_not_keep_veca_from_loading(plain, saved, tmp_path):
    model = hf.VecaBackbone.from_pretrained(saved, cores=5, out_indices=[1, 3])
    model.save_pretrained(tmp_path / "hf")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert (again.cores, again.out_indices, again.out_features) == (5, [1, 3], ["stage1", "stage3"])
    assert same(veca.load(tmp_path / "hf"), plain)


def test_weights_that_changed_say_what_they_come_from(saved, tmp_path):
    model = hf.VecaModel.from_pretrained(saved)
    with torch.no_grad():
        model.veca.norm.bias += 1
    model.save_pretrained(tmp_path / "tuned")
    found = veca.weights.read_provenance(tmp_path / "tuned")
    assert found["derived_from"]["teacher"] == PROVENANCE["teacher"]
    assert "teacher" not in found
    assert "differ from those whose origin follows" in (tmp_path / "tuned/README.md").read_text()


def test_half_precision_and_shards(saved, plain, tmp_path):
    model = transformers.AutoModel.from_pretrained(saved, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    assert veca.load(tmp_path / "half", dtype=None).norm.weight.dtype == torch.bfloat16
    assert transformers.AutoModel.from_pretrained(tmp_path / "half").dtype == torch.bfloat16

    whole = hf.VecaModel.from_pretrained(saved)
    whole.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    assert same(hf.VecaModel.from_pretrained(tmp_path / "shards").veca, plain)


def halved(model):
    """Weights that differ from those on the disk."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.5
    return model


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def test_shards_replace_a_whole_file_and_back(saved, tmp_path):
    model = halved(hf.VecaModel.from_pretrained(saved))
    model.save_pretrained(saved, max_shard_size="100KB")
    assert "model.safetensors" not in names_in(saved)
    again = transformers.AutoModel.from_pretrained(saved)
    assert same(again.veca, model.veca)
    assert again.provenance["derived_from"]["teacher"] == PROVENANCE["teacher"]
    assert "teacher" not in again.provenance
    assert "differ from those whose origin follows" in (saved / "README.md").read_text()

    again.save_pretrained(tmp_path / "copy")  # unchanged, so what is known of them is the same
    found = veca.weights.read_provenance(tmp_path / "copy")
    assert found["derived_from"] == again.provenance["derived_from"]
    halved(again).save_pretrained(saved)
    assert not [name for name in names_in(saved) if "-of-" in name or "index" in name]
    assert same(veca.load(saved), again.veca)


def test_a_classifier_replaces_what_was_there(saved):
    hf.VecaModel.from_pretrained(saved).save_pretrained(saved, max_shard_size="100KB")
    model = transformers.AutoModelForImageClassification.from_pretrained(saved, num_labels=2)
    halved(model).save_pretrained(saved)
    assert names_in(saved) == {
        "README.md",
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }
    model.save_pretrained(saved, max_shard_size="100KB")
    assert "model.safetensors" not in names_in(saved)
    assert same(transformers.AutoModelForImageClassification.from_pretrained(saved), model)


def test_a_variant_leaves_the_weights_beside_it_alone(saved, plain):
    before = names_in(saved)
    halved(hf.VecaModel.from_pretrained(saved)).save_pretrained(saved, variant="half")
    assert names_in(saved) >= before | {"model.half.safetensors"}
    assert same(veca.load(saved), plain)
    assert veca.weights.read_provenance(saved)["steps"] == 12


def test_folders_that_only_transformers_reads_say_so(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = hf.VecaModel.from_pretrained(saved)
    model.save_pretrained("shards", max_shard_size="100KB")
    classifier = transformers.AutoModelForImageClassification.from_pretrained(saved, num_labels=2)
    classifier.save_pretrained("classifier")
    for name, noun in [
        ("shards", "max_shard_size"),
        ("classifier", r"classifier\.bias.*AutoModel"),
    ]:
        for source in (name, tmp_path / name):
            with pytest.raises(WeightsError, match=noun):
                veca.load(source)
        transformers.AutoModel.from_pretrained(name).save_pretrained(f"{name}-plain")
        assert same(veca.load(f"{name}-plain"), model.veca)


def test_what_lies_there_is_kept(saved, tmp_path):
    out = tmp_path / "hf"
    out.mkdir()
    (out / "README.md").write_text("mine")
    model = hf.VecaModel.from_pretrained(saved)
    model.save_pretrained(out)
    model.save_pretrained(out, is_main_process=False)
    assert (out / "README.md").read_text() == "mine"
    with torch.no_grad():
        model.veca.norm.bias += 1
    model.save_pretrained(out)  # over older weights
    assert same(veca.load(out), model.veca)


def test_a_plain_model_becomes_one_of_transformers(plain, images, tmp_path):
    model = hf.VecaModel.from_veca(plain, provenance=PROVENANCE)
    assert model.veca is plain
    assert not any(p.is_meta for p in model.parameters())
    model.save_pretrained(tmp_path)
    assert same(veca.load(tmp_path), plain)


# ------------------------------------------------------------------------------------ configuration


def test_configurations_translate_both_ways():
    config = hf.VecaConfig.from_veca(CONFIG, cores=9)
    assert config.to_veca() == CONFIG
    assert config.hidden_size == 48
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_channels) == (3, 2, 3)
    assert hf.VecaConfig(num_hidden_layers=5).depth == 5
    assert hf.VecaConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("fields", "error", "noun"),
    [
        ({"width": 65}, ConfigError, "width 65"),
        ({"cores": 65}, InputError, "cores"),
        ({"keep": 1.5}, InputError, "keep"),
        ({"format_version": 99}, ConfigError, "99"),
        ({"out_features": ["stage1"], "out_indices": [2]}, ConfigError, "out_indices"),
        ({"out_features": ["stage13"]}, ValueError, "stage13"),  # by transformers itself
        ({"depth": 0}, ConfigError, "depth"),
    ],
)
def test_bad_configurations_are_refused(fields, error, noun):
    with pytest.raises(error, match=noun):
        hf.VecaConfig(**fields)


# ----------------------------------------------------------------------------------------- backbone


@torch.no_grad()
def test_feature_maps_of_chosen_stages(plain, saved, images):
    model = transformers.AutoBackbone.from_pretrained(saved, out_indices=[1, 3])
    assert type(model) is hf.VecaBackbone
    assert model.out_features == ["stage1", "stage3"]
    assert model.channels == [48, 48]
    found = model(images, cores=6).feature_maps
    wanted = plain.forward_intermediates(images, cores=6, layers=(1, 3))
    assert all(torch.equal(a, b.feature_map()) for a, b in zip(found, wanted, strict=True))

    raw = transformers.AutoBackbone.from_pretrained(
        saved, out_features=["stem", "stage2"], apply_layernorm=False, cores=2
    )
    assert raw.channels == [64, 64]
    out = raw(images, output_hidden_states=True)
    assert torch.equal(out.feature_maps[0], plain.patch_embed(images))
    layer = plain.forward_intermediates(images, cores=2, layers=(2,), norm=False)[0]
    assert torch.equal(out.feature_maps[1], layer.feature_map())
    assert len(out.hidden_states) == 3

    tokens = hf.VecaBackbone.from_pretrained(saved, reshape_hidden_states=False, cores=2)
    assert tokens(images).feature_maps[0].shape == (2, 2 + 15, 48)
    assert transformers.AutoBackbone.from_config(model.config).out_indices == [1, 3]


def test_blocks_after_the_last_stage_are_not_run(saved, images):
    model = transformers.AutoBackbone.from_pretrained(saved, out_indices=[1])
    ran = []
    for number, block in enumerate(model.veca.blocks, start=1):
        block.register_forward_hook(lambda *_, n=number: ran.append(n))
    model(images)
    assert ran == [1]


# --------------------------------------------------------------------------------- classification


def test_a_classifier_on_top(plain, saved, images, tmp_path):
    model = transformers.AutoModelForImageClassification.from_pretrained(saved, num_labels=5)
    labels = torch.tensor([1, 4])
    out = model(images, labels=labels, cores=4)
    with torch.no_grad():
        logits = model.classifier(plain(images, cores=4).cls)
    torch.testing.assert_close(out.logits, logits)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(logits, labels))
    model.save_pretrained(tmp_path / "classifier")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "classifier")
    assert same(again, model)
    assert again.config.num_labels == 5
    assert same(transformers.AutoModel.from_pretrained(tmp_path / "classifier").veca, plain)
    assert (tmp_path / "classifier" / "README.md").is_file()

    model.config.problem_type = "multi_label_classification"
    targets = torch.rand(2, 5)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
    torch.testing.assert_close(model(images, labels=targets, cores=4).loss, expected)
    model.config.problem_type = "regression"
    expected = (logits - targets).square().mean()
    torch.testing.assert_close(model(images, labels=targets, cores=4).loss, expected)


# ---------------------------------------------------------------------------------------- processor


def test_the_processor_gives_the_pixels_of_preprocess(photo, tmp_path):
    path = tmp_path / "photo.png"
    photo.save(path)
    array = np.asarray(photo)
    processor = hf.VecaImageProcessor(size={"height": 64, "width": 96})
    wanted = veca.preprocess(photo, size=(64, 96)).pixels
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    for source in (photo, str(path), path, array, array.transpose(2, 0, 1), tensor):
        found = processor(source, return_tensors="pt").pixel_values
        assert torch.equal(found, wanted)
    for batch in ([photo, photo], np.stack([array, array]), (photo, [array])):
        found = processor(batch, return_tensors="pt").pixel_values
        assert torch.equal(found, wanted.repeat(2, 1, 1, 1))
    assert isinstance(processor(photo, return_tensors="np")["pixel_values"], np.ndarray)

    short = processor(photo, size={"shortest_edge": 32}, fit="pad", return_tensors="pt")
    assert torch.equal(short.pixel_values, veca.preprocess(photo, size=32, fit="pad").pixels)
    native = processor(photo, do_resize=False, do_normalize=False, return_tensors="pt").pixel_values
    bare = veca.preprocess(photo, None, mean=(0, 0, 0), std=(1, 1, 1)).pixels
    assert torch.equal(native, bare)
    grey = processor(array[..., 0], return_tensors="pt").pixel_values
    assert torch.equal(grey, veca.preprocess(photo.getchannel(0), size=(64, 96)).pixels)


def test_several_sizes_in_a_batch(photo):
    processor = hf.VecaImageProcessor(size={"shortest_edge": 32})
    pair = [photo, photo.resize((32, 64))]
    listed = processor(pair)["pixel_values"]
    assert [tuple(x.shape) for x in listed] == [(3, 32, 48), (3, 64, 32)]
    with pytest.raises(ImageError, match="32 x 48, 64 x 32"):
        processor(pair, return_tensors="pt")
    assert hf.VecaImageProcessor()(pair, return_tensors="pt").pixel_values.shape[2:] == (512, 512)


def test_what_the_processor_refuses(photo):
    processor = hf.VecaImageProcessor()
    for call, noun in [
        (lambda: processor(np.zeros((8, 8, 3), np.float32)), "float32"),
        (lambda: processor(photo, do_rescale=False), "do_rescale=False"),
        (lambda: processor(photo, do_center_crop=True), "do_center_crop=True"),
        (lambda: processor(photo, crop_size=224), "crop_size=224"),
        (lambda: processor(photo, resample=0), "resample=0.*BICUBIC"),
        (lambda: processor(photo, rescale_factor=1.0), r"rescale_factor=1\.0"),
        (lambda: processor(photo, do_convert_rgb=False), "do_convert_rgb=False"),
        (lambda: processor(photo, data_format="channels_last"), "data_format='channels_last'"),
        (lambda: processor(photo, device="cuda"), "device='cuda'"),
        (lambda: hf.VecaImageProcessor(do_center_crop=True), "do_center_crop=True"),
        (
            lambda: processor(np.zeros((8, 8, 3), np.uint8), input_data_format="x"),
            "'x'",
        ),
        (lambda: processor(photo, sise=3), "'sise'"),
        (lambda: processor(photo, size={"longest_edge": 3}), "longest_edge"),
        (lambda: processor(photo, fit="stretch"), "'stretch'"),
        (lambda: processor([]), "no images"),
        (lambda: processor("nothing.png"), r"nothing\.png"),
    ]:
        with pytest.raises(ImageError, match=noun):
            call()


def test_options_that_are_done_anyway_or_by_the_call(photo):
    done = {
        "do_convert_rgb": True,
        "do_rescale": True,
        "rescale_factor": 0.0039215686,  # as some configurations write it
        "resample": 3,
        "do_center_crop": False,
        "crop_size": {"height": 224, "width": 224},  # of a step that is not asked for
        "data_format": "channels_first",
        "device": torch.device("cpu"),
        "processor_class": None,
    }
    processor = hf.VecaImageProcessor(do_resize=False, **done)
    done.pop("processor_class")
    found = processor(photo, patch_size=20, return_tensors="pt", **done).pixel_values
    assert torch.equal(found, veca.preprocess(photo, None, patch_size=20).pixels)
    assert tuple(found.shape[2:]) == (60, 100)

    narrow = np.asarray(photo.resize((32, 3)))  # [3, 32, 3]: either side could be the colours
    found = processor(narrow, fit="pad", input_data_format="channels_last").pixel_values
    assert torch.equal(found, veca.preprocess(narrow, size=None, fit="pad").pixels)


def test_the_processor_is_saved_and_found(saved, tmp_path):
    model = hf.VecaModel.from_pretrained(saved)
    model.save_pretrained(tmp_path / "hf")
    found = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    assert type(found) is hf.VecaImageProcessor
    found = transformers.AutoImageProcessor.from_pretrained(
        tmp_path / "hf", size={"height": 32, "width": 48}
    )
    assert found.size == {"height": 32, "width": 48}
    found.save_pretrained(tmp_path / "processor")
    again = transformers.AutoImageProcessor.from_pretrained(tmp_path / "processor")
    assert again.to_dict() == found.to_dict()


def test_the_processor_of_a_folder_of_veca_save(tmp_path):
    config = CONFIG.replace(patch_size=8, image_mean=(0.5, 0.4, 0.3))
    veca.save(create_model(config), tmp_path)
    found = hf.VecaImageProcessor.from_pretrained(tmp_path)
    assert (found.patch_size, found.image_mean) == (8, [0.5, 0.4, 0.3])
    found.save_pretrained(tmp_path)
    assert transformers.AutoImageProcessor.from_pretrained(tmp_path).patch_size == 8


def test_preprocess_takes_a_model_of_transformers(photo):
    config = CONFIG.replace(patch_size=8, image_mean=(0.5, 0.4, 0.3))
    model = create_model(config)
    found = veca.preprocess(photo, 32, model=hf.VecaModel.from_veca(model))
    expected = model.preprocess(photo, 32)
    assert found.grid == expected.grid and torch.equal(found.pixels, expected.pixels)


@torch.no_grad()
def test_the_pipeline(plain, saved, photo, tmp_path):
    hf.VecaModel.from_pretrained(saved, cores=4).save_pretrained(tmp_path / "hf")
    size = {"height": 32, "width": 48}
    pipe = transformers.pipeline(
        "image-feature-extraction",
        model=str(tmp_path / "hf"),
        image_processor_kwargs={"size": size},
    )
    wanted = plain(veca.preprocess(photo, size=(32, 48)).pixels, cores=4)
    found = pipe(photo, return_tensors=True)
    assert torch.equal(found, torch.cat([wanted.cores, wanted.patches], dim=1))
    assert torch.equal(pipe(photo, pool=True, return_tensors=True), wanted.cls)
    batch = pipe([photo, photo], batch_size=2, return_tensors=True)
    assert [x.shape for x in batch] == [found.shape] * 2


@torch.no_grad()
def test_the_pipeline_reads_files_its_own_way_unless_they_are_read_before(saved, tmp_path):
    size = {"height": 32, "width": 48}
    hf.VecaImageProcessor(size=size).save_pretrained(saved)
    glass = Image.new("RGBA", (48, 32), (255, 0, 0, 40))
    deep = Image.fromarray(np.linspace(0, 65535, 48 * 32).astype(np.uint16).reshape(32, 48))
    glass.save(tmp_path / "glass.png")
    deep.save(tmp_path / "deep.png")
    pipe = transformers.pipeline("image-feature-extraction", model=str(saved))
    processor = transformers.AutoImageProcessor.from_pretrained(saved)
    for name in ("glass.png", "deep.png"):
        path = str(tmp_path / name)
        wanted = pipe.model(**processor(path, return_tensors="pt")).pooler_output
        read = veca.images.read_image(path)
        assert torch.equal(pipe(read, pool=True, return_tensors=True), wanted)


# ---------------------------------------------------------------------------------------------- hub


class Hub:
    """Stands in for the hub's client: notes what would be sent."""

    def __init__(self, has_card):
        self.has_card, self.calls = has_card, []

    def __call__(self, token=None):
        self.token = token
        return self

    def create_repo(self, repo_id, **options):
        self.calls.append(("create_repo", repo_id, options))
        return type("Url", (), {"repo_id": repo_id})()

    def file_exists(self, repo_id, name, **options):
        return self.has_card

    def create_branch(self, repo_id, **options):
        self.calls.append(("create_branch", repo_id, options))

    def upload_folder(self, *, folder_path, allow_patterns, ignore_patterns, **options):
        sent = sorted(set(allow_patterns) - set(ignore_patterns))
        self.sent = {name: (folder_path / name).read_bytes() for name in sent}
        self.calls.append(("upload_folder", options.pop("repo_id"), options))
        return "done"


@pytest.mark.parametrize("has_card", [False, True])
def test_push_to_hub_with_a_card(saved, plain, monkeypatch, tmp_path, has_card):
    import huggingface_hub

    hub = Hub(has_card)
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    model = hf.VecaModel.from_pretrained(saved)
    done = model.push_to_hub("me/mine", private=True, token="t", tags=["birds"], revision="try")
    assert done == "done"
    assert hub.token == "t"
    assert hub.calls[0] == ("create_repo", "me/mine", {"private": True, "exist_ok": True})
    assert ("create_branch", "me/mine", {"branch": "try", "exist_ok": True}) in hub.calls
    assert ("README.md" in hub.sent) is not has_card
    assert {"config.json", "model.safetensors", "preprocessor_config.json"} <= set(hub.sent)
    for name, data in hub.sent.items():
        (tmp_path / name).write_bytes(data)
    assert same(veca.load(tmp_path), plain)
    if not has_card:
        card = hub.sent["README.md"].decode()
        assert 'veca.load("me/mine")' in card
        assert 'license: "cc0-1.0"' in card
        assert '- "birds"' in card
        assert "a teacher (licence: mit)" in card


def test_save_and_push_at_once(saved, monkeypatch, tmp_path):
    import huggingface_hub

    hub = Hub(has_card=False)
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    (tmp_path / "notes.txt").write_text("mine")
    model = hf.VecaModel.from_pretrained(saved)
    model.save_pretrained(tmp_path, push_to_hub=True, repo_id="me/mine", commit_message="first")
    assert "README.md" in hub.sent
    assert "notes.txt" not in hub.sent
    assert hub.calls[-1][2]["commit_message"] == "first"


# ------------------------------------------------------------------------------------- availability


def test_transformers_missing_or_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"\[hf\]"):
        availability.require_transformers()
    old = type(sys)("transformers")
    old.__version__ = "4.57.1"
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(MissingExtraError, match=r"4\.57\.1"):
        availability.require_transformers()


def test_a_transformers_that_wants_torchvision_for_images(monkeypatch):
    """Versions 5.4 to 5.17, where it is not installed."""

    class Stand(type):
        def __getattr__(cls, name):
            raise ImportError("AutoImageProcessor requires the Torchvision library")

    library = sys.modules["transformers"]  # it puts another object there than it gave us
    monkeypatch.setattr(library, "AutoImageProcessor", Stand("AutoImageProcessor", (), {}))
    with pytest.raises(MissingExtraError, match=r"5\.18"):
        availability.require_image_processors()


def test_registering_twice_changes_nothing():
    hf.register()
    method = transformers.AutoBackbone.from_pretrained.__func__
    hf.register()
    assert transformers.AutoBackbone.from_pretrained.__func__ is method


def test_other_backbones_go_their_usual_way(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "dinov2"}')
    asked = []
    base = transformers.AutoBackbone.__mro__[1]
    monkeypatch.setattr(
        base, "from_pretrained", classmethod(lambda cls, name, **options: asked.append(name))
    )
    transformers.AutoBackbone.from_pretrained(tmp_path)
    transformers.AutoBackbone.from_pretrained("owner/name")
    assert asked == [tmp_path, "owner/name"]


@pytest.mark.slow
def test_a_broken_torchvision_does_not_matter(saved, photo, tmp_path):
    broken = tmp_path / "broken" / "torchvision"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms')")
    info = tmp_path / "broken" / "torchvision-0.99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99\n")
    photo.save(tmp_path / "photo.png")
    hf.VecaModel.from_pretrained(saved).save_pretrained(tmp_path / "hf")
    script = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
import transformers
assert transformers.utils.is_torchvision_available()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import veca.integrations.transformers
assert any("torchvision" in str(w.message) for w in said)
from transformers import AutoBackbone, AutoImageProcessor, AutoModel, pipeline
pixels = AutoImageProcessor.from_pretrained(sys.argv[2])(
    sys.argv[3], size=32, return_tensors="pt")
print(list(AutoModel.from_pretrained(sys.argv[2])(**pixels).pooler_output.shape))
pipe = pipeline("image-feature-extraction", model=sys.argv[2])
print(list(pipe(sys.argv[3], return_tensors=True, image_processor_kwargs={"size": 32}).shape))
"""
    args = [str(tmp_path / "broken"), str(tmp_path / "hf"), str(tmp_path / "photo.png")]
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["[1, 48]", "[1, 20, 48]"], done.stderr[-2000:]


def test_sizes_in_words():
    assert folder._bytes("50GB") == 50 * 10**9
    assert folder._bytes("5MiB") == 5 * 2**20
    assert folder._bytes(17) == 17
    assert folder._bytes("much") == 0
