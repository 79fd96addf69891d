"""One line that names the library at fault and how to get it."""

import json
import sys

import pytest

from veca._util import extras
from veca._util.extras import install_command, missing, require, upgrade_advice
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
    assert "[umap]'" in refusal("umap")
    assert "scikit-learn" in refusal("sklearn")
    assert "[viz]'" in refusal("umap", extra="viz")
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
    assert "libstdc++.so.6" in said and "[search]'" in said


def test_the_error_alone():
    error = missing("gradio", "the demo", fault="is too old")
    assert isinstance(error, ImportError)
    assert all(part in str(error) for part in ("gradio", "the demo", "is too old", "[demo]'"))


# ------------------------------------------------------------------------ how it was installed


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes this package look as if an installer had put it into site-packages."""
    metadata = tmp_path / "site-packages" / "veca-9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: veca\nVersion: 9\n"
        'Requires-Dist: pyarrow>=17; extra == "embed"\n'
        'Requires-Dist: veca[embed]; extra == "search"\n'
        "Requires-Dist: usearch[x]>=2; python_version > '3' and extra == 'search'\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setattr(extras, "_PACKAGE", tmp_path / "site-packages" / "veca")

    def install(direct=None, installer="pip"):
        (metadata / "INSTALLER").write_text(f"{installer}\n")
        if direct is not None:
            (metadata / "direct_url.json").write_text(json.dumps(direct))

    return install


@pytest.fixture
def clone(tmp_path):
    root = tmp_path / "my clone"
    (root / "src" / "veca").mkdir(parents=True)
    (root / "pyproject.toml").touch()
    return root


def test_from_an_index(installed):
    installed()
    assert install_command("search", "usearch") == "pip install 'veca[search]'"
    assert install_command(None, "timm") == "pip install timm"
    assert "pip install --upgrade veca" in upgrade_advice()
    installed(installer="uv")
    assert install_command("search", "usearch") == "uv pip install 'veca[search]'"


def test_from_a_clone(installed, clone, monkeypatch):
    installed({"url": clone.as_uri(), "dir_info": {}})
    assert install_command("search", "usearch") == f"pip install '{clone}[search]'"
    assert "newer copy" in upgrade_advice()
    (clone / ".git").mkdir()
    assert f"git -C '{clone}' pull`, then `pip install '{clone}'`" in upgrade_advice()
    monkeypatch.chdir(clone)
    assert install_command("search", "usearch") == "pip install '.[search]'"
    # The clone's own code, by an editable install or by PYTHONPATH.
    monkeypatch.setattr(extras, "_PACKAGE", clone / "src" / "veca")
    assert install_command("search", "usearch") == "pip install -e '.[search]'"
    assert upgrade_advice().endswith("pull`")


def test_from_a_wheel(installed, tmp_path):
    wheel = tmp_path / "veca-9-py3-none-any.whl"
    wheel.touch()
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert install_command("search", "usearch") == f"pip install '{wheel}[search]'"
    assert str(wheel) in upgrade_advice()


def test_from_a_repository(installed):
    vcs = {"vcs": "git", "commit_id": "0" * 40, "requested_revision": "v9"}
    installed({"url": "https://host/veca.git", "vcs_info": vcs})
    wanted = "pip install 'veca[search] @ git+https://host/veca.git@v9'"
    assert install_command("search", "usearch") == wanted


@pytest.mark.parametrize("what", ["dir_info", "archive_info"])
def test_what_it_was_installed_from_is_gone(installed, tmp_path, what):
    installed({"url": (tmp_path / "gone").as_uri(), what: {}})
    command = install_command("search", "usearch")
    assert command == "pip install 'pyarrow>=17' 'usearch[x]>=2'"
    assert install_command("unheard-of", "library") == "pip install library"


def test_nothing_is_written_down(installed, monkeypatch):
    installed("not an object")
    assert install_command("search", "usearch").startswith("pip install")
