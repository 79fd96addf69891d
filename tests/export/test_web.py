"""The page for browsers: its files, its runtime, and what is refused."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile

import numpy as np
import pytest
from PIL import Image

import veca
from conftest import SMALLEST
from veca._util.npm import NpmPackage
from veca.errors import ExportError, InputError, OutputError
from veca.export import browser_runtime, export_web, web
from veca.images.bundled import bundled_photos
from veca.images.fit import target_size

pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
RUNTIME = (*browser_runtime.WASM, *browser_runtime.WEBGPU)


@pytest.fixture
def package(tmp_path):
    """What npm would install, with other content."""
    folder = tmp_path / "onnxruntime-web"
    (folder / "dist").mkdir(parents=True)
    for name in RUNTIME:
        (folder / "dist" / name).write_text(f"// {name}")
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Exporting without tracing: a file of the right name."""

    def export_model(model, out, *, precision, **options):
        out.mkdir(parents=True)
        path = out / f"veca_{precision}.onnx"
        path.write_bytes(b"model")
        (out / f"{path.name}.json").write_text("{}")
        return [
            web.Exported(
                *(path, out / f"{path.name}.json", "onnx", "any", "any", precision),
                size=None,
                bytes=5,
                checks=(),
            )
        ]

    monkeypatch.setattr(web, "export_model", export_model)


def test_a_folder_with_all_that_a_page_needs(tiny, tmp_path, package, quick):
    site = export_web(tiny, tmp_path / "site", name="mine", ort=package)
    files = {p.relative_to(site.path).as_posix() for p in site.path.rglob("*") if p.is_file()}
    assert {"index.html", "style.css", "app.js", "worker.js", "wasm/veca_int8.onnx"} <= files
    assert {f"ort/{name}" for name in RUNTIME} <= files
    about = json.loads((site.path / "about.json").read_text())
    assert (about["name"], about["num_cores"], about["width"]) == ("mine", 8, 32)
    assert [about["models"][d]["file"] for d in ("wasm", "webgpu")] == [
        "wasm/veca_int8.onnx",
        "webgpu/veca_fp16.onnx",
    ]
    assert all((site.path / photo).is_file() for photo in about["photos"])
    wanted = tiny.preprocess(bundled_photos()[about["first"]], 224).pixels
    np.testing.assert_allclose(about["check"]["cls"], tiny(wanted).cls[0].detach(), atol=1e-4)
    assert site.bytes == sum((site.path / name).stat().st_size for name in files)
    assert all(entry.path.is_file() and entry.report.is_file() for entry in site.models)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["onnxruntime-web", "site"]


def test_the_page_asks_for_nothing_elsewhere():
    for path in web.PAGE.iterdir():
        text = path.read_text()
        assert "://" not in text and "eval(" not in text, path.name
    assert "default-src 'self'" in (web.PAGE / "index.html").read_text()


def test_a_folder_that_holds_something(tiny, tmp_path, package, quick):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        export_web(tiny, tmp_path / "site", ort=package)
    assert [p.name for p in (tmp_path / "site").iterdir()] == ["mine.txt"]
    with pytest.raises(OutputError, match="is a file"):
        export_web(tiny, tmp_path / "site" / "mine.txt", ort=package)
    (tmp_path / "empty").mkdir()
    assert export_web(tiny, tmp_path / "empty", ort=package).path == tmp_path / "empty"


def test_nothing_is_left_of_what_fails(tiny, tmp_path, package, monkeypatch):
    def fails(*_, **__):
        raise ExportError("below the gate")

    monkeypatch.setattr(web, "export_model", fails)
    with pytest.raises(ExportError, match="gate"):
        export_web(tiny, tmp_path / "a" / "site", ort=package)
    assert [p.name for p in tmp_path.iterdir()] == ["onnxruntime-web"]


def test_bad_requests(tiny, tmp_path, package):
    with pytest.raises(InputError, match="'bf16'"):
        export_web(tiny, tmp_path / "site", precision="bf16", ort=package)
    grey = veca.create_model(SMALLEST.replace(in_channels=1))
    with pytest.raises(InputError, match="photos"):
        export_web(grey, tmp_path / "site", ort=package)
    with pytest.raises(ExportError, match="nowhere"):
        export_web(tiny, tmp_path / "site", ort=tmp_path / "nowhere")
    assert not (tmp_path / "site").exists()


