"""The learning rate against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from speechdp.errors import ConfigError
from speechdp.options.schedule import Schedule


def test_warm_up_rises_linearly_then_stays() -> None:
    schedule = Schedule(0.8, warmup_epochs=2.0, warmup_from=0.2)
    expected = {0.0: 0.2, 0.5: 0.35, 1.0: 0.5, 1.5: 0.65, 2.0: 0.8, 7.9: 0.8}
    assert {epoch: schedule.at(epoch) for epoch in expected} == pytest.approx(expected)


def test_each_annealed_epoch_is_1_over_sqrt_2_of_the_one_before() -> None:
    schedule = Schedule(1.0, anneal_from=3)
    expected = {
        0: 1.0, 2.999: 1.0,
        3: math.sqrt(0.5), 3.5: math.sqrt(0.5), 3.999: math.sqrt(0.5),
        4: 0.5, 5: math.sqrt(0.125), 7: 0.5**2.5,
    }  # fmt: skip
    assert {epoch: schedule.at(epoch) for epoch in expected} == pytest.approx(expected)


def test_the_recipe_of_the_paper() -> None:
    """AD-PSGD for ASR: 0.1 to 1 over 10 epochs, then annealed by 1/sqrt 2 an epoch."""
    schedule = Schedule(1.0, warmup_epochs=10, warmup_from=0.1, anneal_from=10)
    assert [round(schedule.at(epoch), 4) for epoch in (0, 5, 9.5, 10, 11, 15)] == [
        0.1, 0.55, 0.955, 0.7071, 0.5, 0.125,
    ]  # fmt: skip


def test_without_annealing_or_warm_up_it_is_constant() -> None:
    assert {Schedule(0.3).at(epoch) for epoch in (0, 1.5, 100)} == {0.3}


def test_annealing_that_begins_in_the_warm_up_waits_for_its_end() -> None:
    schedule = Schedule(1.0, warmup_epochs=2.0, anneal_from=0, anneal_factor=0.5)
    assert (schedule.at(1.0), schedule.at(2.0)) == (0.5, 0.125)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "--learning-rate 0.0: must be positive"),
        ({"learning_rate": math.nan}, "--learning-rate nan: must be positive"),
        ({"learning_rate": math.inf}, "--learning-rate inf: must be positive"),
        ({"anneal_factor": 0.0}, r"--anneal-factor 0.0: must be in \(0, 1\]"),
        ({"anneal_factor": 1.1}, r"--anneal-factor 1.1: must be in \(0, 1\]"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs -1.0: must not be negative"),
        ({"warmup_from": -0.1}, "--warmup-from -0.1: must not be negative"),
    ],
)
def test_impossible_rates_are_named(options: dict[str, float], message: str) -> None:
    values = {"learning_rate": 0.1} | options
    with pytest.raises(ConfigError, match=message):
        Schedule(**values)  # type: ignore[arg-type]
