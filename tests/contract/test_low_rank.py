"""Gradients as factors of low rank: the sum itself, and gradient averaging by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError
from speechdp.parallel.flat_buffer import FlatBuffer
from speechdp.parallel.registry import parse_strategy
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import Progress
from speechdp.parallel.training_step import TrainingStep
from speechdp.strategies.mechanisms.low_rank import LowRankSum
from speechdp.testing import (
    NUM_STEPS,
    Sgd,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_close,
    assert_resumes,
    make_batch,
    make_replica,
    strategy_contract,
)
from speechdp.timing.timeline import Timeline

POWERSGD = "gradient_averaging:compression=powersgd"
RANK = 2
#: The first and the last but one as factors of rank 2: 2 (24 + 20) 2 of 480, 2 (12 + 30) 2 of 360.
SHAPES = [(24, 20), (24,), (3, 4), (12, 5, 6), (7,)]
NUM_IN_FULL = 24 + 12 + 7


def gradients_of(rank: int, step: int, *, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


class Sums:
    """A rank's gradients, summed step by step.

    Attributes:
        exact: sum of what went in, on this rank.
        given: sum of what came out; the same on all ranks.
    """

    def __init__(self, comm: Communicator, dtype: torch.dtype = torch.float64) -> None:
        self.gradients = FlatBuffer([torch.zeros(shape, dtype=dtype) for shape in SHAPES], num_extra=1)
        self.sum = LowRankSum(self.gradients, comm, RANK)
        self.exact, self.given = (torch.zeros_like(self.gradients.values) for _ in range(2))

    def step(self, gradients: Sequence[Tensor], frames: int = 1, loss_scale: float = 1.0) -> Tensor:
        self.gradients.whole.zero_()
        for view, gradient in zip(self.gradients.views, gradients, strict=True):
            view.copy_(gradient)
        self.gradients.extra[0] = frames
        self.exact += self.gradients.values
        self.sum.sum(loss_scale)
        self.given += self.gradients.values
        return self.gradients.whole.clone()

    def error(self) -> Tensor:
        error = self.sum.state_dict()["error"]
        assert isinstance(error, Tensor)
        return error.clone()


def total(comm: Communicator, vector: Tensor) -> Tensor:
    return comm.allreduce(vector.clone(), name="total")


@pytest.mark.parametrize("size", [2, 3])
def test_what_was_given_and_what_is_kept_add_up_to_all_that_came(size: int) -> None:
    def check(comm: Communicator) -> None:
        sums = Sums(comm)
        for step in range(8):
            # Unequal, and now and then nothing at all.
            frames = (step + comm.rank) % 3
            result = sums.step(gradients_of(comm.rank, step, scale=frames), frames)
            assert_bitwise_equal_over_ranks(comm, result, "a sum")
            assert result[-1] == sum((step + rank) % 3 for rank in range(comm.size))
        exact, kept = total(comm, sums.exact), total(comm, sums.error())
        torch.testing.assert_close(sums.given + kept, exact, rtol=0, atol=1e-12)
        assert float(kept.abs().max()) > 1, "nothing was taken away"
        in_full = [sums.gradients.views_of(kept)[i] for i in (1, 2, 4)]
        assert all(not bool(view.any()) for view in in_full), "what goes in full is owed"

    run_threads(size, check)


def test_matrices_of_low_rank_are_summed_exactly_and_others_are_not() -> None:
    def outer(vectors: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.outer(vectors[: shape[0]], vectors[-math.prod(shape[1:]) :]).view(shape)

    def check(comm: Communicator, copies: int) -> float:
        sums, generator = Sums(comm), torch.Generator().manual_seed(comm.rank)
        vectors = torch.randn(copies, 60, generator=generator, dtype=torch.float64)
        gradients = [
            sum(outer(v, s) for v in vectors) if len(s) > 1 else torch.ones(s, dtype=torch.float64)
            for s in SHAPES
        ]
        result = sums.step(gradients)[:-1]  # type: ignore[arg-type]
        return float((result - total(comm, sums.exact)).abs().max())

    # Of two ranks one outer product each: of rank 2 together.
    assert max(run_threads(2, lambda comm: check(comm, 1))) < 1e-12
    assert min(run_threads(2, lambda comm: check(comm, 2))) > 0.1


def test_what_is_kept_does_not_grow() -> None:
    """Also that of a rank with far fewer frames than the others, and of one without any."""

    def check(comm: Communicator) -> None:
        sums = Sums(comm)
        largest = []
        for _ in range(200):
            sums.step(gradients_of(0, 0, scale=[100.0, 1.0, 0.0][comm.rank]))
            largest.append(float(sums.error().abs().max()))
        assert max(largest[100:]) <= 1.2 * max(largest[50:100])
        assert (largest[-1] > 1e-12) == (comm.rank < 2), "what a rank keeps that had nothing"

    run_threads(3, check)


_PLACES: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "matrix": lambda g: g[0][3],
    "bias": lambda g: g[1],
    "column that was zero": lambda g: g[0][:, 7],
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", _PLACES)
def test_what_is_not_finite_on_one_rank_is_nan_on_all_and_leaves_no_trace(place: str, value: float) -> None:
    def check(comm: Communicator) -> None:
        def gradients(step: int) -> list[Tensor]:
            found = gradients_of(comm.rank, step)
            found[0][:, 7] = 0.0
            return found

        spoilt, other = Sums(comm), Sums(comm)
        for step in range(3):
            spoilt.step(gradients(step))
            other.step(gradients(step))
        bad = gradients(3)
        if comm.rank == 1:
            _PLACES[place](bad)[2] = value
        assert bool(spoilt.step(bad)[:-1].isnan().all())
        for step in range(4, 6):
            assert torch.equal(spoilt.step(gradients(step)), other.step(gradients(step)))

    run_threads(2, check)


def test_a_step_in_which_no_rank_has_frames_leaves_no_trace() -> None:
    def check(comm: Communicator) -> None:
        idle, other = Sums(comm), Sums(comm)
        for sums in (idle, other):
            sums.step(gradients_of(comm.rank, 0))
        assert idle.step(gradients_of(comm.rank, 1, scale=0.0), frames=0)[-1] == 0
        for step in (2, 3):
            results = [sums.step(gradients_of(comm.rank, step)) for sums in (idle, other)]
            assert torch.equal(*results)

    run_threads(2, check)


def test_what_is_kept_follows_the_loss_scale() -> None:
    """By powers of two, as a scaler changes it: bit by bit the same as without one."""

    def check(comm: Communicator) -> None:
        plain, scaled = Sums(comm), Sums(comm)
        for step, scale in enumerate((256.0, 256.0, 128.0, 512.0)):
            expected = plain.step(gradients_of(comm.rank, step))
            result = scaled.step(gradients_of(comm.rank, step, scale=scale), loss_scale=scale)
            torch.testing.assert_close(result[:-1] / scale, expected[:-1], rtol=0, atol=0)

    run_threads(2, check)


def test_a_gradient_of_zeros_is_no_trap() -> None:
    """No NaN, and the columns that vanish do not stay so: of the gradients to come nothing is lost."""

    def check(comm: Communicator) -> None:
        sums = Sums(comm, torch.float32)
        for _ in range(2):
            result = sums.step([torch.zeros(shape) for shape in SHAPES])
            assert not bool(result[:-1].any())
        for _ in range(300):
            sums.step([torch.ones(shape) for shape in SHAPES])
        for view in sums.gradients.views_of(sums.given / 600):
            torch.testing.assert_close(view, torch.ones_like(view), rtol=0, atol=0.01)

    run_threads(2, check)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_sends_the_factors_and_what_goes_in_full(size: int) -> None:
    def sent(comm: Communicator) -> tuple[float, int]:
        sums = Sums(comm, torch.float32)
        before = comm.sent_bytes
        sums.step([torch.ones(shape) for shape in SHAPES])
        padding = sums.gradients.values.numel() - sum(map(math.prod, SHAPES))
        return comm.sent_bytes - before, padding

    for found, padding in run_threads(size, sent):
        values = RANK * (24 + 20 + 12 + 30) + NUM_IN_FULL + padding + 1
        assert found == pytest.approx(2 * (size - 1) / size * 4 * values)


def test_another_number_of_ranks_owes_nothing_and_begins_with_what_was_learnt() -> None:
    def first(comm: Communicator) -> dict[str, Any]:
        sums = Sums(comm)
        sums.step(gradients_of(comm.rank, 0))
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in sums.sum.state_dict().items()}

    states = run_threads(2, first)

    def goes_on(comm: Communicator) -> None:
        sums = Sums(comm)
        sums.step(gradients_of(comm.rank, 5))
        sums.sum.load_state_dict(states[comm.rank % 2])
        is_same = comm.size == 2
        assert torch.equal(sums.error(), states[comm.rank % 2]["error"]) == is_same
        assert bool(sums.error().any()) == is_same
        assert torch.equal(sums.sum.state_dict()["basis"], states[0]["basis"])

    for size in (2, 3):
        run_threads(size, goes_on)


@pytest.mark.parametrize("options", ["", ",every=2"])
def test_gradient_averaging_by_factors_keeps_to_the_contract(options: str) -> None:
    """Among it: one rank is plain SGD, ranks without frames join, saved and loaded it goes on bit by bit."""
    strategy_contract(f"{POWERSGD},rank=1{options}", neutral="every=1", sizes=(2, 3))


@pytest.mark.parametrize("saved_after", [2, 3])
def test_a_run_goes_on_bit_by_bit_from_within_a_round(saved_after: int) -> None:
    run_threads(2, lambda comm: assert_resumes(comm, f"{POWERSGD},rank=1,every=3", saved_after))


def test_replicas_are_bitwise_equal_after_every_update() -> None:
    def check(comm: Communicator) -> None:
        run = StrategyRun(comm, f"{POWERSGD},rank=1", make_replica(Sgd(momentum=0.9)))
        assert run.strategy.traits.replicas_equal
        for step in range(NUM_STEPS):
            run.step([make_batch(comm.rank, step)] if step != 3 or comm.rank == 1 else [])
            assert_bitwise_equal_over_ranks(comm, run.parameters(), f"step {step}")
        run.finish()

    run_threads(3, check)


class FewFrames:
    """A strategy at work where the frames of all ranks together, 3, are no more than the rank of factors."""

    def __init__(self, comm: Communicator, strategy: str, max_gradient_norm: float = 0.0) -> None:
        # Drawn without torch's generator, which is one for all threads.
        model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 50)).double()
        generator = torch.Generator().manual_seed(4)
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(0.2 * drawn)
        self.replica = Replica(model, Sgd(0.9, 0.1), max_gradient_norm=max_gradient_norm)
        self.comm, self.timeline = comm, Timeline(None, rank=comm.rank, device=torch.device("cpu"))
        self.strategy = parse_strategy(strategy).attach(self.replica, comm, self.timeline)
        self.strategy.resume()

    def trained(self) -> Tensor:
        """Train 6 steps with 2, 1 and no frames on ranks 0, 1 and 2."""
        for number in range(6):
            generator = torch.Generator().manual_seed(10 * number + self.comm.rank)
            frames = 2 - self.comm.rank
            inputs = torch.randn(frames, 40, generator=generator, dtype=torch.float64)
            step = TrainingStep(self.strategy, self.timeline, frames)
            step.begin()
            if frames:
                step.backward(self.replica.model(inputs).square().sum())
            step.end(Progress(number + 1, 1.0 * number, 0.0), number=number + 1)
        self.strategy.pause()
        self.strategy.finish()
        self.strategy.close()
        return self.replica.parameters.values


@pytest.mark.parametrize("max_gradient_norm", [0.0, 0.5])
def test_factors_of_high_enough_rank_equal_plain_averaging(max_gradient_norm: float) -> None:
    """Weights by frames, a rank without any, momentum, clipping."""

    def check(comm: Communicator) -> float:
        plain, exact, coarse = (
            FewFrames(comm, f"gradient_averaging{options}", max_gradient_norm).trained()
            for options in ("", ":compression=powersgd,rank=4", ":compression=powersgd,rank=1")
        )
        assert_close(exact, plain, "rank 4 of 3 frames")
        return float((coarse - plain).abs().max())

    assert min(run_threads(3, check)) > 1e-3


def test_parameters_in_half_precision_are_refused() -> None:
    def check(comm: Communicator) -> None:
        half = Replica(make_replica().model.bfloat16(), Sgd())
        with pytest.raises(ConfigError, match=r"compression=powersgd: the parameters are bfloat16; make"):
            StrategyRun(comm, f"{POWERSGD},rank=1", half)

    run_threads(2, check)


def test_a_model_without_a_large_matrix_is_refused_with_the_rank_that_would_do() -> None:
    def check(comm: Communicator) -> None:
        words = "powersgd,rank=4: the model has no matrix of which two factors would be half as large; "
        with pytest.raises(ConfigError, match=f"{words}give rank=3, or leave compression out"):
            StrategyRun(comm, POWERSGD)
        StrategyRun(comm, f"{POWERSGD},rank=3")
        small = Replica(nn.Linear(3, 3), Sgd())
        with pytest.raises(ConfigError, match=f"{words}leave compression out"):
            StrategyRun(comm, POWERSGD, small)

    run_threads(2, check)
