"""The page of a large picture, from disk: tiles are shown, the slider fades, the pointer tells."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

import browsers
from veca import large
from veca.errors import LargeError
from veca.viz.large import VIEWER, large_page

pytestmark = [*browsers.needed(zarr="large")]


@pytest.mark.slow
def test_the_page_works_from_disk(tiny, tmp_path):
    try:
        VIEWER.find()
    except LargeError as error:
        pytest.skip(f"openseadragon cannot be had: {error}")
    rows, columns = np.mgrid[:600, :900]
    pixels = np.stack([rows // 3, columns // 4, rows * 0 + 90], axis=2).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    large.features(tiny, tmp_path / "photo.png", tmp_path / "f.zarr")
    page_file = large_page(large.FeatureStore(tmp_path / "f.zarr"), tmp_path / "page").page
    with browsers.chromium() as browser:
        for size in ({"width": 390, "height": 844}, {"width": 1400, "height": 900}):
            page = browser.new_page(viewport=size)
            said, wanted = [], []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.on("request", lambda request, wanted=wanted: wanted.append(request.url))
            page.goto(page_file.as_uri())
            loaded = (
                "viewer.world.getItemCount() == 2 && viewer.world.getItemAt(0).getFullyLoaded()"
            )
            for _ in range(200):  # the page's own policy keeps the browser from waiting for it
                if page.evaluate(loaded):
                    break
                page.wait_for_timeout(50)
            assert page.evaluate(loaded)
            assert not said and all(url.startswith(("file:", "data:", "blob:")) for url in wanted)
            page.locator("#share").fill("25")
            assert page.evaluate("viewer.world.getItemAt(1).getOpacity()") == 0.25
            box = page.locator("#view").bounding_box()
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            place = page.locator("#place").inner_text()
            x, y = (int(part.split()[1]) for part in place.split(", "))
            assert abs(x - 450) < 20 and abs(y - 300) < 20
            before = page.evaluate("viewer.viewport.getZoom()")
            page.locator("#in").click()
            assert page.evaluate("viewer.viewport.getZoom()") > before
            wide = "document.documentElement.scrollWidth <= innerWidth"
            assert page.evaluate(wide)
            page.close()
