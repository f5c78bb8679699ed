"""ad_psgd with ranks as threads: graphs that need more ranks, options that are refused, failing exchanges."""

from __future__ import annotations

from typing import Any

import pytest

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError
from speechdp.parallel.registry import parse_strategy
from tests.helpers.strategy_checks.ad_psgd import Descent
from tests.helpers.waiting import LIMIT_S, wait_until


@pytest.mark.parametrize("size", [5, 6, 8])
@pytest.mark.parametrize("kind", ["all", "ring", "exponential"])
def test_every_graph_is_connected_and_keeps_the_mean(kind: str, size: int) -> None:
    def check(comm: Communicator) -> None:
        run = Descent(comm, f":topology={kind}", learning_rate=0.0)
        run.strategy.pause()
        run.scatter()
        mean, before = run.mean(), run.spread()
        for _ in range(30):
            run.round(2)
        assert float((run.mean() - mean).abs().max()) <= 1e-12
        # A graph in two parts would leave the parts' means apart, about a quarter of the spread.
        assert run.spread() < 0.05 * before
        run.finish()

    run_threads(size, check)


def test_200_rounds_of_four_ranks_end() -> None:
    def check(comm: Communicator) -> None:
        run = Descent(comm)
        run.strategy.pause()
        for number in range(200):
            run.round((number * (comm.rank + 1)) % 4)
        run.finish()

    run_threads(4, check)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("period=0", "at least 1 step"),
        ("groups=0", "at least 1 rank"),
        ("topology=star", "choose one of all, ring, exponential"),
    ],
)
def test_bad_options_are_refused(options: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_strategy(f"ad_psgd:{options}")


def test_groups_that_do_not_divide_the_ranks_are_refused_before_step_1() -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="groups=2: 3 ranks cannot be divided"):
            Descent(comm, ":groups=2")

    run_threads(3, check)


def test_teams_are_the_groups() -> None:
    assert parse_strategy("ad_psgd:groups=2").roster(6).team_of_rank == [0, 0, 1, 1, 2, 2]
    assert parse_strategy("ad_psgd").roster(3).team_of_rank == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_exchange_ends_the_run_with_its_own_error(failing: int) -> None:
    def check(comm: Communicator) -> None:
        run = Descent(comm)
        if comm.rank == failing:

            def send(*_: Any, **__: Any) -> None:
                raise OSError("the cable is gone")

            run.strategy.peers.send = send  # type: ignore[method-assign]
        run.descend(1000, pause_s=0.01)

    with pytest.raises(OSError, match="the cable is gone") as caught:
        run_threads(2, check, timeout_s=LIMIT_S)
    assert f"raised on rank {failing} of 2" in caught.value.__notes__


def mixings(run: Descent) -> int:
    return int(run.strategy.statistics()["exchanges"])


def test_staleness_counts_the_mixings_between_two_steps() -> None:
    def check(comm: Communicator) -> None:
        run = Descent(comm)
        if comm.rank == 0:
            run.descend(6)
        else:
            # A slow rank, whose gradient meets an exchange of the fast one.
            run.descend(2, before_step=lambda: wait_until(lambda: mixings(run) > 0, "an exchange"))
        statistics = run.strategy.statistics()
        assert sum(statistics["staleness"]) == run.steps
        seen = sum(age * count for age, count in enumerate(statistics["staleness"]))
        run.strategy.pause()
        assert seen <= run.strategy.statistics()["exchanges"]
        assert comm.rank == 0 or seen > 0
        run.finish()

    run_threads(2, check)
