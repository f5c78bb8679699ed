"""The report's page in a real browser: headless Chromium on the file itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speechdp.timing.report import write_report
from tests.helpers.runs import MadeUpRun, realistic_sweep, write_sweep

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

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

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no Chromium with chromedriver here; `apt-get install chromium chromium-driver` brings both",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    assert CHROMIUM is not None
    assert DRIVER is not None
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = realistic_sweep()
    runs.append(MadeUpRun("model_averaging-256", period="256", completed=False, wer=None, num_evaluations=4))
    runs.append(MadeUpRun("<img src=x onerror=alert(1)>", "<b>bold</b>", "1024", size=4))
    return write_report(write_sweep(tmp_path_factory.mktemp("sweep"), runs, missing=["gone"])).html


def _open(browser: webdriver.Chrome, page: Path, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())


def _requested(browser: webdriver.Chrome) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def _script(browser: webdriver.Chrome, code: str) -> Any:
    return browser.execute_script(code)  # type: ignore[no-untyped-call]


def test_the_page_loads_alone_and_without_a_complaint(browser: webdriver.Chrome, page: Path) -> None:
    _open(browser, page, 1366)
    assert browser.get_log("browser") == []
    assert [url for url in _requested(browser) if url not in (page.as_uri(), "data:,")] == []
    headline = browser.find_element(By.CSS_SELECTOR, ".headline").text
    assert headline.startswith("Model averaging, period 16 is the fastest setting")


def test_table_and_plots_are_visible(browser: webdriver.Chrome, page: Path) -> None:
    _open(browser, page, 1366)
    rows = browser.find_elements(By.CSS_SELECTOR, "#figures tbody tr")
    assert len(rows) == 9
    assert all(row.is_displayed() for row in rows)
    assert "21,650" in rows[4].text
    assert "unfinished" in rows[6].text
    assert rows[7].text.startswith("<img src=x onerror=alert(1)>")
    assert not browser.find_elements(By.CSS_SELECTOR, "td b, img")
    figures = browser.find_elements(By.CSS_SELECTOR, "figure svg")
    assert len(figures) == 6
    for figure in figures:
        assert figure.is_displayed()
        assert figure.size["width"] > 300
        assert figure.size["height"] > 200
    texts = _script(browser, "return [...document.querySelectorAll('svg text')].map(t => t.textContent)")
    assert {"model averaging, period 16", "21,650", "Throughput (frames/s)"} <= set(texts)


@pytest.mark.parametrize("width", [1366, 390])
def test_nothing_overflows_to_the_side(browser: webdriver.Chrome, page: Path, width: int) -> None:
    _open(browser, page, width)
    assert _script(browser, "document.querySelectorAll('details').forEach(d => d.open = true); return 1") == 1
    assert _script(browser, "return document.documentElement.scrollWidth") <= width
    outside = _script(
        browser,
        "const scrolls = (e) => e.closest('.scroll, .table, svg');"
        "return [...document.body.querySelectorAll('*')].filter((e) => !scrolls(e) "
        "&& e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))",
    )
    assert outside == []


def test_the_realistic_table_fits_a_laptop(browser: webdriver.Chrome, tmp_path: Path) -> None:
    _open(browser, write_report(write_sweep(tmp_path / "sweep", realistic_sweep())).html, 1366)
    inner, outer = _script(
        browser, "const t = document.querySelector('.table'); return [t.scrollWidth, t.clientWidth]"
    )
    assert inner <= outer


def test_plot_text_stays_inside_its_frame_and_legible(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = write_report(write_sweep(tmp_path / "sweep", realistic_sweep())).html
    for width in (1366, 390):
        _open(browser, page, width)
        outside, smallest = _script(
            browser,
            "const texts = [...document.querySelectorAll('figure svg text')];"
            "const box = (e) => e.getBoundingClientRect();"
            "const out = texts.filter((t) => !t.closest('.scroll')"
            " && (box(t).left < box(t.closest('figure')).left"
            " || box(t).right > box(t.closest('figure')).right));"
            "return [out.map((t) => t.textContent), Math.min(...texts.map((t) => box(t).height))]",
        )
        assert outside == []
        assert smallest >= 6.5


def test_a_heading_sorts_the_table(browser: webdriver.Chrome, page: Path) -> None:
    _open(browser, page, 1366)
    button = browser.find_element(By.XPATH, "//thead//button[text()='frames/s']")
    cells = "return [...document.querySelectorAll('#figures tbody tr')].map(r => r.children[4].dataset.sort)"
    for order in (1, -1):
        button.click()
        values = [float(value) for value in _script(browser, cells) if value]
        assert values == sorted(values, reverse=order < 0)
        assert _script(browser, cells)[-1] == ""  # the missing run stays last


def test_the_page_follows_a_dark_setting(browser: webdriver.Chrome, page: Path) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        _open(browser, page, 1366)
        red, green, blue = _script(browser, background).removeprefix("rgb(").rstrip(")").split(",")
        seen[scheme] = int(red) + int(green) + int(blue)
    assert seen["light"] > 600
    assert seen["dark"] < 150


def test_the_printed_page_holds_the_whole_table(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = write_report(write_sweep(tmp_path / "sweep", realistic_sweep())).html
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        _open(browser, page, 740)  # A4 less its margins
        assert _script(browser, "return matchMedia('print').matches")
        assert _script(browser, "return document.documentElement.scrollWidth") <= 740
        name = browser.find_elements(By.CSS_SELECTOR, "#figures tbody th")[1]
        assert name.size["height"] < 60  # not one letter a line
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
