import pytest
import torch

from veca.errors import InputError
from veca.teachers import KNOWN, PAPER_BASELINES, TeacherError, list_teachers, load_teacher
from veca.teachers.load import SCHEMES


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dinov3-vitb17", "did you mean 'dinov3-vitb16'"),
        ("timmm:vit", "unknown kind of teacher 'timmm'; did you mean 'timm'"),
        ("./no/such/folder", "there is no folder"),
        ("/no/such/folder", "there is no folder"),
        ("a/b/c", "there is no folder"),
        ("transformers:", "names no model"),
        ("transformers:nowhere", "there is no folder nowhere"),
        ("", "named by a short name"),
        (None, "named by a short name"),
        (7, "named by a short name"),
    ],
)
def test_what_names_no_teacher(spec, message):
    with pytest.raises(TeacherError, match=message):
        load_teacher(spec)


def test_missing_path_and_file_instead_of_folder(tmp_path):
    with pytest.raises(TeacherError, match="there is no folder"):
        load_teacher(tmp_path / "nothing")
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(TeacherError, match="is a file; give the folder"):
        load_teacher(f"transformers:{file}")
    with pytest.raises(TeacherError, match="safetensors"):
        load_teacher(file)


def test_bad_device_and_dtype():
    with pytest.raises(InputError, match="device 'tpu9' cannot be used"):
        load_teacher("dinov3-vitb16", device="tpu9")
    with pytest.raises(TeacherError, match="dtype must be one of"):
        load_teacher("dinov3-vitb16", dtype=torch.int8)


def test_radio_is_refused_before_anything_is_fetched():
    with pytest.raises(TeacherError, match=r"nvidia/RADIO-B.*allow_remote_code=True"):
        load_teacher("radio-v2.5-b")


def test_registry():
    assert list_teachers() == sorted(KNOWN) and set(PAPER_BASELINES) <= set(KNOWN)
    families = {KNOWN[name].family for name in PAPER_BASELINES}
    assert len(PAPER_BASELINES) == len(families) == 8
    for name, known in KNOWN.items():
        assert known.name == name and known.licence and known.feature
        scheme, colon, rest = known.spec.partition(":")
        assert not colon or (scheme in SCHEMES and known.hub_id == rest and rest.count("/") == 1)
        assert known.stride in (14, 16, 32) and 0 <= known.prefix <= 5
    assert KNOWN["dinov3-vitb16"].hub_id == "facebook/dinov3-vitb16-pretrain-lvd1689m"
    assert (KNOWN["dinov3-vitb16"].prefix, KNOWN["dinov2-vitb14"].prefix) == (5, 1)
    assert (KNOWN["dinov2-reg-vitb14"].stride, KNOWN["dinov2-reg-vitb14"].prefix) == (14, 5)
    assert KNOWN["dinov3-vitl16"].gated and not KNOWN["dinov2-vitb14"].gated
    assert [n for n, k in KNOWN.items() if k.remote_code] == [
        "radio-v2.5-b",
        "radio-v2.5-l",
        "radio-v2.5-h",
    ]
