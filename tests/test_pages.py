"""Every page that a command writes, opened from the disk in a browser, on a phone and in the dark.

With VECA_SCREENSHOTS set to a folder, what the browser showed is kept there.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import browsers
from conftest import SMALLEST, stirred
from veca import bench, create_model, save, viz
from veca.embed import Match, contact_sheet
from veca.probe import write_report
from veca.probe.intervals import Interval
from veca.probe.record import Row, Run, write_run
from veca.quickstart import bundled_photos, quickstart

pytestmark = browsers.needed()
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1400, "height": 900}
SHOTS = os.environ.get("VECA_SCREENSHOTS")


def _row(cores: int | None, score: float, interval: Interval | None) -> Row:
    return Row(
        name="a_network_with_a_rather_long_name",
        role="student",
        cores=cores,
        size=224,
        input=(224, 224),
        grid=(14, 14),
        metrics={"top1": score},
        retention_teacher=0.9,
        retention_full=score / 0.8,
        interactions=400 * (cores or 1),
        flops=10**9,
        ms=7.0,
        spread_ms=0.1,
        interval=interval,
        interval_full=interval and (0.9, 0.99),
    )


def _run(rows: list[Row], task: str = "knn") -> Run:
    machine = {"cpu": "a CPU", "gpu": "", "threads": 1, "python": "3.11", "torch": "2.13"}
    return Run(
        task=task,
        dataset={"name": "pets"},
        protocol={"name": "quick", "description": "minutes on a CPU"},
        backbones={},
        rows=rows,
        notes=["a note"],
        seconds={"features": 1.0, "total": 2.0},
        cache={"decoded": 5},
        machine={**machine, "veca": "0.1", "date": "2026-01-02"},
        command="veca probe knn --data a/folder/with/a/long/name --dataset oxford-pets --weights w",
        resampling={"share": 0.95, "draws": 2000, "drawn": "images", "of": 1000},
    )


def _probes(folder: Path) -> Path:
    known = [_row(c, s, (s - 0.02, s + 0.02)) for c, s in ((8, 0.78), (64, 0.8))]
    write_run(_run(known), folder / "runs" / "a")
    write_run(_run([_row(8, 0.5, None)], "linear"), folder / "runs" / "b")
    return write_report(folder / "runs", command="veca report runs").page


def _search(folder: Path) -> Path:
    matches = [
        Match(str(photo), 0.9 - i / 10) for i, photo in enumerate([*bundled_photos(), "gone/a.jpg"])
    ]
    return contact_sheet(folder / "search.html", bundled_photos()[0], matches, command="veca s")


def _report(folder: Path) -> Path:
    model = stirred(create_model(SMALLEST))
    views = [viz.View(model, photo, 64, height=80) for photo in bundled_photos()[:2]]
    options = viz.Options(cores=[2, 8], sizes=[32, 64], layers=[1, 3])
    return viz.report(views, folder / "report", options, command="veca viz report a b").page


def _quickstart(folder: Path) -> Path:
    weights = str(save(stirred(create_model(SMALLEST)), folder / "weights"))
    with pytest.MonkeyPatch.context() as patch:
        init = bench.BenchPlan.__init__

        def quick(self, **kwargs):
            init(self, **{**kwargs, "repeats": 1, "seconds": 0.0})

        patch.setattr(bench.BenchPlan, "__init__", quick)
        photos = bundled_photos()[:1]
        return quickstart(folder / "first", photos, weights=weights, size=64, command="veca q").page


def _figure(folder: Path) -> Path:
    view = viz.View(stirred(create_model(SMALLEST)), bundled_photos()[0], 64, height=80)
    return viz.draw_features([view], [2, 8]).save(folder / "f.html", command="veca viz features")


MAKERS = {
    "probes": _probes, "search": _search, "report": _report, "quickstart": _quickstart,
    "figure": _figure,
}  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with browsers.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Each page, made once."""
    made: dict[str, Path] = {}

    def page(name: str) -> Path:
        if name not in made:
            made[name] = MAKERS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return page


