import pytest
import torch

from veca.errors import InputError
from veca.teachers import KNOWN, PAPER_BASELINES, TeacherError, list_teachers, load_teacher
from veca.teachers.load import SCHEMES


@pytest.mark.parametrize(
    ("spec", "noun"),
    [
        ("dinov3-vitb17", "'dinov3-vitb17'.*mean 'dinov3-vitb16'"),
        ("timmm:vit", "'timmm'.*mean 'timm'"),
        ("./no/such/folder", r"no folder \./no/such/folder"),
        ("/no/such/folder", "no folder /no/such/folder"),
        ("a/b/c", "no folder a/b/c"),
        ("transformers:", "'transformers:'"),
        ("transformers:nowhere", "no folder nowhere"),
        ("", "''.*list_teachers"),
        (None, "None.*list_teachers"),
        (7, "7.*list_teachers"),
    ],
)
def test_what_names_no_teacher(spec, noun):
    with pytest.raises(TeacherError, match=noun):
        load_teacher(spec)


def test_missing_path_and_file_instead_of_folder(tmp_path):
    with pytest.raises(TeacherError, match=r"no folder .*nothing"):
        load_teacher(tmp_path / "nothing")
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(TeacherError, match=r"weights\.bin.*config\.json"):
        load_teacher(f"transformers:{file}")
    with pytest.raises(TeacherError, match=r"weights\.bin.*\.safetensors"):
        load_teacher(file)


def test_bad_device_and_dtype():
    with pytest.raises(InputError, match="'tpu9'"):
        load_teacher("dinov3-vitb16", device="tpu9")
    with pytest.raises(TeacherError, match="int8"):
        load_teacher("dinov3-vitb16", dtype=torch.int8)


def test_radio_is_refused_before_anything_is_fetched():
    with pytest.raises(TeacherError, match=r"nvidia/RADIO-B.*allow_remote_code"):
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
