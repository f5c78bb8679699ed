"""Averages once per period, in full and as quantised differences, in one and two levels, by their equations.

Every strategy is a subclass of `Ranks`, written from docs/strategies.md.  The ranks of a script are compared
with it after every step, in evaluations and in the end: in double precision, to 1e-9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.contract.references.independent_ranks import (
    ADAMW,
    CLIPPED,
    SGD,
    QuantisedMean,
    Ranks,
    Training,
    Vectors,
    assert_same_course,
    course_of,
    put,
    script_course,
    weighted,
)


@dataclass
class Options:
    """Options of a periodic strategy, as docs/strategies.md names them."""

    period: float = 3
    unit: str = "steps"
    begin: int = 0  # steps
    compression: str = "none"
    node_size: int = 0
    rounds_between: int = 1
    momentum: str = "keep"
    outer: str = "average"
    eta: float = 0.0
    zeta: float = 1.0
    nesterov: bool = False


class Periodic(Ranks):
    """`model_averaging`, `bmuf`, `slowmo` and `diloco`, in one or two levels."""

    def __init__(self, size: int, training: Training, options: Options) -> None:
        super().__init__(size, training)
        self.options = options
        width = options.node_size or 1
        self.nodes = [list(range(i, min(i + width, size))) for i in range(0, size, width)]
        self.node_frames = [0] * len(self.nodes)
        self.start = self.vectors[0]
        self.velocity = torch.zeros_like(self.start)
        self.round = self.window = 0
        self.frames_before = 0.0
        if options.compression != "none":
            parties = len(self.nodes) if options.node_size else size
            self.quantised = QuantisedMean(len(self.start), parties, options.compression)

    @property
    def together(self) -> bool:
        return self.step <= self.options.begin

    def move(self, taken: list[int]) -> None:
        if self.together:
            self.move_together(taken, list(range(self.size)))
            self.start = self.vectors[0]
        else:
            super().move(taken)

    def due(self) -> bool:
        if self.options.unit == "frames":
            return self.all_frames / self.size - self.frames_before >= self.options.period - 1e-6
        return self.window >= self.options.period

    def after_step(self, taken: list[int]) -> None:
        self.window += 1
        if self.together:
            if self.step == self.options.begin:
                self.window, self.frames_before = 0, self.all_frames / self.size
            return
        if not self.due():
            return
        self.round += 1
        if self.options.node_size and self.round < self.options.rounds_between:
            self.average_inside()
        else:
            self.exchange()
            self.round, self.node_frames = 0, [0] * len(self.nodes)
        if self.options.momentum == "reset":
            self.forget_momentum()
        self.frames, self.window = [0] * self.size, 0
        self.frames_before = self.all_frames / self.size

    def inside(self) -> tuple[Vectors, list[float]]:
        """Return the nodes' means and their weights since the last average between them."""
        means, weights = [], []
        for number, ranks in enumerate(self.nodes):
            means.append(weighted([self.vectors[r] for r in ranks], [self.frames[r] for r in ranks]))
            weights.append(float(sum(self.frames[r] for r in ranks) + self.node_frames[number]))
        return means, weights

    def average_inside(self) -> None:
        means, weights = self.inside()
        for number, (ranks, mean) in enumerate(zip(self.nodes, means, strict=True)):
            self.node_frames[number] = int(weights[number])
            for rank in ranks:
                put(self.models[rank], mean)

    def exchange(self) -> None:
        if self.options.node_size:
            parties, weights = self.inside()
        else:
            parties, weights = self.vectors, [float(n) for n in self.frames]
        if self.options.compression == "none" or self.size == 1:
            w = weighted(parties, weights)
        else:
            w = self.quantised.of(parties, weights, self.start)
        self.start = self.outer_step(w)
        self.put_all(self.start)

    def outer_step(self, w: Tensor) -> Tensor:
        """Return where all go on from; w is the mean."""
        o, start = self.options, self.start
        if o.outer == "bmuf":
            self.velocity = o.eta * self.velocity + o.zeta * (w - start)
            if o.nesterov:
                return start + o.eta * self.velocity + o.zeta * (w - start)
            return start + self.velocity
        if o.outer == "slowmo":
            self.velocity = o.eta * self.velocity + (start - w) / self.rate
            return start - o.zeta * self.rate * self.velocity
        if o.outer == "diloco":
            difference = start - w
            self.velocity = o.eta * self.velocity + difference
            return start - o.zeta * (difference + o.eta * self.velocity)
        return w

    def shown(self) -> Tensor:
        if self.together:
            return self.vectors[0]
        if self.window == 0 and self.round == 0:
            ahead = self.options.eta * self.velocity if self.options.nesterov else 0.0
            return self.start - ahead
        if self.options.node_size:
            return weighted(*self.inside())
        return super().shown()


