"""A headless Chromium that opens pages from disk, for tests of what a reader of the documentation or of a report sees.

Chromium and its driver come from the system (Debian: ``chromium`` and ``chromium-driver``). Tests that use them carry the marker
``browser``. They are skipped if either is missing, unless ``ONELAUNCH_TEST_BROWSER=required`` is set, as it is in CI.
``conftest.py`` asks :func:`missing_browser`. ``test_pages.py`` and ``workbench/test_report_browser.py`` use the others,
except :func:`screenshot`, which is for looking at a page by hand.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DESKTOP = (1280, 900)
"""Width and height of a laptop's window, in CSS pixels."""

PHONE = (390, 844)
"""Width and height of a phone's screen, in CSS pixels."""

REQUIRED = os.environ.get("ONELAUNCH_TEST_BROWSER") == "required"
"""True if tests run, and fail, without a browser instead of being skipped; ``tests/conftest.py`` reads it."""


def missing_browser() -> str | None:
    """Return why no browser can be started here, or ``None``."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(absent)} (Debian: chromium, chromium-driver)" if absent else None


@contextmanager
def open_page(path: Path, size: tuple[int, int] = DESKTOP) -> Iterator[Any]:
    """Open an HTML file in a window of this many CSS pixels and yield Selenium's driver.

    Scripts of the page run as they would for a reader. An ``alert`` that a page opens raises in the next call of the driver.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    # Containers often run as root, for whom Chromium has no sandbox, and with too small a /dev/shm. Scrollbars take away width.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        # A size by this command may be narrower than the narrowest window. ``mobile`` makes a page's viewport tag count.
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(path.resolve().as_uri())
        yield driver
    finally:
        driver.quit()


def boxes(driver: Any, selector: str) -> list[dict[str, float]]:
    """Return left, top, right and bottom of every element that matches, in CSS pixels from the page's top left corner."""
    return driver.execute_script(
        """return [...document.querySelectorAll(arguments[0])].map(e => { const b = e.getBoundingClientRect();
           return {left: b.left + scrollX, top: b.top + scrollY, right: b.right + scrollX, bottom: b.bottom + scrollY}; })""",
        selector,
    )


def screenshot(driver: Any, path: Path) -> Path:
    """Save what the window shows as a PNG file, for a look at a page by hand: no test calls this."""
    driver.save_screenshot(str(path))
    return path
