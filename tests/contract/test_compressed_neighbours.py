"""dpsgd whose neighbours exchange quantised differences: the strategy, and the exchange itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError
from speechdp.parallel.replica import Replica
from speechdp.strategies.mechanisms import quantisation
from speechdp.strategies.mechanisms.neighbours import Neighbours, QuantisedNeighbours
from speechdp.strategies.mechanisms.number_formats import BLOCK, Compression, message_bytes
from speechdp.strategies.mechanisms.topology import ring_mixing
from speechdp.testing import (
    Sgd,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_close,
    make_replica,
    resumed_run,
    strategy_contract,
)
from speechdp.timing.timeline import Timeline
from tests.helpers.mixings import mixing_matrix
from tests.helpers.strategy_checks.dpsgd import assert_same_without_overlap

CASES = (
    "dpsgd:compression=int8",
    "dpsgd:period=2,begin=3,compression=int4",
    "dpsgd:overlap=false,period=15f,compression=int4",
)
COMPRESSIONS: tuple[Compression, ...] = ("int8", "int4")
LEVELS = {"int8": 127, "int4": 7}


@pytest.mark.parametrize("strategy", CASES)
def test_it_keeps_to_the_contract(strategy: str) -> None:
    """Among it: one rank is plain SGD; saved and loaded it goes on bit by bit."""
    strategy_contract(strategy, sizes=(2, 3))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", CASES)
def test_it_stays_near_full_precision(strategy: str, size: int) -> None:
    def check(comm: Communicator) -> None:
        finals = []
        for compression in ("none", "int8"):
            run = StrategyRun(comm, strategy.rpartition("=")[0] + f"={compression}")
            begun = run.parameters()
            run.train(comm.rank)
            finals.append(run.parameters())
            run.finish()
        error = float((finals[1] - finals[0]).abs().max())
        assert 0 < error < 0.03 * float((finals[0] - begun).abs().max()), f"{strategy}: differs by {error:g}"

    run_threads(size, check)


def test_overlapped_or_not_the_result_is_the_same() -> None:
    run_threads(3, lambda comm: assert_same_without_overlap(comm, "compression=int4"))


@contextlib.contextmanager
def _ring(comm: Communicator, parameters: Tensor, compression: Compression) -> Iterator[Callable[[], int]]:
    """Yield what averages `parameters` with the neighbours' and returns the bytes sent so far."""
    peers, mixing = comm.peers(), ring_mixing(comm.rank, comm.size)
    timeline = Timeline(None, rank=comm.rank, device=torch.device("cpu"))
    route: Neighbours | QuantisedNeighbours = Neighbours(peers, timeline, parameters)
    if compression != "none":
        route = QuantisedNeighbours(peers, timeline, parameters, mixing, compression)

    def exchange() -> int:
        route.start(mixing)
        route.complete()
        return peers.sent_bytes

    route.open()
    yield exchange
    route.close()
    peers.close()


