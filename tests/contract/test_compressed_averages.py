"""Averages as quantised differences: the strategies that have them, and the mean itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError
from speechdp.parallel.registry import parse_strategy
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import Progress
from speechdp.parallel.training_step import TrainingStep
from speechdp.strategies.easgd import Easgd
from speechdp.strategies.mechanisms import quantisation
from speechdp.strategies.mechanisms.number_formats import BLOCK, Compression, share_of_bytes
from speechdp.strategies.mechanisms.quantised_mean import Outbox, QuantisedMean
from speechdp.strategies.mechanisms.quantised_wire import QuantisedWire
from speechdp.strategies.mechanisms.server import SERVER
from speechdp.testing import (
    NUM_STEPS,
    Sgd,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_close,
    make_batch,
    make_replica,
    strategy_contract,
)
from speechdp.timing.timeline import Timeline

#: Of every strategy one; with options that keep something between steps, and what is plain SGD on one rank.
CASES = {
    "model_averaging:period=2,compression=int4,first=best,leave_out=0.05,max_change=9,combine=3": "",
    "model_averaging:period=15f,begin=2,momentum=reset,compression=int8": "momentum=keep",
    "adaptive_averaging:period=2,interval=3,compression=int8": "",
    "bmuf:period=3,eta=0.3,nesterov=true,compression=int4": "nesterov=false,eta=0,momentum=keep",
    "slowmo:period=3,beta=0.4,begin=1,compression=int8": "beta=0",
    "diloco:period=3,compression=int8": "outer_learning_rate=1,outer_momentum=0",
    "delayed_averaging:period=4,delay=2,fragments=2,mix=0.5,compression=int4": "",
    "delayed_averaging:period=2,delay=0,compression=int8": "",
    "easgd:mode=sync,period=2,compression=int8": "",
}


@pytest.mark.parametrize("strategy", CASES)
def test_a_compressed_strategy_keeps_to_the_contract(strategy: str) -> None:
    """Among it: one rank is plain SGD, bitwise equal replicas, saved and loaded it goes on bit by bit."""
    strategy_contract(strategy, neutral=CASES[strategy], sizes=(3,))


@pytest.mark.parametrize("strategy", [s for s in CASES if not s.startswith(("delayed", "easgd"))])
def test_replicas_are_bitwise_equal_after_each_average(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        run = StrategyRun(comm, strategy)
        num_averages = 0
        for step in range(NUM_STEPS):
            run.step([make_batch(comm.rank, step)])
            if run.strategy.state_dict()["window_steps"] == 0:
                num_averages += 1
                assert_bitwise_equal_over_ranks(comm, run.parameters(), strategy)
        assert num_averages >= 2
        run.finish()

    run_threads(3, check)


# What stands behind compression= falls away here: of the case with first=best all that makes it one.
@pytest.mark.parametrize("strategy", [s for s in CASES if "first=best" not in s])
def test_a_compressed_run_stays_near_one_in_full_precision(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        finals = []
        for compression in ("none", "int8"):
            head, _, _ = strategy.rpartition(",compression=")
            run = StrategyRun(comm, f"{head},compression={compression}")
            begun = run.parameters()
            run.train(comm.rank)
            finals.append(run.finish())
        error = float((finals[1] - finals[0]).abs().max())
        assert 0 < error < 0.03 * float((finals[0] - begun).abs().max()), f"{strategy}: differs by {error:g}"

    run_threads(3, check)


def test_ranks_of_weight_zero_take_part() -> None:
    """All ranks have frames in the first window, in the others rank 0 alone, whose model they get."""

    def check(comm: Communicator) -> None:
        run = StrategyRun(comm, "model_averaging:period=2,compression=int4")
        for step in range(NUM_STEPS):
            run.step([make_batch(comm.rank, step)] if comm.rank == 0 or step < 2 else [])
            if step % 2 == 1:
                assert_bitwise_equal_over_ranks(comm, run.parameters(), "with ranks that ran out")
        assert bool(run.finish().isfinite().all())

    run_threads(3, check)


def test_a_rank_that_has_gone_astray_is_left_out() -> None:
    def check(comm: Communicator) -> None:
        run = StrategyRun(comm, "model_averaging:period=2,leave_out=1,compression=int8")
        run.train(comm.rank, 0, 3)
        if comm.rank == 1:
            run.replica.parameters.values.fill_(math.nan)
        run.train(comm.rank, 3, 6)
        assert run.strategy.statistics()["times_left_out"] == (1 if comm.rank == 1 else 0)
        assert bool(run.finish().isfinite().all())

    run_threads(3, check)


class Quadratic:
    """A run on f_i(w) = h (w - c_i)^2 / 2 for each of a rank's frames; h differs between parameters."""

    def __init__(self, comm: Communicator, strategy: str, target: Tensor, frames: int) -> None:
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(torch.zeros_like(target)))
        self.target, self.frames, self.num_steps = target, frames, 0
        self.curvature = torch.linspace(1.0, 2.0, target.numel(), dtype=target.dtype)
        self.replica = Replica(model, Sgd(learning_rate=0.1))
        self.timeline = Timeline(None, rank=comm.rank, device=torch.device("cpu"))
        self.strategy = parse_strategy(strategy).attach(self.replica, comm, self.timeline)
        self.strategy.resume()

    def train(self, num_steps: int, learning_rate: Callable[[int], float] = lambda step: 0.1) -> None:
        """Go on for so many steps."""
        for _ in range(num_steps):
            self.replica.set_learning_rate(learning_rate(self.num_steps))
            self.num_steps += 1
            step = TrainingStep(self.strategy, self.timeline, self.frames)
            step.begin()
            (w,) = self.replica.model_parameters
            step.backward(self.frames * (self.curvature * (w - self.target) ** 2).sum() / 2)
            frames = 10.0 * self.num_steps
            step.end(Progress(self.num_steps, frames, 0.0, self.num_steps / 1000), number=self.num_steps)

    def finish(self) -> Tensor:
        """End; return the parameters."""
        self.strategy.pause()
        self.strategy.finish()
        self.strategy.close()
        return self.replica.parameters.views[0].clone()


