"""parameter_server and easgd: options that are refused, parts of the data, a server that fails."""

from __future__ import annotations

import pytest
import torch

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import CommunicationError, ConfigError
from speechdp.parallel.registry import parse_strategy
from speechdp.testing import StrategyRun, make_batch
from tests.helpers.waiting import no_thread_left


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parameter_server:mode=sync,staleness_aware=true", "no gradient is stale"),
        ("parameter_server:mode=both", "choose one of async, sync"),
        ("easgd:mode=sync,dedicated=true", "there is no server"),
        ("easgd:alpha=1", "0 < alpha < 1"),
        ("easgd:alpha=-0.1", "0 < alpha < 1"),
        ("easgd:period=0", "is not a period"),
    ],
)
def test_options_that_cannot_go_together_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_strategy(text)


def test_a_centre_that_would_overshoot_is_refused_before_step_1() -> None:
    run_threads(3, lambda comm: StrategyRun(comm, "easgd:mode=sync,alpha=0.33"))
    with pytest.raises(ConfigError, match=r"alpha=0.34,mode=sync: with 3 ranks .* alpha <= 0.3333"):
        run_threads(3, lambda comm: StrategyRun(comm, "easgd:mode=sync,alpha=0.34"))


@pytest.mark.parametrize("name", ["parameter_server", "easgd"])
def test_a_server_of_its_own_trains_on_nothing(name: str) -> None:
    together, apart = parse_strategy(name), parse_strategy(f"{name}:dedicated=true")
    assert together.roster(3).part_of_rank == [0, 1, 2] and together.roster(3).num_parts == 3
    assert apart.roster(3).part_of_rank == [None, 0, 1] and apart.roster(3).num_parts == 2


def test_only_what_is_in_step_is_synchronous() -> None:
    for name in ("parameter_server", "easgd"):
        assert not parse_strategy(name).traits.synchronous and parse_strategy(name).traits.needs_peers
        assert parse_strategy(f"{name}:mode=sync").traits.synchronous
    assert not parse_strategy("easgd:mode=sync").traits.needs_peers


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("strategy", ["parameter_server", "easgd:period=1"])
def test_a_failing_server_ends_every_rank(strategy: str) -> None:
    """Rank 1 sends what the server cannot read; nobody waits for an answer for ever."""

    def work(comm: Communicator) -> None:
        run = StrategyRun(comm, strategy)
        comm.barrier()
        if comm.rank == 1:
            run.strategy.peers.send(torch.zeros(1), 0, tag=0)
        if comm.rank == 2:
            run.step([make_batch(2, 0)])  # may be served before, or wait in vain
        run.strategy.pause()

    with (
        no_thread_left(),
        pytest.raises(CommunicationError, match="expected 32 bytes with tag 0 from rank 1"),
    ):
        run_threads(3, work)
