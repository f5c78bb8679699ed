"""Averaging periods as they are written and read."""

from __future__ import annotations

import functools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechdp.errors import ConfigError
from speechdp.parallel.period import Beginning, Period, PeriodUnit, frames_reach
from speechdp.parallel.strategy import Progress
from speechdp.strategies.mechanisms.stages import Point

STEPS, FRAMES, SECONDS = PeriodUnit.STEPS, PeriodUnit.FRAMES, PeriodUnit.SECONDS


@pytest.mark.parametrize(
    ("text", "value", "unit", "written"),
    [
        ("16", 16, STEPS, "16"),
        (" 1 ", 1, STEPS, "1"),
        ("16steps", 16, STEPS, "16"),
        ("1step", 1, STEPS, "1"),
        ("16.0", 16, STEPS, "16"),
        ("400000f", 400_000, FRAMES, "400kf"),
        ("1frame", 1, FRAMES, "1f"),
        ("600kf", 600_000, FRAMES, "600kf"),
        ("600KF", 600_000, FRAMES, "600kf"),
        ("1.2mf", 1_200_000, FRAMES, "1200kf"),
        ("2000mf", 2_000_000_000, FRAMES, "2000000kf"),
        ("1234frames", 1234, FRAMES, "1234f"),
        ("5s", 5, SECONDS, "5s"),
        ("0.25s", 0.25, SECONDS, "0.25s"),
        ("1234567s", 1_234_567, SECONDS, "1234567s"),
    ],
)
def test_what_is_written_is_read(text: str, value: float, unit: PeriodUnit, written: str) -> None:
    period = Period.parse(text)
    assert (period.value, period.unit) == (value, unit)
    assert str(period) == written


@pytest.mark.parametrize(
    "text", ["", "0", "0s", "-1", "x", "16 steps", "1e3", "nan", "infs", "5m", "kf", "1,5s", "9" * 400]
)
def test_anything_else_is_refused_with_the_ways_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a period; write 16 \(steps\), 600kf \(frames\) or 5s"):
        Period.parse(text)


def test_frames_that_rounding_has_taken_away_are_there() -> None:
    # The mean over ten ranks of which one has a frame. `sum` would round only once since Python 3.12.
    tenths = functools.reduce(operator.add, [0.1] * 10)
    assert tenths < 1 and frames_reach(tenths, 1)
    assert Point.parse("1f").is_reached(Progress(10, tenths, 0.0))
    assert not frames_reach(1 - 0.01, 1)


def test_part_of_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'1\.5' is not a whole number of steps"):
        Period.parse("1.5")


@pytest.mark.parametrize(
    ("text", "value", "unit"), [("0", 0, STEPS), (" 0", 0, STEPS), ("100", 100, STEPS), ("2mf", 2e6, FRAMES)]
)
def test_a_beginning_may_be_at_once(text: str, value: float, unit: PeriodUnit) -> None:
    begin = Beginning.parse(text)
    assert (begin.value, begin.unit) == (value, unit)
    assert Beginning.parse(str(begin)) == begin


@pytest.mark.parametrize("text", ["", "0s", "-1", "soon"])
def test_no_other_beginning_is_read(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a period"):
        Beginning.parse(text)


@given(st.integers(1, 10**12), st.sampled_from(["", "f", "kf", "mf", "s"]))
def test_a_period_survives_being_recorded(number: int, unit: str) -> None:
    """run.json and the sweep hold periods as text."""
    period = Period.parse(f"{number}{unit}")
    assert Period.parse(str(period)) == period


@given(st.floats(1e-6, 1e9), st.sampled_from([FRAMES, SECONDS]))
def test_fractions_survive_too(value: float, unit: PeriodUnit) -> None:
    period = Period(value, unit)
    again = Period.parse(str(period))
    assert again.unit is unit and again.value == pytest.approx(value, rel=1e-12)
