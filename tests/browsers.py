"""A headless Chromium for tests marked `browser`.

They are skipped where playwright or a Chromium cannot be had; the reason says which. A Chromium
elsewhere than on the PATH is named by VECA_CHROMIUM.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

CHROMIUM = os.environ.get("VECA_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ARGUMENTS = [
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]

WEBGPU = [
    *(argument for argument in ARGUMENTS if argument != "--disable-gpu"),
    "--headless=new",
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--enable-features=Vulkan",
    "--use-vulkan=swiftshader",
]
"""With a GPU that the processor stands in for."""


def needed(**libraries: str) -> list[pytest.MarkDecorator]:
    """Marks of a test in a browser; `libraries` it needs besides, with the extra of each."""
    missing = [
        f"{name} is not installed (extra {extra})"
        for name, extra in {**libraries, "playwright": "browser"}.items()
        if importlib.util.find_spec(name) is None
    ]
    if not CHROMIUM:
        missing.append("no Chromium on the PATH (apt-get install chromium)")
    skip = pytest.mark.skipif(bool(missing), reason="; ".join(missing))
    return [pytest.mark.browser, skip]


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@contextlib.contextmanager
def another(browser: Any, arguments: Sequence[str]) -> Iterator[Any]:
    """One with other arguments, while `browser` is open: playwright starts once in a thread."""
    found = browser.browser_type.launch(
        executable_path=CHROMIUM,
        args=list(arguments),
        ignore_default_args=["--headless", "--headless=old"],
    )
    yield found
    found.close()
