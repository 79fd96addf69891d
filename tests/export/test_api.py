"""What `export_model` refuses, and that nothing half-done is left behind."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import sys

import pytest
import torch
from PIL import Image

import veca
from conftest import SMALLEST
from veca.errors import ImageError, InputError, MissingExtraError, OutputError
from veca.export import ExportError, api, export_model, load_exported, onnx_file, verify
from veca.export.api import _check
from veca.export.graph import OUTPUTS, frozen_copy
from veca.export.precision import GATES, check_gate, check_precisions
from veca.images.bundled import bundled_photos
from veca.precision import at_precision


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"to": "onx"}, "'onx'"),
        ({"dtype": "bfloat16"}, "'bfloat16'"),
        ({"precision": "int4"}, "'int4'.*'int8'"),
        ({"precision": []}, "precision"),
        ({"precision": "int8"}, "ONNX"),
        ({"gate": 0.9}, "gate"),
        ({"precision": "fp16", "gate": 2}, "gate"),
        ({"precision": "fp16", "gate": (0.9, 0.9, 0.9)}, "gate"),
        ({"precision": "fp16", "gate": float("nan")}, "gate"),
        ({"cores": 9}, "cores.* 9"),
        ({"cores": [4, 0]}, "cores.* 0"),
        ({"cores": "some"}, "'some'"),
        ({"cores": []}, "cores is empty"),
        ({"size": (64, 50)}, "64 x 50"),
        ({"check_sizes": [(8, 64)]}, "8 x 64"),
        ({"name": "../up"}, r"'\.\./up'"),
        ({"keep": 0}, "keep"),
        ({"keep": 1.5}, "keep"),
        ({"keep": "half"}, "keep"),
        ({"keep": float("nan")}, "keep"),
        ({"keep": "auto"}, "auto"),
    ],
)
def test_bad_requests_are_refused_before_any_work(tiny, tmp_path, options, noun):
    with pytest.raises(InputError, match=noun):
        export_model(tiny, tmp_path / "out", **{"to": "torch-export", **options})
    assert not (tmp_path / "out").exists()


def test_a_model_in_low_precision_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match=r"int8.*float32 model"):
        export_model(at_precision(tiny, "int8", compile=False), tmp_path / "out")
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


def each(value, name):
    return value[name] if isinstance(value, dict) else value


def made(difference=0.0, agreement=1.0, **changes):
    names = ("cls", "patches", "core_tokens", "core_xy")
    check = verify.FileCheck(
        *(1, 32, 32, 4, 1.0),
        differences=dict.fromkeys(names, difference),
        largest=dict.fromkeys(names, 1.0),
        agreement={name: each(agreement, name) for name in names[:3]},
    )
    return dataclasses.replace(check, **changes)


def test_what_passes_in_float32():
    assert made(1e-3).wrong(None) is None
    assert "differ" in made(1.1e-3).wrong(None)
    assert "differ" in made(float("nan")).wrong(None)


def test_what_passes_a_gate():
    gate = GATES["int8"]
    assert made(0.05, 0.998).wrong(gate) is None
    assert "cls" in made(0.05, 0.997).wrong(gate)
    parts = {"cls": 0.999, "patches": 0.995, "core_tokens": 1.0}
    assert "patches" in made(agreement=parts).wrong(gate)
    assert "0.9950" in made(agreement=parts).wrong(gate)
    assert "core_tokens" in made(agreement={**parts, "patches": 1, "core_tokens": 0.9}).wrong(gate)
    assert "cls" in made(agreement=float("nan")).wrong(gate)
    places = {"cls": 9.0, "patches": 9.0, "core_tokens": 9.0, "core_xy": 0.2}
    assert "stand" in made(differences=places).wrong(gate)


def test_a_gate_holds_for_the_mean_of_the_photos():
    assert verify.looser(GATES["int8"]) == pytest.approx((0.99, 0.98))
    one = dataclasses.replace(made(agreement=0.9), batch=1)
    three = dataclasses.replace(made(difference=0.5), batch=3)
    other = dataclasses.replace(made(agreement=0.5), keep=0.5)
    mean, alone = verify.by_point([one, other, three])
    assert (mean.batch, mean.keep) == (4, 1) and alone == other
    assert mean.agreement["cls"] == pytest.approx(0.975) and mean.differences["cls"] == 0.5


def test_gates():
    assert check_gate(None, "int8") == (0.998, 0.996)
    assert check_gate(0.9, "fp16") == (0.9, 0.9)
    assert check_gate((0.9, 0.8), "bf16") == (0.9, 0.8)
    assert check_gate(None, "fp32") is None


def test_the_name_of_0_1_for_a_precision():
    with pytest.warns(DeprecationWarning, match="precision='fp16'"):
        assert check_precisions("fp32", "float16") == ["fp16"]
    assert check_precisions(["int8", "fp32", "int8"]) == ["int8", "fp32"]


@pytest.mark.slow
def test_below_the_gate_nothing_is_written(tmp_path):
    shallow = veca.create_model(SMALLEST.replace(depth=1))
    options = {"to": "torch-export", "cores": 4, "precision": "bf16", "size": (32, 32)}
    with pytest.raises(ExportError, match=r"veca_cores4_32x32_bfloat16.* 1\b.*fp32"):
        export_model(shallow, tmp_path / "out", gate=1.0, **options)
    assert not (tmp_path / "out").exists()
    (entry,) = export_model(shallow, tmp_path / "out", gate=0.5, **options)
    assert entry.dtype == "bfloat16" and 0.5 < entry.agreement.cls < 1
    assert load_exported(entry.path)(torch.zeros(1, 3, 32, 32)).patches.dtype == torch.bfloat16


def test_photos_are_a_users_own_or_ours(tiny, tmp_path):
    assert [path.suffix for path in verify.photos_for(None)] == [".jpg"] * 5
    Image.new("RGB", (40, 40), "red").save(tmp_path / "a.png")
    assert verify.photos_for(str(tmp_path)) == [tmp_path / "a.png"]
    with pytest.raises(ImageError, match="nothing"):
        export_model(tiny, tmp_path / "out", data=str(tmp_path / "nothing"))
    seen = []

    def run(images, cores, keep):
        seen.append(images)
        out = tiny(images, cores=cores, keep=keep)
        return dict(zip(OUTPUTS, (out.cls, out.patches, out.cores, out.core_xy), strict=True))

    with torch.no_grad():
        found = list(verify.checks(run, tiny, cores=[1, 4], keeps=[1, 0.5], sizes=[(32, 48)]))
    assert [(c.batch, c.cores, c.keep) for c in found] == [
        (batch, cores, keep) for batch in (1, 3) for cores in (1, 4) for keep in (1, 0.5)
    ]
    assert all(check.wrong(None) is None for check in found)
    first, second = (tiny.preprocess(path, (32, 48)).pixels for path in bundled_photos()[:2])
    assert torch.equal(seen[0], first) and torch.equal(seen[-1][:1], second)  # the next ones


def test_nan_and_other_shapes_are_infinitely_different(tiny):
    tiny.requires_grad_(False)
    images = torch.randn(1, 3, 32, 32)
    wanted = tiny(images, cores=4)

    def run(images, cores, keep):
        out = tiny(images, cores=cores)
        return {
            "cls": out.cls * torch.nan,
            "patches": out.patches[:, :3],
            "core_tokens": out.cores + 0.5,
            "core_xy": out.core_xy,
        }

    check = verify.check(run, tiny, images, 4)
    found = check.differences
    assert not check.agreement["cls"] >= 0 and check.agreement["patches"] == -1
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
    assert _check(tiny, "torch-export", [4, 2, 4], None, ["fp32"], "x", None) == [4, 2]


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
