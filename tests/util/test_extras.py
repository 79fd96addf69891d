"""One line that names the library at fault and how to get it."""

import sys

import pytest

from veca._util.extras import missing, require
from veca.errors import MissingExtraError


def refusal(name, **options):
    with pytest.raises(MissingExtraError) as caught:
        require(name, "this test", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def library(folder, monkeypatch, name, code):
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_what_is_there_is_given():
    assert require("json.decoder", "this test") is sys.modules["json.decoder"]


def test_what_is_not_installed(monkeypatch):
    for name in ("umap", "sklearn", "efficientnet_lite4_pytorch_model"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "'veca[umap]'" in refusal("umap")
    assert "scikit-learn" in refusal("sklearn")
    assert "'veca[viz]'" in refusal("umap", extra="viz")
    package = "efficientnet-lite4-pytorch-model"
    assert f"pip install {package}" in refusal(package.replace("-", "_"))


def test_a_library_that_lacks_another(monkeypatch, tmp_path):
    library(tmp_path, monkeypatch, "timm", "import torchwisdom.ops")
    said = refusal("timm")
    assert "timm" in said and "pip install torchwisdom" in said


def test_a_library_that_another_breaks(monkeypatch, tmp_path):
    code = "raise RuntimeError('operator torchvision::nms does not exist\\nand more')"
    library(tmp_path, monkeypatch, "timm", code)
    said = refusal("timm")
    assert "operator torchvision::nms does not exist" in said  # the library's own words
    assert "pip install" not in said  # timm is there
    library(tmp_path, monkeypatch, "usearch", "raise ImportError('libstdc++.so.6')")
    said = refusal("usearch")
    assert "libstdc++.so.6" in said and "'veca[search]'" in said


def test_the_error_alone():
    error = missing("gradio", "the demo", fault="is too old")
    assert isinstance(error, ImportError)
    assert all(part in str(error) for part in ("gradio", "the demo", "is too old", "'veca[demo]'"))
