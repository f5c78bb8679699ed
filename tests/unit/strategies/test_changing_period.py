"""A strategy whose period changes declares that; PeriodicStrategy then records each period."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.experiments.race.plan import why_left_out
from speechdp.parallel import registry
from speechdp.parallel.period import Period
from speechdp.parallel.registry import parse_strategy
from speechdp.parallel.strategy import Traits
from speechdp.strategies.mechanisms.periodic import PeriodicStrategy
from speechdp.testing.strategies import Sgd, StrategyRun, make_replica, resumed_run, strategy_contract


@pytest.fixture(autouse=True)
def doubling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry.STRATEGIES, "registered", {})

    @registry.strategy("doubling")
    @dataclass(eq=False)
    class Doubling(PeriodicStrategy):
        @property
        def traits(self) -> Traits:
            return replace(super().traits, period_changes=True)

        def set_up(self) -> None:
            super().set_up()
            self._rounds = 0

        @property
        def current_period(self) -> Period:
            return Period(self.period.value * 2**self._rounds)

        def exchange(self) -> None:
            self.average_parameters()
            self._rounds += 1

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "rounds": self._rounds}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self._rounds = state["rounds"]

    yield


def _listened(run: StrategyRun) -> list[tuple[int, str]]:
    """Return a list that gets the periods that a run records."""
    found: list[tuple[int, str]] = []
    run.timeline.note_period = lambda step, period: found.append((step, period))  # type: ignore[method-assign]
    return found


def _train(comm: Communicator, strategy: str, steps: int) -> tuple[StrategyRun, list[tuple[int, str]]]:
    run = StrategyRun(comm, strategy, make_replica(Sgd(momentum=0.9)))
    found = _listened(run)
    for _ in range(steps):
        run.train(comm.rank, 0, 1)
    return run, found


def test_each_period_is_recorded_where_it_begins() -> None:
    run, found = _train(SerialCommunicator(), "doubling:period=1", 8)
    assert found == [(0, "1"), (1, "2"), (3, "4"), (7, "8")]
    assert run.strategy.statistics() == {"period": "8"}
    _, late = _train(SerialCommunicator(), "doubling:period=2,begin=3", 6)
    assert late == [(3, "2"), (5, "4")]  # gradients are averaged until then


def test_a_resumed_run_records_the_period_it_goes_on_with() -> None:
    """A record at step 0 would drop those of the first start from the report."""
    first, _ = _train(SerialCommunicator(), "doubling:period=1", 3)
    second = resumed_run(SerialCommunicator(), "doubling:period=1", first)
    found = _listened(second)
    for _ in range(5):
        second.train(0, 0, 1)
    assert found == [(3, "4"), (7, "8")]


def test_a_constant_period_is_not_recorded() -> None:
    for strategy in ("model_averaging:period=2", "delayed_averaging:period=4,fragments=2"):
        run, found = _train(SerialCommunicator(), strategy, 9)
        assert not found and "period" not in run.strategy.statistics()


def test_what_changes_its_period_changes_what_it_exchanges() -> None:
    assert parse_strategy("doubling").traits.changes_over_time
    assert "changes during training" in why_left_out(parse_strategy("doubling"))
    assert parse_strategy("adaptive_averaging").traits.period_changes


def test_such_a_strategy_keeps_the_contract() -> None:
    strategy_contract("doubling:period=1", sizes=(1, 2))