@dataclass
class Case:
    strategy: str
    options: Options
    training: Training = SGD
    sizes: tuple[int, ...] = (1, 2, 3, 5)

    def __str__(self) -> str:
        return f"{self.strategy} {self.training.optimizer}{self.training.passes}"


BMUF = Options(outer="bmuf", eta=0.4, zeta=0.9, momentum="reset")
SLOWMO = Options(outer="slowmo", eta=0.4, zeta=0.8)
DILOCO = Options(outer="diloco", eta=0.5, zeta=0.7)
OUTER = {
    "bmuf:period=3,eta=0.4,zeta=0.9": BMUF,
    "bmuf:period=3,eta=0.4,zeta=0.9,nesterov=true,momentum=keep": replace(
        BMUF, nesterov=True, momentum="keep"
    ),
    "slowmo:period=3,beta=0.4,alpha=0.8": SLOWMO,
    "diloco:period=3,outer_momentum=0.5,outer_learning_rate=0.7": DILOCO,
    "model_averaging:period=3": Options(),
}
ONE_LEVEL = [
    Case(f"{text},compression={compression}", replace(options, compression=compression), training)
    for text, options in OUTER.items()
    for compression, training in (("none", ADAMW), ("int8", CLIPPED), ("int4", ADAMW))
]
BEGINNING = [
    Case("model_averaging:period=3,begin=4,compression=int4", Options(begin=4, compression="int4"), CLIPPED),
    Case("slowmo:period=3,begin=4,beta=0.4,alpha=0.8", replace(SLOWMO, begin=4), ADAMW),
]
FRAMES = [
    Case("model_averaging:period=7f", Options(7, "frames")),
    Case("model_averaging:period=0.007kf,compression=int8", Options(7, "frames", compression="int8"), ADAMW),
    Case("bmuf:period=11f,eta=0.4,zeta=0.9", replace(BMUF, period=11, unit="frames"), CLIPPED),
    Case("slowmo:period=11f,beta=0.4,alpha=0.8,begin=4", replace(SLOWMO, period=11, unit="frames", begin=4)),
]
TWO_LEVELS = [
    Case(
        f"{text},between_nodes=6,node_size={width},compression={compression}",
        replace(options, node_size=width, rounds_between=2, compression=compression),
        training,
        sizes,
    )
    for text, options in OUTER.items()
    for width, sizes in ((1, (2, 3)), (2, (3, 5)), (3, (5,)))
    for compression, training in (("none", ADAMW), ("int4", CLIPPED))
]


@pytest.mark.parametrize("case", [*ONE_LEVEL, *BEGINNING, *FRAMES, *TWO_LEVELS], ids=str)
def test_ranks_are_where_the_equations_bring_them(case: Case) -> None:
    for size in case.sizes:
        expected = course_of(Periodic(size, case.training, case.options))
        found = script_course(size, case.strategy, case.training)
        assert_same_course(found, expected, f"{case} on {size} ranks")