def _targets(size: int, num_values: int = 700) -> Tensor:
    return torch.randn(size, num_values, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("compression", ["int8", "int4"])
@pytest.mark.parametrize(
    "strategy",
    [
        "model_averaging:period=4",
        "adaptive_averaging:period=4,halve=false",
        "bmuf:period=4,eta=0.3",
        "slowmo:period=4,beta=0.3",
        "diloco:period=4,outer_momentum=0.3",
        "delayed_averaging:period=4,delay=2,fragments=2",
        "easgd:period=4,mode=sync",
        "easgd:period=4",
        "dpsgd:period=4",
    ],
)
def test_a_quadratic_is_brought_to_its_optimum(strategy: str, compression: str) -> None:
    """Ranks have the same optimum, so that movements and their scales vanish as they come near it."""
    target = _targets(1)[0]

    def check(comm: Communicator) -> float:
        run = Quadratic(comm, f"{strategy},compression={compression}", target, frames=3 + comm.rank)
        run.train(400)
        return float((run.finish() - target).abs().max())

    assert max(run_threads(2, check)) < 1e-6


@pytest.mark.parametrize("strategy", ["model_averaging:period=4", "slowmo:period=4,beta=0.3"])
def test_without_error_feedback_ranks_that_disagree_would_miss_their_optimum(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank pulls elsewhere all the time; the learning rate falls like 1 / t, and so do roundings."""
    size = 3
    targets = _targets(size)
    frames = torch.tensor([3.0, 5.0, 4.0], dtype=torch.float64)
    optimum = (frames @ targets) / frames.sum()

    def check(comm: Communicator) -> float:
        text = f"{strategy},compression=int4"
        run = Quadratic(comm, text, targets[comm.rank], frames=int(frames[comm.rank]))
        run.train(1000, lambda step: 1 / (4 + step / 2))
        return float((run.finish() - optimum).abs().max())

    assert max(run_threads(size, check)) < 4e-3
    monkeypatch.setattr(QuantisedMean, "_keep_errors", lambda *_: None)
    assert max(run_threads(size, check)) > 2e-2


def test_parameters_that_move_little_beside_others_move_all_the_same() -> None:
    """Workers pull a centre apart for ever: over time it is where the pulls balance, in int4 as well."""
    size, num_steps = 3, 150
    magnitudes = 10.0 ** (-2 * (torch.arange(700) % 256) / 256)  # within a block, that shares a scale
    targets = _targets(size) * magnitudes
    balance = targets.mean(0)

    def check(comm: Communicator, compression: str, *, forgets: bool) -> float:
        text = f"easgd:period=2,alpha=0.3,compression={compression}"
        run = Quadratic(comm, text, targets[comm.rank], frames=4)
        strategy, total, count = run.strategy, torch.zeros_like(balance), 0
        assert isinstance(strategy, Easgd)
        for step in range(num_steps):
            for mover in range(size):
                if mover == comm.rank:
                    run.train(1)
                comm.barrier()
            if comm.rank == 0:
                if forgets:
                    strategy._server.owed.zero_()  # type: ignore[union-attr]
                if step >= num_steps // 3:
                    total += strategy._centre[: balance.numel()]  # type: ignore[index]
                    count += 1
            comm.barrier()
        run.finish()
        return float(((total / max(1, count) - balance) / magnitudes).abs().mean())

    def error(compression: str, *, forgets: bool = False) -> float:
        return run_threads(size, lambda comm: check(comm, compression, forgets=forgets))[0]

    in_full, rounded, forgetful = error("none"), error("int4"), error("int4", forgets=True)
    assert rounded < 1.5 * in_full, (in_full, rounded)
    assert forgetful > 2 * in_full, "nothing is owed: the check says nothing"


@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_vectors_longer_than_a_stretch_reach_the_server_and_come_back(
    compression: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantisation, "_STRETCH", 2 * BLOCK)
    length = 7 * BLOCK + 3
    x = torch.randn(length, generator=torch.Generator().manual_seed(1))
    largest = max(float(block.abs().max()) for block in x.split(BLOCK))

    def check(comm: Communicator) -> list[Tensor]:
        peers = comm.peers()
        known = {1 - comm.rank: torch.zeros(length)}
        wire, answer = QuantisedWire(known, compression, x), torch.zeros(length)
        if comm.rank == SERVER:
            wire.take(peers, 1, answer)
            taken = answer.clone()
            wire.round(answer)
            wire.reply(peers, 1, answer)
        else:
            wire.give(peers, x)
            taken = known[SERVER].clone()
            wire.hear(peers, answer)
        peers.close()
        return [taken, answer]

    (taken, replied), (given, heard) = run_threads(2, check)
    assert torch.equal(taken, given) and torch.equal(replied, heard)
    half = 0.5 * largest / (127 if compression == "int8" else 7) * (1 + 1e-5)
    assert 0 < float((taken - x).abs().max()) <= half
    assert float((heard - taken).abs().max()) <= half


def _averages(
    comm: Communicator,
    compression: Compression,
    rounds: Callable[[int], tuple[Tensor, float]],
    num_rounds: int,
) -> dict[str, Any]:
    """Average `rounds(k)`, vector and weight of this rank, one after the other, each from the last mean on.

    Returns:
        The means, this rank's state, and the bytes it has sent.
    """
    peers = comm.peers()
    outbox = Outbox(peers)
    outbox.open()
    first, _ = rounds(0)
    mean, reference = QuantisedMean(outbox, first, compression), torch.zeros_like(first)
    means = []
    for number in range(num_rounds):
        own, weight = rounds(number)
        mean.average(own, reference, weight, out=own)
        means.append(own.clone())
        reference = own
    outbox.close()
    found = {"means": means, "sent": peers.sent_bytes, **mean.state_dict()}
    peers.close()
    return found


#: Weights of each rank, round by round: unequal, none, hardly any, all of one rank.
_NONE = 2.0**-64
_WEIGHTS = ([3, 5, 4], [900, 0, 7], [1, 1, 1], [0, 0, 12], [_NONE] * 3, [_NONE, 60, _NONE], [8, 9, 1])


#: One rank after the other has all the frames.
_IN_TURN = [[9.0 if round_ % 3 == rank else _NONE for rank in range(3)] for round_ in range(60)]


@pytest.mark.parametrize("compression", ["int8", "int4"])
@pytest.mark.parametrize(
    ("num_values", "all_weights"),
    [(2, _WEIGHTS), (255, _WEIGHTS), (768, _WEIGHTS), (200_000, _WEIGHTS), (1000, _IN_TURN)],
    ids=lambda value: str(value) if isinstance(value, int) else f"{len(value)}-rounds",
)
def test_nothing_is_lost_but_only_late(
    compression: Compression, num_values: int, all_weights: Sequence[Sequence[float]]
) -> None:
    """What has been handed out, and what ranks and owners hold, is together the sum of the exact means."""
    generator = torch.Generator().manual_seed(num_values)
    vectors = torch.randn(len(all_weights), 3, num_values, generator=generator, dtype=torch.float64)

    def check(comm: Communicator) -> dict[str, Any]:
        # Fixed movements, wherever the last mean is: its own errors do not come back.
        place = torch.zeros(num_values, dtype=torch.float64)

        def rounds(number: int) -> tuple[Tensor, float]:
            return vectors[number, comm.rank] + place, float(all_weights[number][comm.rank])

        peers = comm.peers()
        outbox = Outbox(peers)
        outbox.open()
        mean = QuantisedMean(outbox, place, compression)
        for number in range(len(all_weights)):
            own, weight = rounds(number)
            mean.average(own, place.clone(), weight, out=place)
        outbox.close()
        peers.close()
        return {"place": place, **mean.state_dict()}

    found = run_threads(3, check)
    exact = torch.zeros(num_values, dtype=torch.float64)
    for weights, of_ranks in zip(torch.tensor(all_weights, dtype=torch.float64), vectors, strict=True):
        exact += weights @ of_ranks / weights.sum()
    held = sum(f["error"] for f in found) + torch.cat([f["owner_error"] for f in found])
    for f in found:
        assert torch.equal(f["place"], found[0]["place"]), "ranks hold different bits"
    torch.testing.assert_close(found[0]["place"] + held, exact, rtol=0, atol=1e-10)
    assert float(held.abs().max()) > 1e-4, "nothing was rounded: the check says nothing"
    assert float(held.abs().max()) < (0.2 if compression == "int8" else 3.0), "errors pile up"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("compression", "levels"), [("int8", 127), ("int4", 7)])
def test_a_mean_is_off_by_half_a_step_of_each_rounding(
    compression: Compression, levels: int, dtype: torch.dtype, size: int
) -> None:
    num_values = 5000
    vectors = torch.randn(size, num_values, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = [3.0 + rank for rank in range(size)]

    def check(comm: Communicator) -> Tensor:
        (mean,) = _averages(comm, compression, lambda _: (vectors[comm.rank].clone(), weights[comm.rank]), 1)[
            "means"
        ]
        return mean

    means = run_threads(size, check)
    exact = torch.tensor(weights, dtype=torch.float64) @ vectors.double() / sum(weights)
    assert all(torch.equal(mean, means[0]) for mean in means)
    error = float((means[0].double() - exact).abs().max())
    assert 0 < error <= 2 * 0.5 * float(vectors.abs().max()) / levels * (1 + 1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_has_no_weight_may_hold_anything_and_what_has_some_shows(value: float) -> None:
    def check(comm: Communicator, weight: float) -> Tensor:
        own = torch.full((600,), value if comm.rank == 1 else 1.0)
        (mean,) = _averages(comm, "int8", lambda _: (own, weight if comm.rank == 1 else 1.0), 1)["means"]
        return mean

    for mean in run_threads(3, lambda comm: check(comm, 0.0)):
        torch.testing.assert_close(mean, torch.ones(600))
    for mean in run_threads(3, lambda comm: check(comm, 1.0)):
        assert not bool(mean.isfinite().any())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("compression", "share"), [("int8", 1 / 4), ("int4", 1 / 8)])
def test_a_rank_sends_a_quarter_or_an_eighth_of_what_a_ring_does(
    compression: Compression, share: float, size: int
) -> None:
    num_values = 2**18
    found = run_threads(size, lambda c: _averages(c, compression, lambda _: (torch.ones(num_values), 1.0), 2))
    in_full = 2 * 2 * (size - 1) / size * 4 * num_values
    for f in found:
        assert f["sent"] == pytest.approx(share_of_bytes(compression) * in_full, rel=1e-3)
        assert f["sent"] <= 1.04 * share * in_full


@pytest.mark.parametrize(
    "strategy", ["model_averaging:period=1", "easgd:period=1", "easgd:period=1,mode=sync", "dpsgd:period=1"]
)
def test_what_a_strategy_sends_is_counted(strategy: str) -> None:
    def sent(comm: Communicator, compression: str) -> float:
        run = StrategyRun(comm, f"{strategy},compression={compression}")
        before = comm.sent_bytes
        run.train(comm.rank)
        run.strategy.pause()  # rank 0 may have answers to send
        run.strategy.resume()
        total = comm.sent_bytes - before + run.strategy.peer_bytes
        run.finish()
        return total

    of_ranks = [run_threads(2, lambda c, n=n: sent(c, n)) for n in ("none", "int8", "int4")]
    for in_full, *compressed in zip(*of_ranks, strict=True):
        # In double precision, and with blocks that are not full.
        assert 0 < 4 * compressed[0] < in_full and compressed[1] < 0.6 * compressed[0]


def test_a_backend_without_messages_between_two_ranks_is_refused_with_the_remedy() -> None:
    class WithoutPeers(SerialCommunicator):
        has_peers = False
        peers = Communicator.peers

    with pytest.raises(ConfigError, match=r"no messages between two ranks.*start with mpirun"):
        StrategyRun(WithoutPeers(), "model_averaging:compression=int8")


def test_parameters_in_half_precision_are_refused() -> None:
    def check(comm: Communicator) -> None:
        replica = make_replica()
        half = Replica(replica.model.bfloat16(), Sgd())
        with pytest.raises(ConfigError, match=r"slowmo:compression=int4: the parameters are bfloat16; make"):
            StrategyRun(comm, "slowmo:compression=int4", half)

    run_threads(2, check)


def test_what_is_shown_and_kept_is_the_mean_in_full_precision() -> None:
    def check(comm: Communicator, strategy: str) -> None:
        run = StrategyRun(comm, f"{strategy},compression=int4")
        run.train(comm.rank, 0, 5)  # two steps into a window
        run.strategy.pause()
        frames = sum(make_batch(comm.rank, step).num_frames for step in (3, 4))
        weighted = torch.cat([frames * run.parameters(), torch.tensor([float(frames)])])
        comm.allreduce(weighted, name="mean")
        with run.strategy.evaluation_parameters():
            assert_close(run.parameters(), weighted[:-1] / weighted[-1], f"{strategy} under evaluation")
        assert_close(run.finish(), weighted[:-1] / weighted[-1], f"{strategy} after finish")

    for strategy in ("model_averaging:period=3", "bmuf:period=3,eta=0.3"):
        run_threads(3, lambda comm, s=strategy: check(comm, s))
