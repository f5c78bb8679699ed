"""A real browser for tests of pages: headless Chromium, looked at through its driver."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)

#: Seconds, long enough for whatever must happen: the browser shares few cores with other tests.
_PATIENCE_S = 100.0

#: For `pytestmark` of a module of such tests.
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no Chromium with chromedriver here; `apt-get install chromium chromium-driver` brings both",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Yield the browser; import this fixture into the module that uses it."""
    options = webdriver.ChromeOptions()
    assert CHROMIUM is not None
    assert DRIVER is not None
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(_PATIENCE_S)
    yield driver
    driver.quit()


def open_page(browser: webdriver.Chrome, page: Path, width: int) -> None:
    """Load a page in a window of the given size, pixels; earlier log entries are discarded."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())


def requested(browser: webdriver.Chrome) -> list[str]:
    """Return every address that was requested since the page was opened."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def script(browser: webdriver.Chrome, code: str) -> Any:
    """Run JavaScript in the page; return its result."""
    return browser.execute_script(code)  # type: ignore[no-untyped-call]


def assert_comes_to(browser: webdriver.Chrome, look: Callable[[], object]) -> None:
    """Wait until a condition holds: the page may react to an input only a moment later."""
    WebDriverWait(browser, _PATIENCE_S).until(lambda _: look())


def assert_loads_alone(browser: webdriver.Chrome, page: Path) -> None:
    """Check that a page loads without errors and requests nothing but itself."""
    open_page(browser, page, 1366)
    assert browser.get_log("browser") == []
    others = [url for url in requested(browser) if url != page.as_uri() and not url.startswith("data:")]
    assert others == []


def assert_fits_the_window(browser: webdriver.Chrome, page: Path, width: int) -> None:
    """Check that nothing is wider than the window, with all details open."""
    open_page(browser, page, width)
    assert script(browser, "document.querySelectorAll('details').forEach(d => d.open = true); return 1") == 1
    assert script(browser, "return document.documentElement.scrollWidth") <= width
    assert outside_of_window(browser) == []


def assert_plot_texts_are_legible(browser: webdriver.Chrome) -> None:
    """Check that the texts of plots stay inside their frames and are large enough."""
    outside, smallest = texts_out_of_frame(browser)
    assert outside == []
    assert smallest >= 6.5


def assert_plots_are_no_posters(browser: webdriver.Chrome) -> None:
    """Check that the texts of plots, but for wide bars, are no larger than the headings above them."""
    sizes = script(
        browser,
        "return [...document.querySelectorAll('.plots svg')]"
        ".map((s) => 10.5 * s.getBoundingClientRect().width / s.viewBox.baseVal.width)",
    )
    assert sizes
    assert max(sizes) < 17


def assert_table_needs_no_scrolling(browser: webdriver.Chrome, page: Path) -> None:
    """Check that the page's first table is shown whole on a laptop."""
    open_page(browser, page, 1366)
    inner, outer = script(
        browser, "const t = document.querySelector('.table'); return [t.scrollWidth, t.clientWidth]"
    )
    assert inner <= outer


def assert_follows_a_dark_setting(browser: webdriver.Chrome, page: Path) -> None:
    """Check the background under both settings."""
    assert brightness(browser, page, "light") > 600
    assert brightness(browser, page, "dark") < 150


@contextmanager
def printed(browser: webdriver.Chrome, page: Path) -> Iterator[None]:
    """Show a page as it is printed on A4, which it must fit."""
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        open_page(browser, page, 740)  # A4 less its margins
        assert script(browser, "return matchMedia('print').matches")
        assert script(browser, "return document.documentElement.scrollWidth") <= 740
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def outside_of_window(browser: webdriver.Chrome) -> list[str]:
    """Return the elements that reach over the right edge, those that scroll by themselves left out."""
    found: list[str] = script(
        browser,
        "const scrolls = (e) => e.closest('.scroll, .table, svg');"
        "return [...document.body.querySelectorAll('*')].filter((e) => !scrolls(e) "
        "&& e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))",
    )
    return found


def texts_out_of_frame(browser: webdriver.Chrome) -> tuple[list[str], float]:
    """Return the texts of plots that reach out of their frames, and the height of the smallest, pixels."""
    out, smallest = script(
        browser,
        "const texts = [...document.querySelectorAll('figure svg text')];"
        "const box = (e) => e.getBoundingClientRect();"
        "const out = texts.filter((t) => !t.closest('.scroll')"
        " && (box(t).left < box(t.closest('figure')).left"
        " || box(t).right > box(t.closest('figure')).right));"
        "return [out.map((t) => t.textContent), Math.min(...texts.map((t) => box(t).height))]",
    )
    return out, smallest


def brightness(browser: webdriver.Chrome, page: Path, scheme: str) -> int:
    """Return the page's background as red + green + blue under a light or dark setting."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    open_page(browser, page, 1366)
    colour = script(browser, "return getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(","))
