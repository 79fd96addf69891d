"""The exported page in a real browser: headless Chromium opens it, drops photos, moves the dials.

With VECA_SCREENSHOTS set to a folder, what the browser showed is kept there.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import browsers
from veca.errors import ExportError
from veca.export import browser_runtime, export_model, export_web, web

pytestmark = [
    *browsers.needed(onnxruntime="export", onnxscript="export"),
    pytest.mark.slow,
]
PATIENCE = 120_000  # milliseconds; a busy machine is not a fault


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def runtime():
    try:
        return browser_runtime.RUNTIME.find()
    except ExportError as error:
        pytest.skip(f"no runtime for browsers: {error}")


@pytest.fixture(scope="module")
def address(model, onnx_int8, runtime, tmp_path_factory):
    """A page with the small model, served as any file server would."""
    folder = tmp_path_factory.mktemp("page")
    options = {"precision": "fp16", "widen": True, "keep": "any", "check_sizes": [(224, 224)]}
    (half,) = export_model(model, folder / "half", **options)

    def copied(model, out, *, precision, **options):
        entry = onnx_int8 if precision == "int8" else half
        out.mkdir()
        path, report = (shutil.copy(one, out) for one in (entry.path, entry.report))
        return [web.replace(entry, path=Path(path), report=Path(report))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web, "export_model", copied)
        site = export_web(model, folder / "site", name="small").path
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with browsers.chromium() as browser:
        yield browser


class Visitor:
    """A page in a browser session of its own, which knows no other address."""

    def __init__(self, browser, address, width=1400, height=1000, instead=None, **options):
        viewport = {"width": width, "height": height}
        self.context = browser.new_context(viewport=viewport, **options)
        for path, content in (instead or {}).items():
            self.context.route(
                f"**/{path}", lambda route, _, body=content: route.fulfill(body=body)
            )
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address)
        self.settled(1)

    def settled(self, number):
        self.page.wait_for_selector(f"html[data-similar='{number}']")

    @property
    def runs(self):
        return int(self.page.get_attribute("html", "data-seen"))

    def move(self, dial, value):
        """Move a slider; waits for what comes of it."""
        before = self.runs
        self.page.locator(f"#{dial}").fill(str(value))
        self.settled(before + 1)

    def open(self, path):
        before = self.runs
        self.page.set_input_files("#file", str(path))
        self.settled(before + 1)

    def pixels(self, canvas):
        return self.page.evaluate(f"document.getElementById('{canvas}').toDataURL()")

    def features(self):
        found = self.page.evaluate(
            "veca.features().then(f => [[...f.cls], [...f.patches], f.grid])"
        )
        cls, patches, grid = found
        return torch.tensor(cls), torch.tensor(patches).view(grid[0] * grid[1], -1), grid

    def screenshot(self, name):
        folder = os.environ.get("VECA_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=str(Path(folder) / f"web-{name}.png"), full_page=True)


@pytest.fixture
def visit(browser, address):
    opened = []

    def visit(**options):
        opened.append(Visitor(browser, address, **options))
        return opened[-1]

    yield visit
    for visitor in opened:
        visitor.context.close()


@pytest.fixture
def photo(tmp_path):
    """Not square, and to be turned, as phones write them."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (7, 10, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((431, 299), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "phone.jpg", quality=92, exif=exif)
    return tmp_path / "phone.jpg"


def same(visitor, model, photo, size, cores, keep):
    cls, patches, grid = visitor.features()
    batch = model.preprocess(photo, size)
    with torch.no_grad():
        wanted = model(batch.pixels, cores=cores, keep=keep)
    assert tuple(grid) == batch.grid
    assert torch.cosine_similarity(cls, wanted.cls[0], dim=0) > 0.998
    assert torch.cosine_similarity(patches, wanted.patches[0], dim=1).mean() > 0.996


def test_a_photo_and_the_dials_give_pythons_features(visit, model, photo):
    visitor = visit()
    visitor.screenshot("start")
    assert visitor.page.inner_text("#message") == ""
    assert " agrees 0.99" in visitor.page.inner_text("#device-what")
    visitor.open(photo)
    same(visitor, model, photo, 384, 16, 1)
    seen = [(visitor.pixels("features"), visitor.page.inner_text("#tokens-what"))]
    for dial, value, point in (
        ("cores", 2, (384, 2, 1)),
        ("keep", 0.5, (384, 2, 0.5)),
        ("size", 160, (160, 2, 0.5)),
    ):
        visitor.move(dial, value)
        same(visitor, model, photo, *point)
        seen.append((visitor.pixels("features"), visitor.page.inner_text("#tokens-what")))
    assert len({picture for picture, _ in seen}) == len({text for _, text in seen}) + 1 == 4
    assert visitor.page.inner_text("#ms").endswith(" ms")
    assert "160" in visitor.page.inner_text("#ms-what")
    visitor.screenshot("photo")
    assert not visitor.errors