def _weights(size: int) -> Tensor:
    """Return W."""
    mixings = [ring_mixing(rank, size) for rank in range(size)]
    return torch.tensor(mixing_matrix(mixings), dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_where_rounding_takes_nothing_away_it_is_full_precision(
    compression: Compression, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each difference is whole multiples of a scale, the largest of a block as many as a code can say."""
    monkeypatch.setattr(quantisation, "_STRETCH", 2 * BLOCK)
    length, levels, generator = 5 * BLOCK + 3, LEVELS[compression], torch.Generator().manual_seed(size)
    moves = torch.randint(-levels, levels + 1, (8, size, length), generator=generator).double()
    moves[:, :, ::BLOCK] = levels
    # Of another scale at every exchange, and what is sent is the sum of all so far: exactly so.
    sent = (moves * 2.0 ** -torch.arange(8)[:, None, None]).cumsum(0)

    def check(comm: Communicator, compression: Compression) -> Tensor:
        parameters, found = torch.zeros(length, dtype=torch.float64), []
        with _ring(comm, parameters, compression) as exchange:
            for vectors in sent:
                parameters.copy_(vectors[comm.rank])
                exchange()
                found.append(parameters.clone())
        return torch.stack(found)

    in_full, compressed = (
        torch.stack(run_threads(size, lambda comm, c=c: check(comm, c)), 1) for c in ("none", compression)
    )
    expected = torch.einsum("ij,tjn->tin", _weights(size), sent)
    for other in (in_full, expected):
        torch.testing.assert_close(compressed, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_mean_over_ranks_is_kept(compression: Compression, size: int) -> None:
    """Over many exchanges in single precision, each after a movement of each rank's own."""
    length, num_rounds = 700, 1000
    begin = torch.randn(length, generator=torch.Generator().manual_seed(1))

    def check(comm: Communicator) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(comm.rank + 2)
        parameters, moved = begin.clone(), begin.double()
        with _ring(comm, parameters, compression) as exchange:
            for _ in range(num_rounds):
                before = parameters.clone()
                parameters.add_(torch.randn(length, generator=generator), alpha=0.01)
                moved += parameters.double() - before.double()
                exchange()
        return parameters.double(), moved

    found = run_threads(size, check)
    ends, moved = (torch.stack(vectors).mean(0) for vectors in zip(*found, strict=True))
    # A thousand roundings to 24 bits.
    torch.testing.assert_close(ends, moved, rtol=0, atol=1e-5)
    spread = max(float((x - ends).abs().max()) for x, _ in found)
    # Each by itself would be one away.
    assert 1e-5 < spread < 0.2, f"replicas are {spread:g} apart"


@pytest.mark.parametrize("size", [2, 3, 4, 9, 16])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_ranks_that_do_not_move_come_to_agree(compression: Compression, size: int) -> None:
    """As fast as in full precision, within a factor: the ring's W alone decides how fast that is."""
    length = 2 * BLOCK + 7
    begin = torch.randn(size, length, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # Within a block some move much less than others.
    begin *= 10.0 ** (-3 * (torch.arange(length) % BLOCK) / BLOCK)
    weights, num_rounds, exact = _weights(size), 0, begin
    while float((exact - exact.mean(0)).norm()) > 1e-4 * float(begin.norm()):
        exact, num_rounds = weights @ exact, num_rounds + 1

    def check(comm: Communicator) -> Tensor:
        parameters = torch.zeros(length, dtype=torch.float64)
        with _ring(comm, parameters, compression) as exchange:
            parameters.copy_(begin[comm.rank])
            for _ in range(2 * num_rounds + 12):
                exchange()
        return parameters

    ends = torch.stack(run_threads(size, check))
    assert float((ends - begin.mean(0)).norm()) < 1e-4 * float(begin.norm())


@pytest.mark.parametrize(("compression", "share"), [("int8", 0.254), ("int4", 0.129)])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_sends_a_quarter_or_an_eighth(compression: Compression, share: float, size: int) -> None:
    length, num_rounds = 2**18, 3

    def check(comm: Communicator) -> int:
        parameters = torch.randn(length)
        with _ring(comm, parameters, compression) as exchange:
            return [exchange() for _ in range(num_rounds)][-1]

    num_neighbours = min(size - 1, 2)
    for sent in run_threads(size, check):
        assert sent == num_rounds * num_neighbours * message_bytes(length, 8 if compression == "int8" else 4)
        assert sent == pytest.approx(num_rounds * num_neighbours * share * 4 * length, rel=2e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_no_number_reaches_the_neighbours(compression: Compression, value: float) -> None:
    """As in full precision: the loss of every rank is to show it in the end."""
    size, length = 4, 3 * BLOCK

    def check(comm: Communicator, compression: Compression) -> list[Tensor]:
        parameters, found = torch.ones(length), []
        with _ring(comm, parameters, compression) as exchange:
            if comm.rank == 1:
                parameters[BLOCK + 5] = value
            for _ in range(2):
                exchange()
                found.append(parameters.isfinite())
        return found

    for rank, rounds in enumerate(run_threads(size, lambda comm: check(comm, compression))):
        in_full = run_threads(size, lambda comm: check(comm, "none"))[rank]
        for found, expected in zip(rounds, in_full, strict=True):
            assert not bool((found & ~expected).any()), f"rank {rank}: hidden"
            assert bool(found[:BLOCK].all()) and bool(found[2 * BLOCK :].all()), "beyond its block"
        assert not bool(rounds[-1].all()), f"rank {rank}: not reached by two exchanges"


def test_after_a_common_beginning_all_know_where_it_ended() -> None:
    def check(comm: Communicator) -> None:
        run = StrategyRun(comm, "dpsgd:begin=4,compression=int8")
        begun = run.parameters()
        run.train(comm.rank, 0, 4)
        known = run.strategy.state_dict()["known"]
        assert torch.equal(known, run.replica.parameters.values) and not torch.equal(run.parameters(), begun)
        assert_bitwise_equal_over_ranks(comm, known, "known after the beginning")
        run.train(comm.rank, 4, 6)
        run.finish()

    run_threads(3, check)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 4), (1, 3)])
def test_other_neighbours_are_told_what_they_know(before: int, after: int) -> None:
    """With rank r modulo R's state: otherwise a neighbour would add differences to something else."""
    strategy = "dpsgd:compression=int4"

    def save(comm: Communicator) -> tuple[Tensor, dict[str, object]]:
        run = StrategyRun(comm, strategy)
        run.train(comm.rank, 0, 5)
        found = run.replica.parameters.values.clone(), run.strategy.state_dict()
        run.finish()
        return found

    saved = run_threads(before, save)

    def go_on(comm: Communicator) -> None:
        run = StrategyRun(comm, strategy, make_replica(Sgd(learning_rate=0.0)))
        run.strategy.pause()
        parameters, state = saved[comm.rank % before]
        run.replica.parameters.values.copy_(parameters)
        run.strategy.load_state_dict(state | {"mixing_due": True})
        run.strategy.resume()
        mean = comm.allreduce(run.parameters(), name="mean") / comm.size
        run.train(comm.rank, 5, 12)
        assert_close(comm.allreduce(run.parameters(), name="mean") / comm.size, mean, "mean over ranks")
        spread = float((run.parameters() - mean).abs().max())
        assert spread < 1e-3 * float(mean.abs().max()), f"replicas are {spread:g} apart"
        run.finish()

    run_threads(after, go_on)


@pytest.mark.parametrize("saved_after", [3, 4])
def test_a_resume_goes_on_with_what_rounding_has_left(saved_after: int) -> None:
    """What a checkpoint holds is needed: without it the run that goes on is another."""
    strategy = "dpsgd:compression=int4"

    def check(comm: Communicator, *, forgets: bool) -> bool:
        whole, first = (StrategyRun(comm, strategy, make_replica(Sgd(momentum=0.9))) for _ in range(2))
        whole.train(comm.rank)
        first.train(comm.rank, 0, saved_after)
        second = resumed_run(comm, strategy, first)
        if forgets:
            second.strategy.pause()
            state = second.strategy.state_dict()
            del state["known"]
            second.strategy.load_state_dict(state)
            second.strategy.resume()
        second.train(comm.rank, saved_after)
        return torch.equal(second.finish(), whole.finish())

    assert all(run_threads(3, lambda comm: check(comm, forgets=False)))
    assert not any(run_threads(3, lambda comm: check(comm, forgets=True)))


def test_parameters_in_half_precision_are_refused() -> None:
    def check(comm: Communicator) -> None:
        half = Replica(make_replica().model.bfloat16(), Sgd())
        with pytest.raises(ConfigError, match=r"dpsgd:compression=int8: the parameters are bfloat16; make"):
            StrategyRun(comm, "dpsgd:compression=int8", half)

    run_threads(2, check)
