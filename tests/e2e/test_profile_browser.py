"""The page of a profile in a real browser: headless Chromium on the file itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.report.profile.page import write_profile_page
from tests.helpers.profiles import MadeUpProfile, write_profile

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.common.print_page_options import PrintOptions
from selenium.webdriver.remote.webelement import WebElement

from tests.helpers.browser import (
    assert_comes_to,
    assert_fits_the_window,
    assert_follows_a_dark_setting,
    assert_loads_alone,
    assert_plot_texts_are_legible,
    assert_table_needs_no_scrolling,
    browser,
    needs_chromium,
    open_page,
    printed,
    script,
)

__all__ = ["browser"]
pytestmark = needs_chromium

FRAME = "document.querySelector('.gantt-frame')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made_up = MadeUpProfile(steps=14, growth={"decoder": 0.25, "postproc": 0.06})
    notes = ("<img src=x onerror=alert(1)>",)
    out = write_profile(tmp_path_factory.mktemp("profile") / "out", made_up, notes=notes)
    return write_profile_page(out).html


def _gantt(browser: webdriver.Chrome, page: Path) -> WebElement:
    """Open the page with the picture of steps in the middle of the window."""
    open_page(browser, page, 1280)
    frame = browser.find_element(By.CSS_SELECTOR, ".gantt-frame")
    script(browser, f"{FRAME}.scrollIntoView({{block: 'center'}})")
    return frame


def _zoom(browser: webdriver.Chrome) -> float:
    return float(script(browser, f"return {FRAME}.scrollWidth / {FRAME}.clientWidth"))


def _left(browser: webdriver.Chrome) -> float:
    return float(script(browser, f"return {FRAME}.scrollLeft"))


def _readout(browser: webdriver.Chrome) -> str:
    return browser.find_element(By.CSS_SELECTOR, "output").text


def test_it_loads_alone_and_without_a_complaint(browser: webdriver.Chrome, page: Path) -> None:
    assert_loads_alone(browser, page)
    assert browser.find_element(By.CSS_SELECTOR, ".headline").text.startswith("Decoder loses most")
    assert "<img src=x" in browser.find_element(By.CSS_SELECTOR, "#cautions").text
    assert not browser.find_elements(By.CSS_SELECTOR, "img, td b, dd b")


def test_pictures_and_tables_are_visible(browser: webdriver.Chrome, page: Path) -> None:
    open_page(browser, page, 1280)
    figures = browser.find_elements(By.CSS_SELECTOR, "figure > svg")
    assert len(figures) == 8 and all(figure.size["height"] > 130 for figure in figures)
    # No plot is blown up to the width of the page.
    assert max(figure.size["width"] for figure in figures) < 700
    for name in ("times-weak", "times-strong", "times-single", "first-steps", "loaders", "memory"):
        rows = browser.find_elements(By.CSS_SELECTOR, f"#table-{name} tbody tr")
        assert rows and all(row.is_displayed() for row in rows), name
    assert len(browser.find_elements(By.CSS_SELECTOR, ".gantt .lane")) == 4


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows(browser: webdriver.Chrome, page: Path, width: int) -> None:
    assert_fits_the_window(browser, page, width)
    assert_plot_texts_are_legible(browser)


def test_tables_fit_a_laptop(browser: webdriver.Chrome, page: Path) -> None:
    assert_table_needs_no_scrolling(browser, page)
    wide = script(
        browser, "return [...document.querySelectorAll('.table')].filter(t => t.scrollWidth > t.clientWidth)"
        ".map(t => t.querySelector('table').id)",
    )  # fmt: skip
    assert wide == []


def test_it_follows_a_dark_setting(browser: webdriver.Chrome, page: Path) -> None:
    assert_follows_a_dark_setting(browser, page)


def test_the_wheel_zooms_where_the_pointer_is(browser: webdriver.Chrome, page: Path) -> None:
    frame = _gantt(browser, page)
    point = f"({FRAME}.scrollLeft + {FRAME}.clientWidth / 4) / {FRAME}.scrollWidth"
    quarter = round(frame.size["width"] / 4 - frame.size["width"] / 2)
    pointer = ActionChains(browser)
    pointer.move_to_element(frame).move_to_element_with_offset(frame, quarter, 0).perform()
    before = script(browser, f"return [{point}, scrollY]")
    origin = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(frame, quarter, 0)
    ActionChains(browser).scroll_from_origin(origin, 0, -400).perform()
    assert_comes_to(browser, lambda: _zoom(browser) > 1.3 and _left(browser) > 0)
    after = script(browser, f"return [{point}, scrollY]")
    assert after[0] == pytest.approx(before[0], abs=0.01)
    assert after[1] == before[1]
    # At full extent the wheel goes on to scroll the page; the driver brings back what has left the window.
    ActionChains(browser).scroll_from_origin(origin, 0, 400).perform()
    assert_comes_to(browser, lambda: _zoom(browser) == pytest.approx(1))
    assert script(browser, "return scrollY") == before[1]
    ActionChains(browser).scroll_from_origin(origin, 0, 100).perform()
    assert_comes_to(browser, lambda: script(browser, "return scrollY") > before[1])


def test_zoom_by_buttons_draws_finer_ticks_and_more_names(browser: webdriver.Chrome, page: Path) -> None:
    _gantt(browser, page)
    names = "return document.querySelectorAll('.gantt .bar text').length"
    ticks = "return [...document.querySelectorAll('.gantt .ticks text')].map(t => Number(t.textContent))"
    few, coarse = script(browser, names), script(browser, ticks)
    for _ in range(5):
        browser.find_element(By.CSS_SELECTOR, ".gantt button[aria-label='zoom in']").click()
    assert_comes_to(browser, lambda: _zoom(browser) == pytest.approx(1.5**5, rel=0.01))
    fine = script(browser, ticks)
    assert script(browser, names) > few
    assert fine[2] - fine[1] < coarse[2] - coarse[1]
    browser.find_element(By.CSS_SELECTOR, ".gantt button[aria-label='zoom out']").click()
    assert_comes_to(browser, lambda: _zoom(browser) == pytest.approx(1.5**4, rel=0.01))
    browser.find_element(By.XPATH, "//button[text()='all']").click()
    assert _zoom(browser) == pytest.approx(1) and script(browser, names) == few


def test_dragging_pans(browser: webdriver.Chrome, page: Path) -> None:
    frame = _gantt(browser, page)
    browser.find_element(By.CSS_SELECTOR, ".gantt button[aria-label='zoom in']").click()
    start = _left(browser)
    ActionChains(browser).click_and_hold(frame).move_by_offset(-90, 0).release().perform()
    assert_comes_to(browser, lambda: _left(browser) == pytest.approx(start + 90, abs=2))
    ActionChains(browser).move_by_offset(60, 0).perform()  # let go of
    assert _left(browser) == pytest.approx(start + 90, abs=2)


def test_the_keyboard_reaches_every_function(browser: webdriver.Chrome, page: Path) -> None:
    frame = _gantt(browser, page)
    browser.find_element(By.XPATH, "//button[text()='all']").send_keys(Keys.TAB)
    assert script(browser, f"return document.activeElement === {FRAME}")
    frame.send_keys(Keys.ARROW_RIGHT)
    assert_comes_to(browser, lambda: "trainloader" in _readout(browser))
    assert "rank 0, step" in _readout(browser)
    frame.send_keys(Keys.ARROW_RIGHT)
    assert_comes_to(browser, lambda: "encoder forward" in _readout(browser))
    assert "rank 0" in _readout(browser)
    assert _readout(browser).endswith(" ms")
    frame.send_keys(Keys.ARROW_DOWN)
    assert_comes_to(browser, lambda: "rank 1" in _readout(browser))
    frame.send_keys("+")
    assert_comes_to(browser, lambda: _zoom(browser) > 1.4)
    frame.send_keys(Keys.END)
    assert_comes_to(browser, lambda: "update" in _readout(browser) and _left(browser) > 0)
    frame.send_keys("0")
    assert_comes_to(browser, lambda: _zoom(browser) == pytest.approx(1))
    frame.send_keys(Keys.ESCAPE)
    assert_comes_to(browser, lambda: "Wheel" in _readout(browser))


def test_pointing_names_function_phase_and_time(browser: webdriver.Chrome, page: Path) -> None:
    _gantt(browser, page)
    bar = browser.find_element(
        By.CSS_SELECTOR, ".lane[data-rank='2'] .bar[data-label='decoder'][data-phase='backward'] rect"
    )
    ActionChains(browser).move_to_element(bar).perform()
    assert_comes_to(browser, lambda: _readout(browser).startswith("rank 2, step "))
    text = _readout(browser)
    assert "decoder backward" in text and text.endswith(" ms")
    titles = script(
        browser, "return [...document.querySelectorAll('.gantt .bar title')].map(t => t.textContent)"
    )
    assert text in titles
    assert any("waiting for the last rank" in title for title in titles)


def test_two_fingers_zoom(browser: webdriver.Chrome, page: Path) -> None:
    _gantt(browser, page)
    box = script(browser, f"const b = {FRAME}.getBoundingClientRect(); return [b.left, b.top, b.width]")
    left, top, width = box
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
    try:
        for kind, apart in (("touchStart", 60), ("touchMove", 120), ("touchMove", 180)):
            middle = left + width / 2
            points = [{"x": middle + sign * apart / 2, "y": top + 20, "id": i}
                      for i, sign in enumerate((-1, 1))]  # fmt: skip
            browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        assert_comes_to(browser, lambda: _zoom(browser) == pytest.approx(3, rel=0.15))
        assert script(browser, "return visualViewport.scale") == 1
    finally:
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_it_can_be_printed(browser: webdriver.Chrome, page: Path) -> None:
    with printed(browser, page):
        assert browser.find_element(By.CSS_SELECTOR, "#table-times-weak").is_displayed()
        assert not browser.find_element(By.CSS_SELECTOR, ".gantt-tools").is_displayed()
        assert_plot_texts_are_legible(browser)
        wide = (
            "return [...document.querySelectorAll('table')].filter(t => t.scrollWidth > 741).map(t => t.id)"
        )
        assert script(browser, wide) == []
        # Who has zoomed in prints the whole all the same.
        script(browser, "document.querySelector('.gantt button').click()")
        browser.print_page(PrintOptions())
        assert _zoom(browser) == pytest.approx(1)
