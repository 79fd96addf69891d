import json

import pytest
import torch

import veca
from conftest import SMALLEST, stirred
from veca import DenseVit, create_model
from veca.errors import InputError
from veca.teachers import OurTeacher, TeacherError, load_teacher, read_dense_vit, save_dense_vit

PIXELS = torch.rand(2, 3, 32, 48)


def normalised(config):
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (config.image_mean, config.image_std))
    return (PIXELS - mean) / std


@pytest.fixture
def model():
    return stirred(create_model(SMALLEST, output_width=20)).eval()


@pytest.mark.parametrize("cores", [None, 3])
def test_veca_as_a_teacher(tmp_path, model, cores):
    veca.save(model, tmp_path / "weights", provenance={"licence": "CC-BY-4.0"})
    teacher = load_teacher(f"veca:{tmp_path / 'weights'}", cores=cores)
    with torch.no_grad():
        expected = model(normalised(model.config), cores=cores)
    out = teacher.features(PIXELS, (2, 3))
    torch.testing.assert_close(out.cls, expected.cls)
    torch.testing.assert_close(out.patches, expected.patches)
    assert (teacher.width, teacher.stride, teacher.licence) == (20, 16, "CC-BY-4.0")
    described = json.loads(json.dumps(teacher.describe()))
    assert described["cores"] == (cores or 8)
    assert described["weights_sha256"] == veca.weights.weights_hash(model)
    weight, bias = teacher.patch_embedding()
    assert torch.equal(weight, model.patch_embed.weight) and torch.equal(
        bias, model.patch_embed.bias
    )
    # A folder or a file says itself what it is.
    assert isinstance(load_teacher(tmp_path / "weights"), OurTeacher)
    veca.save(model, tmp_path / "one.safetensors")
    assert load_teacher(str(tmp_path / "one.safetensors")).licence == "unknown"


def test_veca_errors(tmp_path, model):
    with pytest.raises(TeacherError, match="nothing/here"):
        load_teacher(f"veca:{tmp_path / 'nothing' / 'here'}")
    veca.save(model, tmp_path / "weights")
    with pytest.raises(InputError, match="cores"):
        load_teacher(tmp_path / "weights", cores=9)


def test_dense_vit_round_trip(tmp_path):
    model = stirred(DenseVit(SMALLEST)).eval()
    folder = tmp_path / "dense"
    path = save_dense_vit(model, folder, provenance={"teacher": {"licence": "MIT"}})
    assert path == folder / "model.safetensors"
    with torch.no_grad():
        expected = model(normalised(model.config))
    single = save_dense_vit(model, tmp_path / "one.safetensors")
    for spec in (f"dense-vit:{folder}", folder, f"dense-vit:{single}", str(single)):
        teacher = load_teacher(spec)
        out = teacher.features(PIXELS, (2, 3))
        assert torch.equal(out.cls, expected.cls) and torch.equal(out.patches, expected.patches)
    assert load_teacher(folder).licence == "unknown (its teacher's: MIT)"
    again, provenance = read_dense_vit(folder)
    assert again.config == model.config and provenance == {"teacher": {"licence": "MIT"}}
    assert not again.training
    assert path.stat().st_mode == (tmp_path / "one.safetensors").stat().st_mode
    assert path.stat().st_mode & 0o044  # readable by others, as the umask allows


def test_dense_vit_errors(tmp_path, model):
    with pytest.raises(TeacherError, match=r"no\.safetensors"):
        load_teacher(f"dense-vit:{tmp_path / 'no.safetensors'}")
    veca.save(model, tmp_path / "veca.safetensors")
    with pytest.raises(TeacherError, match=r"veca\.safetensors"):
        load_teacher(f"dense-vit:{tmp_path / 'veca.safetensors'}")
    (tmp_path / "bad.safetensors").write_bytes(b"short")
    with pytest.raises(TeacherError, match=r"bad\.safetensors"):
        load_teacher(f"dense-vit:{tmp_path / 'bad.safetensors'}")
    dense = DenseVit(SMALLEST)
    with torch.no_grad():
        dense.norm.weight[0] = torch.nan
    path = save_dense_vit(dense, tmp_path / "nan.safetensors")
    with pytest.raises(TeacherError, match=r"norm\.weight"):
        load_teacher(path)
    with pytest.raises(TeacherError, match="cores="):
        OurTeacher(DenseVit(SMALLEST), name="dense", cores=4)
    save_dense_vit(DenseVit(SMALLEST), tmp_path / "dense")
    with pytest.raises(TeacherError, match=r"cores=.*dense-vit:"):
        load_teacher(tmp_path / "dense", cores=4)


def test_a_model_in_memory_is_copied(model):
    teacher = load_teacher(model, cores=4)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        expected = model(normalised(model.config), cores=4).cls
        model.patch_embed.weight.zero_()
    torch.testing.assert_close(teacher.features(PIXELS, (2, 3)).cls, expected)
    assert load_teacher(DenseVit(SMALLEST)).name == "densevit"


def test_training_augmentation_stays_off(model):
    teacher = load_teacher(model)
    first = teacher.features(PIXELS, (2, 3))
    torch.nn.ModuleList([teacher]).train()
    assert torch.equal(teacher.features(PIXELS, (2, 3)).patches, first.patches)
