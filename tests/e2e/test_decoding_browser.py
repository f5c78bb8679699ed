"""The page of a decoding in a real browser: headless Chromium on the file itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.report.decoding.page import write_decoding_page
from tests.helpers.decodings import Heard, data_of, decoding_of

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.helpers.browser import (
    assert_fits_the_window,
    assert_follows_a_dark_setting,
    assert_loads_alone,
    browser,
    needs_chromium,
    open_page,
    printed,
    script,
)

__all__ = ["browser"]
pytestmark = needs_chromium

_HOSTILE = "<img_src=x_onerror=alert(1)>"
_LONG = "donaudampfschifffahrtsgesellschaftskapitänsmützenabzeichen" * 3


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoding")
    heard = [
        Heard(f"utterance-{number:02}", f"speaker-{number % 7}", "go left", "go") for number in range(30)
    ]
    heard.append(Heard(f"z{_HOSTILE}", _HOSTILE, f"{_HOSTILE} {_LONG} now", f"<b>bold</b> now {_LONG}"))
    run = folder / "run"
    return write_decoding_page(decoding_of(heard, run), data_of(heard, folder / "data", audio=True), run).html


def test_it_loads_alone_and_shows_names_as_text(browser: webdriver.Chrome, page: Path) -> None:
    assert_loads_alone(browser, page)
    assert browser.find_element(By.CSS_SELECTOR, ".headline").text.startswith("WER ")
    assert not browser.find_elements(By.CSS_SELECTOR, "img, .words b, td b, th b")
    worst = browser.find_element(By.CSS_SELECTOR, ".utterance")
    assert _HOSTILE in worst.text and "<b>bold</b>" in worst.text and worst.is_displayed()


def test_the_audio_can_be_played(browser: webdriver.Chrome, page: Path) -> None:
    open_page(browser, page, 1366)
    assert len(browser.find_elements(By.CSS_SELECTOR, "audio")) == 31
    length = browser.execute_async_script(  # type: ignore[no-untyped-call]
        "const done = arguments[0], audio = document.querySelector('audio');"
        "audio.addEventListener('loadedmetadata', () => done(audio.duration));"
        "audio.addEventListener('error', () => done(-1));"
        "audio.preload = 'metadata'; audio.load();"
    )
    assert length == pytest.approx(0.5, abs=0.02)


def test_a_heading_sorts_the_speakers(browser: webdriver.Chrome, page: Path) -> None:
    open_page(browser, page, 1366)
    browser.find_element(By.CSS_SELECTOR, "#speakers thead button").click()
    rows = browser.find_elements(By.CSS_SELECTOR, "#speakers tbody tr")
    assert [row.text.split()[0] for row in rows][1:3] == ["speaker-0", "speaker-1"]


@pytest.mark.parametrize("width", [1366, 390])
def test_nothing_overflows(browser: webdriver.Chrome, page: Path, width: int) -> None:
    assert_fits_the_window(browser, page, width)


def test_the_page_follows_a_dark_setting(browser: webdriver.Chrome, page: Path) -> None:
    assert_follows_a_dark_setting(browser, page)


def test_the_printed_page_leaves_players_out(browser: webdriver.Chrome, page: Path) -> None:
    with printed(browser, page):
        shown = "return [...document.querySelectorAll('audio')].filter((a) => a.offsetHeight).length"
        assert script(browser, shown) == 0
