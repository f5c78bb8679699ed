"""The report's page in a real browser: headless Chromium on the file itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speechdp.report.sweep.report import write_report
from tests.helpers.races import made_up_race, write_made_up_race
from tests.helpers.runs import (
    MadeUpRun,
    add_newer_figures,
    add_utterance_errors,
    realistic_sweep,
    write_sweep,
)
from tests.helpers.usage_files import GB, add_memory, write_samples

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.helpers.browser import (
    assert_fits_the_window,
    assert_follows_a_dark_setting,
    assert_loads_alone,
    assert_plot_texts_are_legible,
    assert_plots_are_no_posters,
    assert_table_needs_no_scrolling,
    browser,
    needs_chromium,
    open_page,
    printed,
    script,
)

__all__ = ["browser"]

pytestmark = needs_chromium


#: A rank's data path in a minute; every stage there is, so that the table has all its columns.
_DATA = {
    "stages_s": {"read": 6.1, "preprocess": 58.0, "collate": 2.4, "send": 1.2, "h2d": 0.8},
    "read_bytes": 1_900_000_000,
    "frames": 640_000,
    "computed_frames": 700_000,
    "threads": 2,
    "preprocess_on": "cpu",
    "storage": "chunked gzip",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = realistic_sweep()
    for run in runs:
        run.data = _DATA
    runs[2].feeders = [{"rank": 2, "host": "<b>node</b>", "data": _DATA}]
    runs.append(MadeUpRun("model_averaging-256", period="256", completed=False, wer=None, num_evaluations=4))
    runs.append(MadeUpRun("<img src=x onerror=alert(1)>", "<b>bold</b>", "1024", size=4))
    sweep = write_sweep(tmp_path_factory.mktemp("sweep"), runs, missing=["gone"])
    for run in runs:
        write_samples(sweep / run.name, "a", [[95.0] * 300] * run.size)
        add_memory(sweep / run.name, [0.4 * GB + 1e6 * rank for rank in range(run.size)])
    return write_report(sweep).html


def test_the_page_loads_alone_and_without_a_complaint(browser: webdriver.Chrome, page: Path) -> None:
    assert_loads_alone(browser, page)
    headline = browser.find_element(By.CSS_SELECTOR, ".headline").text
    assert headline.startswith("Model averaging, period 16 seems the fastest setting")


def test_table_and_plots_are_visible(browser: webdriver.Chrome, page: Path) -> None:
    open_page(browser, page, 1366)
    rows = browser.find_elements(By.CSS_SELECTOR, "#figures tbody tr")
    assert len(rows) == 9
    assert all(row.is_displayed() for row in rows)
    assert "21,650" in rows[4].text
    assert "unfinished" in rows[6].text
    assert rows[7].text.startswith("<img src=x onerror=alert(1)>")
    assert not browser.find_elements(By.CSS_SELECTOR, "td b, dd b, img")
    figures = browser.find_elements(By.CSS_SELECTOR, "figure svg")
    assert len(figures) == 9
    for figure in figures:
        assert figure.is_displayed()
        assert figure.size["width"] > 300
        assert figure.size["height"] > 200
    texts = script(browser, "return [...document.querySelectorAll('svg text')].map(t => t.textContent)")
    assert {"model averaging, period 16", "21,650", "Throughput (frames/s)"} <= set(texts)


@pytest.mark.parametrize("width", [1366, 390])
def test_nothing_overflows_to_the_side(browser: webdriver.Chrome, page: Path, width: int) -> None:
    assert_fits_the_window(browser, page, width)


def test_the_realistic_table_fits_a_laptop(browser: webdriver.Chrome, tmp_path: Path) -> None:
    runs = realistic_sweep()
    sweep = write_sweep(tmp_path / "sweep", runs)
    for number, run in enumerate(runs):
        add_newer_figures(sweep / run.name)
        if run.wer is not None:
            add_utterance_errors(sweep / run.name, [(place + number) % 5 for place in range(100)])
    speeds = {run.name: 1 + 0.05 * number for number, run in enumerate(runs)}
    write_made_up_race(sweep, made_up_race({**speeds, "gradient_averaging": 1.0}))
    assert_table_needs_no_scrolling(browser, write_report(sweep).html)
    headings = browser.find_element(By.CSS_SELECTOR, "#figures thead").text
    assert all(word in headings for word in ("raced", "no silence", "lowest", "SER"))


def test_the_data_path_is_shown_whole_on_a_laptop(browser: webdriver.Chrome, tmp_path: Path) -> None:
    runs = realistic_sweep()
    for run in runs:
        run.data, run.feeders = _DATA, [{"rank": 2, "host": "node-a", "data": _DATA}]
    open_page(browser, write_report(write_sweep(tmp_path / "sweep", runs)).html, 1366)
    table = browser.find_element(By.CSS_SELECTOR, "#data-path")
    assert len(table.find_elements(By.CSS_SELECTOR, "tbody tr")) == 6
    inner, outer = script(
        browser, "const t = document.querySelector('#data-path').parentElement;"
        "return [t.scrollWidth, t.clientWidth]"
    )  # fmt: skip
    assert inner <= outer
    assert "chunked gzip" in browser.find_element(By.CSS_SELECTOR, "#data-notes").text


def test_plot_text_stays_inside_its_frame_and_legible(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = write_report(write_sweep(tmp_path / "sweep", realistic_sweep())).html
    for width in (1366, 390):
        open_page(browser, page, width)
        assert_plot_texts_are_legible(browser)


@pytest.mark.parametrize("width", [1280, 900, 500])
def test_a_plot_that_stands_alone_is_no_poster(browser: webdriver.Chrome, tmp_path: Path, width: int) -> None:
    sweep = write_sweep(tmp_path / "sweep", realistic_sweep())
    for path in sweep.glob("*/metrics.jsonl"):  # as a script's whose steps have no weight
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**line, "frames": None}) + "\n" for line in lines))
    open_page(browser, write_report(sweep).html, width)
    assert browser.find_elements(By.CSS_SELECTOR, "#plot-learning-time")
    assert not browser.find_elements(By.CSS_SELECTOR, "#plot-learning-frames")
    assert_plots_are_no_posters(browser)


def test_a_heading_sorts_the_table(browser: webdriver.Chrome, page: Path) -> None:
    open_page(browser, page, 1366)
    button = browser.find_element(By.XPATH, "//thead//button[text()='frames/s']")
    cells = "return [...document.querySelectorAll('#figures tbody tr')].map(r => r.children[4].dataset.sort)"
    for order in (1, -1):
        button.click()
        values = [float(value) for value in script(browser, cells) if value]
        assert values == sorted(values, reverse=order < 0)
        assert script(browser, cells)[-1] == ""  # the missing run stays last


def test_the_page_follows_a_dark_setting(browser: webdriver.Chrome, page: Path) -> None:
    assert_follows_a_dark_setting(browser, page)


def test_the_printed_page_holds_the_whole_table(browser: webdriver.Chrome, tmp_path: Path) -> None:
    runs = realistic_sweep()
    for run in runs:
        run.data = _DATA
    page = write_report(write_sweep(tmp_path / "sweep", runs)).html
    with printed(browser, page):
        name = browser.find_elements(By.CSS_SELECTOR, "#figures tbody th")[1]
        assert name.size["height"] < 60  # not one letter a line