def test_a_click_shows_what_is_similar(visit):
    visitor = visit()
    before = visitor.pixels("similarity"), visitor.pixels("photo")
    visitor.page.click("#features", position={"x": 5, "y": 5})
    visitor.page.wait_for_timeout(300)
    after = visitor.pixels("similarity"), visitor.pixels("photo")
    assert before[0] != after[0] and before[1] != after[1]
    assert visitor.page.inner_text("#high") == "1.00"
    visitor.page.focus("#photo")
    for _ in range(5):
        visitor.page.keyboard.press("ArrowRight")
    visitor.page.wait_for_timeout(300)
    assert visitor.pixels("similarity") != after[0]


def test_a_text_file_renamed_gets_a_message(visit, tmp_path):
    visitor = visit()
    (tmp_path / "notes.jpg").write_text("not a photo")
    before = visitor.pixels("photo")
    visitor.page.set_input_files("#file", str(tmp_path / "notes.jpg"))
    visitor.page.wait_for_selector("#message:has-text('notes.jpg')")
    assert "image" in visitor.page.inner_text("#message")
    assert visitor.pixels("photo") == before
    visitor.screenshot("bad-file")
    visitor.move("cores", 3)  # it goes on
    assert not visitor.errors


def test_it_works_with_the_network_off_and_asks_nobody(visit, model, photo, address):
    visitor = visit()
    visitor.context.set_offline(True)
    visitor.open(photo)
    visitor.move("size", 128)
    same(visitor, model, photo, 128, 16, 1)
    assert all(url.startswith((address, "data:", "blob:")) for url in visitor.requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(visit, scheme):
    visitor = visit(width=390, height=844, color_scheme=scheme)
    assert visitor.page.evaluate("document.documentElement.scrollWidth") == 390
    back = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(int(part) for part in back[4:-1].split(",")) / 3
    assert lightness < 50 if scheme == "dark" else lightness > 200
    visitor.screenshot(f"phone-{scheme}")


@pytest.fixture
def visit_with_gpu(browser, address):
    """A visitor whose browser has WebGPU, computed by the processor."""
    with browsers.another(browser, browsers.WEBGPU) as with_gpu:

        def visit(**options):
            visitor = Visitor(with_gpu, address, **options)
            if visitor.page.locator("#run-on").is_hidden():
                pytest.skip("this Chromium has no WebGPU in software")
            return visitor

        yield visit


def on_gpu(visitor):
    before = visitor.runs
    visitor.page.select_option("#on", "webgpu")
    visitor.settled(before + 1)


def test_webgpu_gives_what_webassembly_gives(visit_with_gpu, model, photo):
    visitor = visit_with_gpu()
    assert visitor.page.inner_text("#device") == "WebAssembly"  # software is slower on a "GPU"
    visitor.open(photo)
    visitor.move("size", 128)
    plain = visitor.features()
    on_gpu(visitor)
    assert visitor.page.inner_text("#device") == "WebGPU"
    assert visitor.page.inner_text("#run-on-why") == ""
    same(visitor, model, photo, 128, 16, 1)
    for one, other in zip(plain[:2], visitor.features()[:2], strict=True):
        assert torch.cosine_similarity(one, other, dim=-1).mean() > 0.996
    visitor.move("keep", 0.5)
    same(visitor, model, photo, 128, 16, 0.5)
    assert not visitor.errors


def test_without_a_good_answer_from_webgpu_webassembly_goes_on(visit_with_gpu, model, photo):
    broken = {"webgpu/*.onnx": b"no network"}
    visitor = visit_with_gpu(instead=broken)
    visitor.open(photo)
    on_gpu(visitor)
    assert visitor.page.inner_text("#device") == "WebAssembly"
    assert "WebGPU is not used" in visitor.page.inner_text("#run-on-why")
    same(visitor, model, photo, 384, 16, 1)
    visitor.screenshot("no-webgpu")


def test_wrong_numbers_are_not_shown_as_if_they_were_right(visit_with_gpu, address):
    with urllib.request.urlopen(f"{address}about.json") as answer:
        about = json.load(answer)
    about["check"]["cls"] = [-value for value in about["check"]["cls"]]
    visitor = visit_with_gpu(instead={"about.json": json.dumps(about).encode()})
    assert "differs from Python" in visitor.page.inner_text("#message")
    on_gpu(visitor)
    assert visitor.page.inner_text("#device") == "WebAssembly"
    assert "other numbers" in visitor.page.inner_text("#run-on-why")
