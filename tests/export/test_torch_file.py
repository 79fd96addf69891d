"""torch.export files: run by torch alone, and opened only if they hold no pickles."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile

import pytest
import torch

import veca
from veca.errors import InputError
from veca.export import ExportError, export_model, load_exported
from veca.export.graph import frozen_copy, trace

pytestmark = pytest.mark.slow  # every test here needs an exported file


@pytest.fixture(scope="module")
def program(torch_any):
    """The file as torch alone opens it."""
    return torch.export.load(torch_any.path).module()


@pytest.mark.parametrize("cores", [1, 3, 16])
@pytest.mark.parametrize("shape", [(1, 48, 80), (3, 224, 32)])
def test_one_program_is_the_model_at_any_batch_size_and_budget(model, program, shape, cores):
    images = torch.randn(shape[0], 3, *shape[1:])
    with torch.no_grad():
        found, wanted = program(images, torch.tensor(cores)), model(images, cores=cores)
    assert list(found) == ["cls", "patches", "core_tokens", "core_xy"]
    torch.testing.assert_close(found["cls"], wanted.cls, rtol=0, atol=1e-5)
    torch.testing.assert_close(found["patches"], wanted.patches, rtol=0, atol=1e-5)
    torch.testing.assert_close(found["core_tokens"], wanted.cores, rtol=0, atol=1e-5)
    torch.testing.assert_close(found["core_xy"], wanted.core_xy, rtol=0, atol=1e-5)


def test_a_program_that_merges_is_the_model_at_any_size(model, tmp_path):
    """One budget, half of the patch tokens; an even grid, an odd one, and a batch of one."""
    (entry,) = export_model(
        model, tmp_path, to="torch-export", cores=6, keep=0.5, check_sizes=[(64, 96)]
    )
    assert entry.path.name == "veca_cores6_keep0.5.pt2" and entry.keep == 0.5
    exported = load_exported(entry.path)
    assert (exported.cores, exported.keep) == (6, 0.5)
    for shape in ((2, 128, 96), (1, 80, 176), (3, 112, 48)):
        images = torch.randn(shape[0], 3, *shape[1:])
        with torch.no_grad():
            found, wanted = exported(images), model(images, cores=6, keep=0.5)
        torch.testing.assert_close(found.patches, wanted.patches, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.cores, wanted.cores, rtol=0, atol=1e-5)


def test_it_runs_without_this_package(torch_any):
    script = (
        "import sys, torch; sys.modules['veca'] = None;"
        "f = torch.export.load(sys.argv[1]).module();"
        "print(list(f(torch.zeros(1, 3, 32, 64), torch.tensor(2))['patches'].shape))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(torch_any.path)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[1, 8, 48]", done.stderr


def test_a_size_off_the_grid_is_refused(program):
    # Which of the two is up to the version of torch.
    with pytest.raises((RuntimeError, AssertionError), match=r"\b16\b"):
        program(torch.zeros(1, 3, 50, 64), torch.tensor(2))


def test_fixed_budget_size_and_half_precision(model, tmp_path):
    (entry,) = export_model(
        model, tmp_path, to="torch-export", cores=[4], size=(64, 96), precision="fp16"
    )
    assert entry.path.name == "veca_cores4_64x96_float16.pt2"
    exported = load_exported(entry.path)
    images = torch.randn(3, 3, 64, 96)
    with torch.no_grad():
        wanted = model(images, cores=4)
    found = exported(images)
    assert found.patches.dtype == torch.float16
    torch.testing.assert_close(found.patches.float(), wanted.patches, rtol=0, atol=3e-2)


def test_load_exported_is_called_like_the_model(model, torch_any):
    exported = load_exported(torch_any.path)
    images = torch.randn(1, 3, 32, 64)
    with torch.no_grad():
        wanted = model(images, cores=5)
    torch.testing.assert_close(exported(images, cores=5).cores, wanted.cores, rtol=0, atol=1e-5)
    with pytest.raises(InputError, match="40 x 64"):
        exported(torch.zeros(1, 3, 40, 64))
    with pytest.raises(InputError, match="1 x 4"):
        exported(torch.zeros(1, 3, 16, 64))
    with pytest.raises(InputError, match="'nowhere'"):
        load_exported(torch_any.path, device="nowhere")


def test_a_file_with_pickles_is_refused_unread(model, torch_any, tmp_path):
    # A program saved as torch does it carries its example, pickled.
    usual = tmp_path / "usual.pt2"
    torch.export.save(trace(frozen_copy(model, torch.float32), 4, (32, 32)), usual)
    with pytest.raises(ExportError, match=r"data/sample_inputs/model\.pt"):
        load_exported(usual)

    for name, content in {"data/aotinductor/model/x.so": b"code", "extra/y.pkl": b"."}.items():
        added = tmp_path / "added.pt2"
        added.write_bytes(torch_any.path.read_bytes())
        with zipfile.ZipFile(added, "a") as archive:
            archive.writestr(f"archive/{name}", content)
        with pytest.raises(ExportError, match=re.escape(name)):
            load_exported(added)

    pickled = tmp_path / "pickled.pt2"
    with zipfile.ZipFile(torch_any.path) as old, zipfile.ZipFile(pickled, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith("model_weights_config.json"):
                data = data.replace(b'"use_pickle": false', b'"use_pickle": true', 1)
            new.writestr(entry.filename, data)
    with pytest.raises(ExportError, match=r" model\.\w+"):
        load_exported(pickled)


def test_damaged_files(torch_any, tmp_path):
    (tmp_path / "bad.pt2").write_bytes(b"not an archive")
    with pytest.raises(ExportError, match=r"bad\.pt2"):
        load_exported(tmp_path / "bad.pt2")
    with zipfile.ZipFile(tmp_path / "empty.pt2", "w") as archive:
        archive.writestr("a/b", "")
    with pytest.raises(ExportError, match=r"empty\.pt2"):
        load_exported(tmp_path / "empty.pt2")
    with pytest.raises(InputError, match=r"none\.pt2"):
        load_exported(tmp_path / "none.pt2")


def test_the_tiny_preset(tmp_path):
    # At one size, which is traced much faster; benchmarks/export_matrix.py has every preset, with
    # open sizes and in both formats.
    model = veca.create_model("tiny").eval()
    (entry,) = export_model(
        model, tmp_path, to="torch-export", cores=64, size=(64, 96), name="tiny"
    )
    assert entry.max_difference < 1e-3
    images = torch.randn(5, 3, 64, 96)
    with torch.no_grad():
        wanted = model(images).patches
    found = torch.export.load(entry.path).module()(images)["patches"]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path):
    """torch's own writer would end it, with C++ frames for a message."""
    script = (
        "import resource, sys, veca; from veca.export import export_model;"
        "model = veca.create_model('tiny', depth=1).eval();"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "export_model(model, sys.argv[1], to='torch-export', cores=8, size=(32, 32))"
    )
    pytest.importorskip("resource")
    found = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "out"], capture_output=True, text=True
    )
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("veca.errors.OutputError: ")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