class Tab:
    """A page in a browser session of its own; whatever it asks for, or complains of, is kept."""

    def __init__(self, browser, path, size, scheme="light"):
        self.context = browser.new_context(viewport=size, color_scheme=scheme)
        self.page = self.context.new_page()
        self.asked, self.complaints = [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.resolve().as_uri())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def value(self, script):
        return self.page.evaluate(script)

    def keep(self, name):
        if SHOTS:
            self.page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_a_page_fits_a_phone_and_asks_nobody(browser, pages, name):
    path = pages(name)
    every = [(size, scheme) for size in (PHONE, DESK) for scheme in ("light", "dark")]
    for size, scheme in every if SHOTS else every[1:3]:
        with Tab(browser, path, size, scheme) as tab:
            tab.keep(f"{name}-{size['width']}-{scheme}")
            width = tab.value("document.documentElement.scrollWidth")
            assert width <= tab.value("innerWidth") == size["width"]
            assert tab.complaints == []
            assert all(url.startswith(("file:", "data:")) for url in tab.asked)
            background = tab.value("getComputedStyle(document.body).backgroundColor")
            channels = [int(c) for c in background.strip("rgb()").split(",")]
            assert (max(channels) < 64) == (scheme == "dark")
            assert tab.page.inner_text("footer code").startswith("veca ")
            for image in tab.page.locator("img").all():
                assert image.evaluate("i => i.complete && i.naturalWidth > 0")


@pytest.mark.slow
def test_wide_tables_scroll_inside_themselves(browser, pages):
    with Tab(browser, pages("probes"), PHONE) as tab:
        table = tab.page.locator(".table").first
        assert table.evaluate("t => t.scrollWidth > t.clientWidth")
        table.evaluate("t => t.scrollLeft = 200")
        assert tab.value("scrollX") == 0
        # The names of the rows stay in view.
        assert table.locator("td").first.evaluate("c => c.getBoundingClientRect().left") >= 0


@pytest.mark.slow
def test_panels_show_their_part_of_the_picture(browser, pages):
    """What the page shows of each panel is the panel."""
    with Tab(browser, pages("report"), DESK) as tab:
        zooms = tab.page.locator(".panels").first.locator(".zoom")
        panels = [_small(Image.open(io.BytesIO(zooms.nth(i).screenshot()))) for i in (0, 1)]
    photo = _small(Image.open(bundled_photos()[0]))
    near, far = (np.abs(panel - photo).mean() for panel in panels)
    assert near < 8 and far > 30


def _small(picture):
    return np.array(picture.convert("RGB").resize((24, 24), Image.Resampling.BOX)).astype(float)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["report", "search", "probes"])
def test_a_click_enlarges_arrows_go_on_and_escape_closes(browser, pages, name):
    with Tab(browser, pages(name), PHONE) as tab:
        page = tab.page
        zooms = page.locator("[data-group]").nth(1 if name == "search" else 0).locator(".zoom")
        assert not page.locator("dialog").is_visible()
        small = zooms.first.locator("svg, img").bounding_box()
        zooms.first.focus()
        page.keyboard.press("Enter")
        assert page.locator("dialog").is_visible()
        large = page.locator(".stage svg, .stage img").bounding_box()
        assert large["width"] > 1.05 * small["width"] and large["height"] < PHONE["height"]
        if name != "search":  # whose small pictures stand in frames of one shape
            shape, wanted = (box["width"] / box["height"] for box in (large, small))
            assert shape == pytest.approx(wanted, rel=0.02)
        for box in (large, page.locator(".lightbox .close").bounding_box()):
            assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
        titles = [page.inner_text(".lightbox .title")]
        for key in ("ArrowRight", "ArrowLeft"):
            page.keyboard.press(key)
            titles.append(page.inner_text(".lightbox .title"))
        assert titles[0] == titles[2] != titles[1]
        page.keyboard.press("Escape")
        assert not page.locator("dialog").is_visible()
        # The keyboard is where it was.
        assert zooms.first.evaluate("z => z === document.activeElement")
        zooms.first.click()
        page.locator(".lightbox .close").click()
        assert not page.locator("dialog").is_visible()
        assert tab.complaints == []


@pytest.mark.slow
def test_contents_stand_beside_the_page_or_fold_above_it(browser, pages):
    from playwright.sync_api import expect

    with Tab(browser, pages("quickstart"), DESK) as tab:
        assert tab.page.locator(".contents a").first.is_visible()
        last = tab.page.locator("main h2").last
        expect(last).not_to_be_in_viewport()
        tab.page.locator(".contents a").last.click()
        expect(last).to_be_in_viewport()
    with Tab(browser, pages("quickstart"), PHONE) as tab:
        links = tab.page.locator(".contents a")
        assert not links.first.is_visible()
        tab.page.locator(".contents summary").click()
        assert links.first.is_visible() and links.count() >= 5


@pytest.mark.slow
def test_a_result_leads_to_its_photo(browser, pages):
    with Tab(browser, pages("search"), DESK) as tab:
        links = tab.page.locator(".card a")
        assert links.count() == 1 + len(bundled_photos())
        links.nth(1).click()
        tab.page.wait_for_url("**/astronaut.jpg")
