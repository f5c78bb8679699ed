"""The page of a comparison in a real browser: headless Chromium on the file itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.report.compare.report import write_comparison as write_report
from tests.helpers.comparisons import MadeUpStrategy, realistic_strategies, write_comparison

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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    strategies = [*realistic_strategies(), MadeUpStrategy("<img src=x onerror=alert(1)>:a=<b>")]
    return write_report(write_comparison(tmp_path_factory.mktemp("compare") / "out", strategies)).html


def test_it_loads_alone_and_without_a_complaint(browser: webdriver.Chrome, page: Path) -> None:
    assert_loads_alone(browser, page)
    headline = browser.find_element(By.CSS_SELECTOR, ".headline").text
    assert headline.startswith("Bmuf (period=16) seems the best choice")
    assert not browser.find_elements(By.CSS_SELECTOR, "img, td b, th b")


def test_tables_legend_and_plots_are_visible(browser: webdriver.Chrome, page: Path) -> None:
    open_page(browser, page, 1366)
    for mode in ("frames", "time"):
        rows = browser.find_elements(By.CSS_SELECTOR, f"#figures-{mode} tbody tr")
        assert len(rows) == 15 and all(row.is_displayed() for row in rows)
    assert "17,191 ± 87" in browser.find_element(By.CSS_SELECTOR, "#figures-frames tr.chosen").text
    figures = browser.find_elements(By.CSS_SELECTOR, "figure svg")
    assert len(figures) == 8 and all(figure.size["height"] > 200 for figure in figures)
    names = [item.text for item in browser.find_elements(By.CSS_SELECTOR, "#legend li")]
    assert len(names) == 8 and names[-1] == "one rank" and "easgd (period=8)" in names


@pytest.mark.parametrize("width", [1280, 900, 500])
def test_the_plots_of_one_number_of_ranks_are_no_posters(
    browser: webdriver.Chrome, tmp_path: Path, width: int
) -> None:
    two = write_comparison(tmp_path / "out", realistic_strategies()[:3], (1, 2), (1,), ("frames",))
    open_page(browser, write_report(two).html, width)
    assert_plots_are_no_posters(browser)
    tops = script(
        browser, "return [...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect().top)"
    )
    assert len(tops) == 3 and len(set(tops)) == {1280: 1, 900: 2, 500: 3}[width]


@pytest.mark.parametrize("width", [1366, 390])
def test_nothing_overflows(browser: webdriver.Chrome, page: Path, width: int) -> None:
    assert_fits_the_window(browser, page, width)
    assert_plot_texts_are_legible(browser)


def test_a_realistic_table_fits_a_laptop(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = write_report(write_comparison(tmp_path / "out", realistic_strategies())).html
    assert_table_needs_no_scrolling(browser, page)


def test_each_table_is_sorted_by_its_own_headings(browser: webdriver.Chrome, page: Path) -> None:
    open_page(browser, page, 1366)
    cells = (
        "return [...document.querySelectorAll('#figures-{} tbody tr')].map(r => r.children[6].dataset.sort)"
    )
    before = script(browser, cells.format("frames"))
    browser.find_element(By.XPATH, "//table[@id='figures-time']//button[text()='to target']").click()
    values = script(browser, cells.format("time"))
    known = [float(value) for value in values if value]
    assert known == sorted(known) and values[-1] == ""
    assert script(browser, cells.format("frames")) == before


def test_it_follows_a_dark_setting(browser: webdriver.Chrome, page: Path) -> None:
    assert_follows_a_dark_setting(browser, page)


def test_it_can_be_printed(browser: webdriver.Chrome, page: Path) -> None:
    with printed(browser, page):
        assert browser.find_element(By.CSS_SELECTOR, "#figures-frames").is_displayed()
