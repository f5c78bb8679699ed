"""What `speechdp.testing` offers authors: every strategy of ours keeps to it, faulty ones are told apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import speechdp
from speechdp.parallel.registry import STRATEGIES, strategy_names
from speechdp.parallel.strategy import Progress
from speechdp.strategies.mechanisms.periodic import PeriodicStrategy
from speechdp.strategies.model_averaging import ModelAveraging
from speechdp.testing import strategy_contract

#: Options with which a strategy is plain SGD on one rank, where it is not by default.
NEUTRAL = {"bmuf": "momentum=keep", "diloco": "outer_learning_rate=1,outer_momentum=0"}


@pytest.mark.parametrize("name", strategy_names())
def test_every_strategy_keeps_the_contract(name: str) -> None:
    strategy_contract(name, neutral=NEUTRAL.get(name, ""), sizes=(1, 3))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the test's strategies afterwards."""
    monkeypatch.setattr(STRATEGIES, "registered", dict(STRATEGIES.registered))


@dataclass(eq=False)
class _Every3(ModelAveraging):
    """Model averaging with a short period."""

    def __post_init__(self) -> None:
        self.period = type(self.period)(3)


class ForgetsItsCounter(_Every3):
    """Loads nothing of what it has saved."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "counter": 0} if "counter" in state else _zeroed(state))


def _zeroed(state: dict[str, Any]) -> dict[str, Any]:
    return {key: type(value)() if isinstance(value, int | float) else value for key, value in state.items()}


class EndsApart(_Every3):
    """Leaves every rank with its own parameters."""

    def finish(self) -> None:
        return None


class EvaluatesForGood(_Every3):
    """Goes on training from the average that was evaluated."""

    @contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        self.average_parameters()
        yield


class DoesNotMove(PeriodicStrategy):
    """Never updates."""

    def step(self, progress: Progress) -> None:
        self.replica.clear_gradients()

    def exchange(self) -> None:
        self.average_parameters()


@pytest.mark.parametrize(
    ("faulty", "neutral", "words"),
    [
        (ForgetsItsCounter, "", "resumed differs from uninterrupted"),
        (EndsApart, "", "after finish: ranks hold different bits"),
        (EvaluatesForGood, "", "evaluation changed the parameters"),
        (DoesNotMove, "", "plain SGD: differs"),
        (DoesNotMove, None, "the loss went from"),
    ],
)
def test_a_faulty_strategy_is_told(
    registered: None, faulty: type[PeriodicStrategy], neutral: str | None, words: str
) -> None:
    speechdp.strategy("faulty")(dataclass(eq=False)(type(faulty.__name__, (faulty,), {})))
    with pytest.raises(AssertionError, match=re.escape(words)):
        strategy_contract("faulty", neutral=neutral, sizes=(2,))
