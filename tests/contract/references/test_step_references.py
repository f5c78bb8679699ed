"""Strategies that exchange in steps of their own or at periods that change, by their equations.

As in test_periodic_references.py; of pairs that are drawn at random, the pairs are found in what happened.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.contract.references.independent_ranks import (
    ADAMW,
    CLIPPED,
    LEVELS,
    NUM_STEPS,
    SGD,
    QuantisedMean,
    Ranks,
    Training,
    Vectors,
    assert_same_course,
    course_of,
    put,
    rounded,
    script_course,
    weighted,
)

SIZES = (1, 2, 3, 5)


# -- a period that changes ------------------------------------------------------------------------------


class Adaptive(Ranks):
    """`adaptive_averaging`; `rule` has the period K of the window that begins or ends."""

    period: float = 2

    def __init__(self, size: int, training: Training, *, in_frames: bool = False) -> None:
        super().__init__(size, training)
        self.in_frames = in_frames
        self.k = self.period
        self.window = 0
        self.frames_before = 0.0
        self.periods: list[float] = []

    def window_begins(self) -> None:
        """Called at its first step, when the rate of its first update is known."""

    def window_has_ended(self) -> None:
        """Called after an average."""

    def move(self, taken: list[int]) -> None:
        if self.window == 0:
            self.window_begins()
            self.periods.append(self.k)
        super().move(taken)

    def after_step(self, taken: list[int]) -> None:
        self.window += 1
        done = self.all_frames / self.size - self.frames_before if self.in_frames else self.window
        if done < self.k - 1e-6:
            return
        self.put_all(weighted(self.vectors, self.frames))
        self.frames, self.window, self.frames_before = [0] * self.size, 0, self.all_frames / self.size
        self.window_has_ended()


class AdaComm(Adaptive):
    """K = ceil(K0 sqrt(lr0 F / (lr F0))), at most growth K0, at the first average after each interval."""

    period, interval, growth, halve = 3, 4, 1.5, True

    def __init__(self, size: int, training: Training) -> None:
        super().__init__(size, training)
        self.first: tuple[float, float] | None = None
        self.last_rate, self.last_step, self.frames_then = 0.0, 0, 0

    def window_has_ended(self) -> None:
        if self.first is not None and self.step - self.last_step < self.interval:
            return
        loss = self.loss / (self.all_frames - self.frames_then)
        rate = self.rate
        if self.first is None:
            self.first = (loss, rate)
        else:
            first_loss, first_rate = self.first
            k = math.ceil(self.period * math.sqrt(first_rate * loss / (rate * first_loss)))
            if self.halve and k >= self.k and rate >= self.last_rate:
                k = math.ceil(self.k / 2)
            self.k = min(k, self.growth * self.period)
        self.last_rate, self.last_step = rate, self.step
        self.loss, self.frames_then = 0.0, self.all_frames


class AdaCommKeeping(AdaComm):
    halve = False


class Qsr(Adaptive):
    """K = max(K0, floor((alpha / lr)^2)), K0 while the rate rises and in the first window."""

    alpha = 0.4
    last_rate = 0.0

    def window_begins(self) -> None:
        rises, self.last_rate = self.rate > self.last_rate, self.rate
        self.k = self.period if rises else max(self.period, math.floor((self.alpha / self.rate) ** 2 + 1e-9))


class QsrAdam(Qsr):
    alpha = 0.04


class Stages(Adaptive):
    """Each from the first average on at which training has come to its point."""

    stages: tuple[tuple[float, float], ...] = ((4, 3), (8, 1))

    def reached(self) -> float:
        return float(self.step)

    def window_has_ended(self) -> None:
        self.k = self.period
        for point, k in self.stages:
            if self.reached() >= point - 1e-6:
                self.k = k


class FrameStages(Stages):
    stages = ((12, 9), (25, 3))
    period = 5

    def __init__(self, size: int, training: Training) -> None:
        super().__init__(size, training, in_frames=True)

    def reached(self) -> float:
        return self.all_frames / self.size


class ShareStages(Stages):
    def reached(self) -> float:
        return 100 * self.step / NUM_STEPS

    stages = ((28, 3), (58, 1))


ADAPTIVE: list[tuple[str, type[Adaptive], Training]] = [
    ("adaptive_averaging:period=3,interval=4,growth=1.5", AdaComm, SGD),
    # While the rate stays, the period is halved where the loss does not shorten it.
    ("adaptive_averaging:period=3,interval=4,growth=1.5", AdaComm, Training(steps_a_rate=100)),
    ("adaptive_averaging:period=3,interval=4,growth=1.5,halve=false", AdaCommKeeping, ADAMW),
    ("adaptive_averaging:rule=qsr,period=2,alpha=0.4", Qsr, CLIPPED),
    ("adaptive_averaging:rule=qsr,period=2,alpha=0.04", QsrAdam, ADAMW),
    ("adaptive_averaging:rule=stages,period=2,stages=3@4+1@8", Stages, ADAMW),
    ("adaptive_averaging:rule=stages,period=5f,stages=9f@12f+3f@25f", FrameStages, SGD),
    ("adaptive_averaging:rule=stages,period=2,stages=3@28%+1@58%", ShareStages, CLIPPED),
]


@pytest.mark.parametrize(("strategy", "rule", "training"), ADAPTIVE)
def test_a_period_that_changes_follows_its_rule(
    strategy: str, rule: Callable[[int, Training], Adaptive], training: Training
) -> None:
    for size in SIZES:
        reference = rule(size, training)
        expected = course_of(reference)
        assert len(set(reference.periods)) > 1, "the period does not change: the check says little"
        assert_same_course(script_course(size, strategy, training), expected, f"{strategy} on {size} ranks")


# -- averages that are under way ------------------------------------------------------------------------


class Delayed(Ranks):
    """`delayed_averaging`: snapshots are averaged while `delay` further steps are taken."""

    period, delay, mix = 4, 2, 0.7

    def __init__(self, size: int, training: Training, compression: str = "none") -> None:
        super().__init__(size, training)
        self.a = self.vectors[0]
        self.due: tuple[int, Tensor, Vectors] | None = None
        self.quantised = None if compression == "none" else QuantisedMean(len(self.a), size, compression)

    def after_step(self, taken: list[int]) -> None:
        if self.due is not None and self.step == self.due[0]:
            self.correct()
        if self.step % self.period == 0:
            s = self.vectors
            weights = [float(n) for n in self.frames]
            mean = weighted(s, weights) if self.quantised is None else self.quantised.of(s, weights, self.a)
            self.due = (self.step + self.delay, mean, s)
            self.a, self.frames = mean, [0] * self.size

    def correct(self) -> None:
        assert self.due is not None
        _, mean, s = self.due
        for rank, (model, vector) in enumerate(zip(self.models, self.vectors, strict=True)):
            put(model, vector + self.mix * (mean - s[rank]))
        self.due = None

    def shown(self) -> Tensor:
        if self.due is None:
            return super().shown()
        _, mean, s = self.due
        corrected = [v + self.mix * (mean - s[rank]) for rank, v in enumerate(self.vectors)]
        return weighted(corrected, self.frames)


@pytest.mark.parametrize(("compression", "training"), [("none", ADAMW), ("int8", CLIPPED), ("int4", ADAMW)])
def test_averages_are_applied_late(compression: str, training: Training) -> None:
    strategy = f"delayed_averaging:period=4,delay=2,mix=0.7,compression={compression}"
    for size in SIZES[1:]:
        expected = course_of(Delayed(size, training, compression))
        assert_same_course(script_course(size, strategy, training), expected, f"{strategy} on {size} ranks")


class Neighbours(Ranks):
    """`dpsgd`: x_i = (sum_j W_ij x_j) - lr g_i(x_i), W the identity but after each period."""

    def __init__(
        self, size: int, training: Training, matrix: Callable[[int, int], Tensor], period: int = 1
    ) -> None:
        super().__init__(size, training)
        self.matrix, self.period, self.exchanges = matrix, period, 0

    def move(self, taken: list[int]) -> None:
        gradients = [self.gradient(rank) for rank in range(self.size)]
        if self.step > 1 and (self.step - 1) % self.period == 0:
            self.mix()
            self.exchanges += 1
        for rank, frames in enumerate(taken):
            self.update(rank, gradients[rank], frames)

    def mix(self) -> None:
        mixed = self.matrix(self.size, self.exchanges) @ torch.stack(self.vectors)
        for model, vector in zip(self.models, mixed, strict=True):
            put(model, vector)

    def after_step(self, taken: list[int]) -> None:
        pass

    def shown(self) -> Tensor:
        return torch.stack(self.vectors).mean(0)


class RoundedNeighbours(Neighbours):
    """With `compression`: differences to what the neighbours know."""

    compression = "int8"

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.known = self.vectors

    def mix(self) -> None:
        if self.size == 1:
            return
        levels = LEVELS[self.compression]
        vectors = self.vectors
        self.known = [k + rounded(x - k, levels) for x, k in zip(vectors, self.known, strict=True)]
        known, weights = torch.stack(self.known), self.matrix(self.size, self.exchanges)
        for rank, (model, x) in enumerate(zip(self.models, vectors, strict=True)):
            put(model, x + weights[rank] @ (known - known[rank]))


class CoarseNeighbours(RoundedNeighbours):
    compression = "int4"


def circulant(size: int, distances: list[int]) -> Tensor:
    """Return W that gives each rank and those so far to its left the same weight."""
    w = torch.zeros(size, size, dtype=torch.float64)
    reached = {d % size for d in (0, *distances)}
    for rank in range(size):
        for d in reached:
            w[rank, (rank - d) % size] = 1 / len(reached)
    return w


def ring(size: int, number: int) -> Tensor:
    return circulant(size, [1, -1])


def exponential(size: int, number: int) -> Tensor:
    below = [2**k for k in range(4) if 2**k < size]
    return circulant(size, [below[number % len(below)]] if below else [])


def complete(size: int, number: int) -> Tensor:
    return torch.full((size, size), 1 / size, dtype=torch.float64)


NEIGHBOURS: list[tuple[str, type[Neighbours], Callable[[int, int], Tensor], int, Training]] = [
    ("dpsgd", Neighbours, ring, 1, ADAMW),
    ("dpsgd:overlap=false,period=3", Neighbours, ring, 3, CLIPPED),
    ("dpsgd:topology=exponential", Neighbours, exponential, 1, CLIPPED),
    ("dpsgd:topology=exponential,period=2", Neighbours, exponential, 2, SGD),
    ("dpsgd:topology=complete", Neighbours, complete, 1, ADAMW),
    ("dpsgd:compression=int8", RoundedNeighbours, ring, 1, ADAMW),
    ("dpsgd:compression=int4,period=2", CoarseNeighbours, ring, 2, CLIPPED),
]


@pytest.mark.parametrize(("strategy", "kind", "matrix", "period", "training"), NEIGHBOURS)
def test_neighbours_are_averaged_by_their_matrix(
    strategy: str,
    kind: type[Neighbours],
    matrix: Callable[[int, int], Tensor],
    period: int,
    training: Training,
) -> None:
    for size in SIZES:
        expected = course_of(kind(size, training, matrix, period))
        assert_same_course(script_course(size, strategy, training), expected, f"{strategy} on {size} ranks")


class FoundPairs(Neighbours):
    """Goes with a run on random pairs: of all matchings, takes the one that leads to where the run is."""

    def __init__(self, size: int, training: Training, steps: list[Vectors]) -> None:
        super().__init__(size, training, complete)
        self.found = steps
        self.pairs: list[list[int]] = []

    def move(self, taken: list[int]) -> None:
        if self.step == 1:
            super().move(taken)
            return
        before = self.vectors
        gradients = [self.gradient(rank) for rank in range(self.size)]
        target = self.found[self.step - 1]
        partner = []
        for rank, frames in enumerate(taken):
            saved = copy.deepcopy(self.optimizers[rank].state_dict())
            errors = []
            for other in range(self.size):
                self.optimizers[rank].load_state_dict(copy.deepcopy(saved))
                put(self.models[rank], (before[rank] + before[other]) / 2)
                self.update(rank, gradients[rank].clone(), frames)
                errors.append(float((self.vectors[rank] - target[rank]).abs().max()))
            best = min(range(self.size), key=errors.__getitem__)
            assert errors[best] < 1e-9, f"rank {rank}, step {self.step}: no partner explains it: {errors}"
            self.optimizers[rank].load_state_dict(copy.deepcopy(saved))
            put(self.models[rank], (before[rank] + before[best]) / 2)
            self.update(rank, gradients[rank].clone(), frames)
            partner.append(best)
        self.pairs.append(partner)


@pytest.mark.parametrize("training", [SGD, ADAMW])
def test_random_pairs_average_each_other_alone(training: Training) -> None:
    for size in (2, 3, 5):
        found = script_course(size, "dpsgd:topology=random", training)
        reference = FoundPairs(size, training, found.steps)
        expected = course_of(reference)
        assert_same_course(found, expected, f"random pairs of {size} ranks")
        # From the second exchange on ranks differ, so that partners can be told.
        for partner in reference.pairs[1:]:
            assert [partner[other] for other in partner] == list(range(size)), partner
            assert sum(other == rank for rank, other in enumerate(partner)) == size % 2, partner
        assert size == 2 or len({tuple(p) for p in reference.pairs[1:]}) > 1


# -- gradients ------------------------------------------------------------------------------------------


class Gradients(Ranks):
    """`gradient_averaging`, over all ranks or inside nodes, of `every` backward passes."""

    def __init__(
        self, size: int, training: Training, *, every: int = 1, node_size: int = 0, between: int = 0
    ) -> None:
        super().__init__(size, training)
        self.every, self.between = every, between
        width = node_size or size
        self.nodes = [list(range(i, min(i + width, size))) for i in range(0, size, width)]
        self.sums = [torch.zeros_like(v) for v in self.vectors]
        self.taken = [0] * size
        self.updates = 0

    def move(self, taken: list[int]) -> None:
        for rank, frames in enumerate(taken):
            self.sums[rank] += self.gradient(rank)
            self.taken[rank] += frames
        if self.step % self.every == 0:
            self.move_nodes()

    def move_nodes(self) -> None:
        for ranks in self.nodes:
            total, frames = sum(self.sums[r] for r in ranks), sum(self.taken[r] for r in ranks)
            for rank in ranks:
                self.update(rank, total, frames)  # type: ignore[arg-type]
        # Those count whose gradients are in the parameters.
        self.frames = [n + taken for n, taken in zip(self.frames, self.taken, strict=True)]
        self.sums, self.taken = [torch.zeros_like(v) for v in self.vectors], [0] * self.size
        self.updates += 1
        if self.between and self.updates % self.between == 0:
            self.put_all(weighted(self.vectors, self.frames))
            self.frames = [0] * self.size

    def after_step(self, taken: list[int]) -> None:
        pass

    def shown(self) -> Tensor:
        return weighted(self.vectors, self.frames)

    def final(self) -> Tensor:
        if self.step % self.every:
            self.move_nodes()
        return self.shown()


@pytest.mark.parametrize("training", [CLIPPED, ADAMW])
@pytest.mark.parametrize(("node_size", "every", "sizes"), [(1, 1, (2, 3)), (2, 1, (3, 5)), (2, 3, (3, 5))])
def test_gradients_inside_nodes_and_parameters_between_them(
    node_size: int, every: int, sizes: tuple[int, ...], training: Training
) -> None:
    strategy = f"gradient_averaging:between_nodes=3,node_size={node_size},every={every}"
    for size in sizes:
        reference = Gradients(size, training, every=every, node_size=node_size, between=3)
        expected = course_of(reference)
        assert_same_course(script_course(size, strategy, training), expected, f"{strategy} on {size} ranks")


@pytest.mark.parametrize(("compression", "epsilon"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_gradients_in_half_precision_lose_no_more_than_its_rounding(compression: str, epsilon: float) -> None:
    """With plain steps of a small rate, what is rounded away of each gradient adds up and no more."""
    training = Training("sgd")
    for size in SIZES:
        strategy = f"gradient_averaging:compression={compression}"
        expected = course_of(Gradients(size, training))
        found = script_course(size, strategy, training)
        moved = float((expected.final[0] - expected.steps[0][0]).abs().max())
        assert_same_course(found, expected, f"{strategy} on {size} ranks", tolerance=20 * epsilon * moved)
        if size > 1:
            with pytest.raises(AssertionError):
                assert_same_course(found, expected, "exactly")
