"""Repositories served by a hub on this machine."""

import pytest
import torch

from veca.teachers import TeacherError, load_teacher
from veca.teachers.registry import KNOWN
from veca.weights.hub import Repository

pytest.importorskip("transformers")

PIXELS = torch.rand(1, 3, 32, 32)


def test_fetches_only_what_it_needs_and_works_offline_afterwards(fake_hub, dinov3, monkeypatch):
    _, folder = dinov3
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights, in an older format")
    (folder / "tf_model.h5").write_bytes(b"and in another")
    fake_hub.repositories["someone/vit"] = folder
    teacher = load_teacher("someone/vit")
    assert fake_hub.fetched() == {"config.json", "README.md", "model.safetensors"}
    described = teacher.describe()
    assert described["revision"] == "c" * 40 and described["licence"] == "apache-2.0"
    local = load_teacher(folder)
    assert described["weights_sha256"] == local.describe()["weights_sha256"]
    expected = local.features(PIXELS, (2, 2))
    assert torch.equal(teacher.features(PIXELS, (2, 2)).patches, expected.patches)

    fake_hub.close()
    again = load_teacher("transformers:someone/vit")
    assert torch.equal(again.features(PIXELS, (2, 2)).patches, expected.patches)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_teacher("someone/vit").width == 32


def test_older_weights_where_there_are_no_newer(fake_hub, dinov3):
    _, folder = dinov3
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    fake_hub.repositories["someone/old"] = folder
    assert load_teacher("someone/old").features(PIXELS, (2, 2)).grid == (2, 2)
    assert "pytorch_model.bin" in fake_hub.fetched()


def test_wrong_id(fake_hub):
    with pytest.raises(TeacherError, match="nobody/nothing"):
        load_teacher("nobody/nothing")


def test_wrong_revision(fake_hub, dinov3):
    fake_hub.repositories["someone/vit"] = dinov3[1]
    with pytest.raises(TeacherError, match="'v9'"):
        load_teacher("someone/vit@v9")


def test_gated(fake_hub, dinov3):
    name = KNOWN["dinov3-vitb16"].hub_id
    fake_hub.repositories[name] = dinov3[1]
    fake_hub.gated.add(name)
    with pytest.raises(TeacherError, match=f"https://huggingface.co/{name}.*hf auth login"):
        load_teacher("dinov3-vitb16")


def test_forbidden_and_unauthorised_answers(fake_hub):
    repository = Repository("owner/name", TeacherError)

    def answer(code):
        error = OSError("refused")
        error.response = type("Response", (), {"status_code": code})
        return str(repository.refusal(error))

    assert "gated" in answer(403) and "private" in answer(401)
    assert "OSError: refused" in answer(500)


def test_no_network(fake_hub, monkeypatch):
    fake_hub.close()
    with pytest.raises(TeacherError, match=r"someone/vit.*network"):
        load_teacher("someone/vit")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TeacherError, match="HF_HUB_OFFLINE"):
        load_teacher("someone/vit")


def test_repository_without_weights_or_of_another_kind(fake_hub, tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    fake_hub.repositories["someone/else"] = folder
    (folder / "config.json").write_text('{"model_type": "dinov2"}')
    with pytest.raises(TeacherError, match=r"model\.safetensors"):
        load_teacher("someone/else")
    text = tmp_path / "text"
    text.mkdir()
    fake_hub.repositories["someone/text"] = text
    (text / "config.json").write_text('{"model_type": "bert"}')
    (text / "model.safetensors").write_bytes(b"a great deal of data")
    with pytest.raises(TeacherError, match="'bert'"):
        load_teacher("someone/text")
    assert "model.safetensors" not in fake_hub.fetched()


def test_a_short_name_checks_what_it_got(fake_hub, dinov3):
    fake_hub.repositories[KNOWN["dinov3-vits16"].hub_id] = dinov3[1]
    with pytest.raises(TeacherError, match=r"384 .* 32"):
        load_teacher("dinov3-vits16")