# ---------------------------------------------------------------------------------- the runtime


def archive(folder, names=RUNTIME):
    path = folder / "x.tgz"
    with tarfile.open(path, "w:gz") as held:
        for name in names:
            entry = tarfile.TarInfo(f"package/dist/{name}")
            entry.size = len(name)
            held.addfile(entry, io.BytesIO(name.encode()))
    return path


def test_the_runtime_from_folders_and_archives(tmp_path, package):
    for place in (package, package / "dist"):
        found = browser_runtime.RUNTIME.find(place)
        assert found["ort.wasm.min.mjs"] == b"// ort.wasm.min.mjs"
    assert set(browser_runtime.RUNTIME.find(archive(tmp_path))) == set(RUNTIME)
    with pytest.raises(ExportError, match="archive"):
        browser_runtime.RUNTIME.find(archive(tmp_path, RUNTIME[:2]))
    (package / "dist" / RUNTIME[0]).unlink()
    with pytest.raises(ExportError, match=r"ort\.wasm\.min\.mjs"):
        browser_runtime.RUNTIME.find(package)


def npm(folder, script):
    (folder / "bin").mkdir()
    path = folder / "bin" / "npm"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path.parent)


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands for npm")
def test_npm_that_is_missing_or_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("VECA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExportError, match=r"npm.*--ort"):
        browser_runtime.RUNTIME.find()
    monkeypatch.setenv("PATH", npm(tmp_path, "echo 'npm error code E404' >&2; exit 1"))
    with pytest.raises(ExportError, match=r"E404.*--ort"):
        browser_runtime.RUNTIME.find()
    other = archive(tmp_path)
    (tmp_path / "bin" / "npm").write_text(f"#!/bin/sh\n/bin/cp {other} .\n")
    with pytest.raises(ExportError, match="sha512"):
        browser_runtime.RUNTIME.find()
    assert not (tmp_path / "cache" / "web").exists()
    # What npm brings is kept, and taken from there when npm is gone.
    monkeypatch.setattr(NpmPackage, "is_genuine", lambda self, content: len(content) > 0)
    assert set(browser_runtime.RUNTIME.find()) == set(RUNTIME)
    (tmp_path / "bin" / "npm").unlink()
    assert set(browser_runtime.RUNTIME.find()) == set(RUNTIME)


# ---------------------------------------------------------------------------------- in JavaScript

_NODE = """
import { fittedSize, onWhite, resize } from './images.js';
import fs from 'fs';
const { height, width, size, patch } = JSON.parse(process.argv[2]);
const [h, w] = fittedSize(height, width, size, patch);
const rgb = onWhite(new Uint8Array(fs.readFileSync('in.bin')));
fs.writeFileSync('out.bin', resize(rgb, height, width, h, w));
console.log(JSON.stringify([h, w]));
"""


@pytest.mark.skipif(not shutil.which("node"), reason="Node.js is not installed")
@pytest.mark.parametrize(
    ("shape", "size"), [((40, 60), 96), ((61, 33), 32), ((48, 48), 48), ((20, 300), 17)]
)
def test_the_page_fits_photos_to_the_byte_as_python_does(tmp_path, shape, size):
    shutil.copy(web.PAGE / "images.js", tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "run.js").write_text(_NODE)
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    pixels.tofile(tmp_path / "in.bin")
    request = {"height": shape[0], "width": shape[1], "size": size, "patch": 16}
    done = subprocess.run(
        ["node", "run.js", json.dumps(request)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    height, width = target_size(*shape, size, "resize", 16)
    assert json.loads(done.stdout) == [height, width]
    image = Image.fromarray(pixels[..., :3].copy())
    wanted = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    found = np.fromfile(tmp_path / "out.bin", np.uint8).reshape(height, width, 3)
    np.testing.assert_array_equal(found, wanted)
