"""What `export_model` refuses, and that nothing half-done is left behind."""

from __future__ import annotations

import os
import random
import shutil
import sys

import pytest
import torch

import veca
from conftest import SMALLEST
from veca.errors import InputError, MissingExtraError, OutputError
from veca.export import ExportError, api, export_model, load_exported, onnx_file, verify
from veca.export.api import _check
from veca.export.graph import frozen_copy


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"to": "onx"}, "'onx'"),
        ({"dtype": "bfloat16"}, "'bfloat16'"),
        ({"cores": 9}, "cores.* 9"),
        ({"cores": [4, 0]}, "cores.* 0"),
        ({"cores": "some"}, "'some'"),
        ({"cores": []}, "cores is empty"),
        ({"size": (64, 50)}, "64 x 50"),
        ({"check_sizes": [(8, 64)]}, "8 x 64"),
        ({"name": "../up"}, r"'\.\./up'"),
    ],
)
def test_bad_requests_are_refused_before_any_work(tiny, tmp_path, options, noun):
    with pytest.raises(InputError, match=noun):
        export_model(tiny, tmp_path / "out", **{"to": "torch-export", **options})
    assert not (tmp_path / "out").exists()


def test_only_models_are_exported(tmp_path):
    with pytest.raises(InputError, match="Linear"):
        export_model(torch.nn.Linear(2, 2), tmp_path)


def test_an_empty_path_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="''"):
        export_model(tiny, "", to="torch-export")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(OutputError, match="file/out"):
        export_model(tiny, tmp_path / "file" / "out", to="torch-export")


@pytest.mark.parametrize("name", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_extra_is_named(tiny, tmp_path, monkeypatch, name):
    for module in ("onnx", "onnxscript", "onnxruntime"):
        if module != name:
            monkeypatch.setitem(sys.modules, module, sys)  # any module will do
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"\b{name}\b.*\[export\]"):
        export_model(tiny, tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_that_no_onnx_file_holds(monkeypatch):
    with pytest.raises(ExportError, match=r"3\.0 GB"):
        onnx_file.check_fits(3 * 10**9)
    onnx_file.check_fits(1_300_000_000)  # the large preset


@pytest.mark.slow
def test_a_file_that_differs_is_not_kept(tmp_path, monkeypatch):
    shallow = veca.create_model(SMALLEST.replace(depth=1))
    old = tmp_path / "veca_cores4.pt2"
    old.write_bytes(b"old")
    report = tmp_path / "veca_cores4.pt2.json"
    report.write_text("{}")
    really = verify._difference
    monkeypatch.setattr(verify, "_difference", lambda *of: really(*of) + 2e-3)
    with pytest.raises(ExportError, match=r"veca_cores4\.pt2.* 0\.002"):
        export_model(shallow, tmp_path, to="torch-export", cores=4, check_sizes=[(32, 32)])
    assert sorted(p.name for p in tmp_path.iterdir()) == [old.name, report.name]
    assert old.read_bytes() == b"old"


def test_the_model_is_left_as_it_was(tmp_path):
    model = veca.create_model(SMALLEST).train()
    model.set_grad_checkpointing()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = frozen_copy(model, torch.float16)
    assert (copied.training, copied.backend, copied.gradient_checkpointing) == (
        False,
        "sdpa",
        False,
    )
    assert not any(p.requires_grad for p in copied.parameters())
    assert (model.training, model.backend, model.gradient_checkpointing) == (True, "auto", True)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# ---------------------------------------------------------------------------------------- verify


def made(difference, largest=1.0):
    names = ("cls", "patches", "core_tokens", "core_xy")
    return verify.FileCheck(
        1, 32, 32, 4, dict.fromkeys(names, difference), dict.fromkeys(names, largest)
    )


def test_what_passes():
    assert made(1e-3).passes(torch.float32)
    assert not made(1.1e-3, largest=100.0).passes(torch.float32)
    assert made(1.9, largest=100.0).passes(torch.float16)
    assert not made(2.1, largest=100.0).passes(torch.float16)
    assert not made(float("nan")).passes(torch.float32)


def test_nan_and_other_shapes_are_infinitely_different(tiny):
    tiny.requires_grad_(False)
    images = torch.randn(1, 3, 32, 32)
    wanted = tiny(images, cores=4)

    def run(images, cores):
        out = tiny(images, cores=cores)
        return {
            "cls": out.cls * torch.nan,
            "patches": out.patches[:, :3],
            "core_tokens": out.cores + 0.5,
            "core_xy": out.core_xy,
        }

    found = verify.check(run, tiny, images, 4).differences
    assert found["cls"] == found["patches"] == float("inf")
    assert found["core_tokens"] == pytest.approx(0.5, rel=1e-4)
    assert found["core_xy"] == 0
    largest = verify.check(run, tiny, images, 4).largest
    assert largest["core_tokens"] == float(wanted.cores.abs().max())


def test_sizes_come_onto_the_grid():
    assert verify.sizes_on_grid(16) == [(224, 224), (256, 384)]
    assert verify.sizes_on_grid(14) == [(224, 224), (252, 378)]
    assert verify.sizes_on_grid(256) == [(512, 512)]


def test_budgets_to_check():
    assert api._budgets_to_check(5, 64) == [5]
    assert api._budgets_to_check("any", 64) == [1, 8, 64]
    assert api._budgets_to_check("any", 4) == [1, 4]


def test_a_budget_asked_for_twice_is_one_file(tiny):
    assert _check(tiny, "torch-export", [4, 2, 4], None, "float32", "x", None) == [4, 2]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["onnx_any", "torch_any"])
def test_each_flipped_bit_of_a_file_is_seen(which, request, tmp_path):
    entry = request.getfixturevalue(which)
    good = entry.path.read_bytes()
    rng = random.Random(0)
    for beside in (True, False):  # with its report, and without one
        path = tmp_path / f"{beside}" / entry.path.name
        path.parent.mkdir()
        if beside:
            shutil.copy(entry.report, path.parent)
        path.write_bytes(good)
        wanted = load_exported(path)(torch.zeros(1, 3, 32, 32), 4).patches
        seen = 0
        for _ in range(20):
            damaged = bytearray(good)
            damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            try:
                found = load_exported(path)(torch.zeros(1, 3, 32, 32), 4).patches
            except ExportError:
                seen += 1
                continue
            assert not beside and torch.equal(wanted, found)  # in the padding of an archive
        assert seen == 20 if beside or which == "onnx_any" else seen > 10


@pytest.mark.slow
def test_a_pipe_and_a_report_that_is_none(onnx_any, tmp_path):
    for name in ("x.onnx", "x.pt2"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ExportError, match="pipe"):
            load_exported(tmp_path / name)
    shutil.copy(onnx_any.path, tmp_path / "y.onnx")
    (tmp_path / "y.onnx.json").write_text("[" * 100_000)
    with pytest.raises(ExportError, match=r"y\.onnx\.json"):
        load_exported(tmp_path / "y.onnx")
