"""The page of a comparison in a real browser: headless Chromium on the file itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.report.compare.report import write_comparison as write_report
from speechdp.report.runs.results import ONE_RANK
from tests.helpers.comparisons import MadeUpStrategy, realistic_strategies, write_comparison
from tests.helpers.races import made_up_race, write_made_up_race
from tests.helpers.runs import add_newer_figures, add_utterance_errors

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.helpers.browser import (
    assert_comes_to,
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


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every column that a comparison of acoustic models has."""
    strategies = realistic_strategies()
    out = write_comparison(tmp_path_factory.mktemp("full") / "out", strategies)
    for number, errors in enumerate(sorted(out.glob("*/wer-test.json"))):
        add_newer_figures(errors.parent)
        add_utterance_errors(errors.parent, [(place + number) % 5 for place in range(100)])
    for ranks in (2, 4):
        speeds = {ONE_RANK: 0.8, **{each.text: 1 + 0.1 * n for n, each in enumerate(strategies)}}
        texts = {each.text: each.text for each in strategies}
        write_made_up_race(out, made_up_race(speeds, ranks=ranks, strategies=texts))
    return write_report(out).html


def test_a_realistic_table_fits_a_laptop(browser: webdriver.Chrome, full_page: Path) -> None:
    assert_table_needs_no_scrolling(browser, full_page)
    headings = browser.find_element(By.CSS_SELECTOR, "#figures-frames thead").text
    assert all(word in headings for word in ("raced", "no silence", "lowest", "replicas"))


def test_names_stay_in_sight_while_a_narrow_table_is_scrolled(
    browser: webdriver.Chrome, full_page: Path
) -> None:
    open_page(browser, full_page, 420)
    left, name = script(
        browser,
        "const table = document.querySelector('.table'); table.scrollLeft = 200;"
        "return [table, table.querySelector('tbody th')].map((e) => e.getBoundingClientRect().left)",
    )
    assert script(browser, "return document.querySelector('.table').scrollLeft") == 200
    assert abs(name - left) < 3


def test_what_the_columns_mean_can_be_read_without_a_mouse(
    browser: webdriver.Chrome, full_page: Path
) -> None:
    open_page(browser, full_page, 420)
    summary = browser.find_element(By.CSS_SELECTOR, ".meanings summary")
    summary.send_keys(Keys.ENTER)
    meanings = browser.find_element(By.CSS_SELECTOR, ".meanings dl")
    assert_comes_to(browser, meanings.is_displayed)
    assert "replicas apart" in meanings.text


def test_an_option_is_broken_nowhere(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = write_report(write_comparison(tmp_path / "out", realistic_strategies(), (1, 2), (1,))).html
    for width in range(360, 440, 8):
        open_page(browser, page, width)
        lines = script(
            browser, "return [...document.querySelectorAll('.whole')].map((e) => e.getClientRects().length)"
        )
        assert lines and set(lines) == {1}


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
        # No heading at the foot of a sheet.
        breaks = script(
            browser, "return [...document.querySelectorAll('h2')].map((e) => getComputedStyle(e).breakAfter)"
        )
        assert set(breaks) == {"avoid"}
