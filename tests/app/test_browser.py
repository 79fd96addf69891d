"""The demo in a real browser: headless Chromium opens it, drops photos and moves the slider.

With VECA_SCREENSHOTS set to a folder, what the browser showed is kept there.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import browsers
from conftest import SMALLEST, stirred
from veca import cost, create_model, save
from veca.embed.writers.files import read_features

pytestmark = browsers.needed(gradio="demo")
PATIENCE = 60_000  # milliseconds; a busy machine is not a fault


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    from veca.app.serve import running

    folder = tmp_path_factory.mktemp("weights")
    weights = str(save(stirred(create_model(SMALLEST)), folder / "small"))
    with running([weights]) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with browsers.chromium() as browser:
        yield browser


class Visitor:
    """A page in a browser session of its own."""

    def __init__(self, browser, address, width=1500, height=1200, **options):
        viewport = {"width": width, "height": height}
        self.context = browser.new_context(viewport=viewport, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.requests: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.wait_for_numbers("patches")

    def wait_for_numbers(self, text):
        self.page.wait_for_function(
            "text => document.querySelector('#numbers')?.innerText.includes(text)", arg=text
        )

    def wait_for_message(self, text):
        self.page.wait_for_function(
            "text => document.querySelector('#message')?.innerText.includes(text)", arg=text
        )

    def numbers(self):
        return self.page.inner_text("#numbers")

    def message(self):
        return self.page.inner_text("#message")

    def picture(self, name):
        """The hash of the bytes that a picture on the page was loaded from."""
        source = self.page.get_attribute(f"#{name} img", "src")
        return hashlib.sha256(self.page.request.get(source).body()).hexdigest()

    # Pictures arrive with the answer, but not all at the same instant.
    def wait_for_picture(self, name, wanted):
        self._poll(lambda: self.picture(name) == wanted, f"{name} is not as before")

    def wait_for_other_picture(self, name, before):
        self._poll(lambda: self.picture(name) != before, f"{name} did not change")

    def _poll(self, done, complaint):
        end = time.monotonic() + PATIENCE / 1000
        while not done():
            assert time.monotonic() < end, complaint
            self.page.wait_for_timeout(50)

    def slide(self, name, value):
        box = self.page.locator(f"#{name} input[type=number]")
        box.fill(str(value))
        box.press("Enter")

    def drop(self, path):
        self.page.set_input_files("#upload input[type=file]", str(path))

    def screenshot(self, name):
        folder = os.environ.get("VECA_SCREENSHOTS")
        if folder:
            self.page.wait_for_timeout(1000)  # for pictures on their way
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.fixture
def visitor(browser, address):
    visitor = Visitor(browser, address)
    yield visitor
    visitor.context.close()


@pytest.fixture
def photo(tmp_path, noise):
    path = tmp_path / "noise.jpg"
    noise(200, 120).save(path)
    return path


@pytest.mark.slow
def test_a_photo_a_slider_and_what_changes(visitor, photo):
    visitor.screenshot("start")
    visitor.drop(photo)
    visitor.wait_for_numbers("noise at 512 x 848 px")
    visitor.slide("size", 128)
    visitor.wait_for_numbers("noise at 128 x 208 px")
    visitor.slide("cores", 8)
    visitor.wait_for_numbers("VECA, 8 cores")
    before = {name: visitor.picture(name) for name in ("features", "paths", "photo")}
    visitor.slide("cores", 2)
    visitor.wait_for_numbers("VECA, 2 cores")
    for name in ("features", "paths"):
        visitor.wait_for_other_picture(name, before[name])
    assert visitor.picture("photo") == before["photo"]
    assert f"{cost(SMALLEST, (128, 208), 2).veca.interactions:,}" in visitor.numbers()
    assert "dense features, 2 cores" in visitor.page.inner_text("#features")
    visitor.screenshot("two-cores")
    # Back where it was: the same pictures, to the byte.
    visitor.slide("cores", 8)
    visitor.wait_for_numbers("VECA, 8 cores")
    for name in ("features", "paths"):
        visitor.wait_for_picture(name, before[name])
    elsewhere = [
        url
        for url in visitor.requests
        if not url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:"))
    ]
    assert elsewhere == []


@pytest.mark.slow
def test_the_second_slider_merges_patches(visitor):
    visitor.slide("size", 256)
    visitor.wait_for_numbers("at 256 x")
    before = {name: visitor.picture(name) for name in ("features", "merged")}
    visitor.slide("keep", 0.4)
    visitor.wait_for_numbers("keep 0.4")
    for name, picture in before.items():
        visitor.wait_for_other_picture(name, picture)
    assert "of 256 patch tokens go on" in visitor.page.inner_text("#merged")
    visitor.screenshot("merged")
    visitor.slide("keep", 1)
    for name, picture in before.items():
        visitor.wait_for_picture(name, picture)


@pytest.mark.slow
def test_a_text_file_called_jpg_gets_a_message(visitor, photo, tmp_path):
    before = visitor.numbers()
    text = tmp_path / "holiday.jpg"
    text.write_text("This is not a photo.\n")
    visitor.drop(text)
    visitor.wait_for_message("holiday.jpg")
    visitor.screenshot("bad-file")
    assert "Traceback" not in visitor.page.content() and str(tmp_path) not in visitor.message()
    # The photo before it is still there, with its numbers.
    assert visitor.numbers() == before
    visitor.drop(photo)
    visitor.wait_for_numbers("noise at")
    assert "holiday.jpg" not in visitor.message()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(4000, 3000), (40, 30)])
def test_large_and_small_photos(visitor, tmp_path, size):
    path = tmp_path / "teal.png"
    Image.new("RGB", size, "teal").save(path)
    visitor.slide("size", 128)
    visitor.wait_for_numbers("at 128 x")
    visitor.drop(path)
    visitor.wait_for_numbers("teal at 128 x 176 px")


@pytest.mark.slow
def test_a_click_compares_and_a_button_downloads(visitor, tmp_path):
    visitor.slide("size", 128)
    visitor.wait_for_numbers("at 128 x")
    before = visitor.picture("similarity")
    visitor.page.locator("#photo img").click(position={"x": 40, "y": 50})
    visitor.wait_for_other_picture("similarity", before)
    assert "cosine with the marked patch" in visitor.page.inner_text("#similarity")
    visitor.screenshot("click")
    visitor.slide("cores", 3)
    visitor.wait_for_numbers("VECA, 3 cores")
    with visitor.page.expect_download() as download:
        visitor.page.click("#download")
    target = tmp_path / "features.npz"
    download.value.save_as(target)
    content = read_features(target)
    assert content["cores"] == 3 and content["patches"].shape == (8, 8, SMALLEST.width)
    assert np.isfinite(content["patches"]).all()


@pytest.mark.slow
def test_bundled_photos_layers_cores_and_weights(visitor):
    visitor.slide("size", 128)
    visitor.wait_for_numbers("at 128 x")
    visitor.page.locator("#gallery button img").nth(2).click()
    visitor.wait_for_numbers("chelsea at 128 x")
    before = visitor.picture("attention")
    visitor.slide("layer", 1)
    visitor.wait_for_other_picture("attention", before)
    before = visitor.picture("attention")
    visitor.slide("core", 2)
    visitor.wait_for_other_picture("attention", before)
    assert "attention of core 2 of 8, layer 1" in visitor.page.inner_text("#attention")
    visitor.page.click("#weights input")
    visitor.page.click("text=fresh tiny weights (random)")
    visitor.wait_for_message("fresh random weights")
    visitor.wait_for_numbers("fresh tiny weights")
    assert visitor.page.locator("#cores input[type=range]").get_attribute("max") == "64"


@pytest.mark.slow
def test_two_visitors_see_their_own_photos(browser, address, visitor, photo):
    other = Visitor(browser, address)
    try:
        for one in (visitor, other):
            one.slide("size", 128)
            one.wait_for_numbers("at 128 x")
        visitor.drop(photo)
        other.page.locator("#gallery button img").nth(3).click()
        visitor.wait_for_numbers("noise at 128 x")
        other.wait_for_numbers("coffee at 128 x")
        visitor.slide("cores", 2)
        other.slide("cores", 5)
        visitor.wait_for_numbers("VECA, 2 cores")
        other.wait_for_numbers("VECA, 5 cores")
        assert "noise" in visitor.numbers() and "coffee" in other.numbers()
        assert visitor.picture("photo") != other.picture("photo")
    finally:
        other.context.close()


@pytest.mark.slow
def test_a_file_over_the_limit_gets_a_message(visitor, tmp_path):
    path = tmp_path / "endless.jpg"
    with path.open("wb") as file:
        file.truncate(26 * 2**20)
    visitor.drop(path)
    visitor.page.wait_for_selector("text=maximum allowed size")
    visitor.screenshot("too-large")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_and_the_sliders_stay(browser, address, scheme, tmp_path):
    phone = Visitor(browser, address, 390, 844, color_scheme=scheme)
    try:
        page = phone.page
        text = tmp_path / "holiday.jpg"
        text.write_text("This is not a photo.\n")
        phone.drop(text)
        phone.wait_for_message("holiday.jpg")
        phone.screenshot(f"phone-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        too_wide = """() => [...document.querySelectorAll('#numbers td, #message, .picture')]
            .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > 390).length"""
        assert page.evaluate(too_wide) == 0
        page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
        place = page.locator("#cores input[type=range]").bounding_box()
        assert 0 <= place["y"] < 150 and page.evaluate("window.scrollY") > 844
        other = page.locator("#keep input[type=range]").bounding_box()
        assert 0 <= other["y"] < 150 and other["x"] + other["width"] <= 390
        colours = page.evaluate(
            "[getComputedStyle(document.querySelector('#message .error')).backgroundColor,"
            " getComputedStyle(document.body).backgroundColor]"
        )
        for colour in colours:
            level = sum(map(float, re.findall(r"[0-9.]+", colour)[:3])) / 3
            assert level < 100 if scheme == "dark" else level > 155, colours
    finally:
        phone.context.close()
