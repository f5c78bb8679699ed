"""Synchronous decentralised SGD: every rank averages with its neighbours while it computes its gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange, Model, Pattern
from speechdp.parallel.period import Period
from speechdp.parallel.strategy import Progress, Traits
from speechdp.strategies.mechanisms import topology
from speechdp.strategies.mechanisms.neighbours import AllToAll, Neighbours, QuantisedNeighbours, Route
from speechdp.strategies.mechanisms.number_formats import Compression, refuse_half_precision, share_of_bytes
from speechdp.strategies.mechanisms.periodic import PeriodicStrategy
from speechdp.strategies.mechanisms.topology import Mixing
from speechdp.timing.timeline import Span


@dataclass(eq=False)
class Dpsgd(PeriodicStrategy):
    """Average parameters with a few neighbours in every step, overlapped with forward and backward.

    Update rule: x_i <- (sum_j W_ij x_j) - lr * g_i(x_i), with g_i the mean gradient of rank i's own frames at
    its parameters *before* they are averaged, so exchange and gradient need not wait for each other.  W is
    symmetric or circulant, and its rows and columns sum to 1, so the mean over ranks moves by the mean of the
    updates.  W of a step:
    ring: 1/3 for the rank itself, its left and its right neighbour (1/2 and 1/2 with two ranks);
    random: 1/2 and 1/2 in pairs drawn anew for every exchange, 1 for the rank that an odd number leaves over;
    exponential: 1/2 for the rank itself and the one 1, 2, 4, ... places to the left, one distance per
        exchange;
    complete: 1/N for every rank.
    With a longer period, W is the identity in all steps but the first after each period.

    Exchange: the parameters, sent from where they are, to each neighbour: their bytes twice per rank and
    exchange in a ring of three or more, otherwise once; complete: one allreduce, 2 (N-1)/N times their bytes.
    With compression= (ring only) the same messages, each a quantised difference to what the neighbours know
    (`QuantisedNeighbours`); on resume each rank sends its neighbours what they knew, at full size, once or
    twice per rank.

    Guarantee: the same exchanges in the same order on every rank, so runs repeat and resume bitwise;
    replicas differ until `finish`, which sets all to their mean, bitwise equal.  An exchange keeps the mean
    over ranks, also with compression.

    Source: Lian et al. 2017 (arXiv 1705.09056, algorithm 1, recalled); random pairs as in Zhang et al. 2020
    (arXiv 2002.01119, known from summaries: details are ours); one-peer exponential graph as in BlueFog.
    Deviations: momentum and weight decay are the local optimizer's, which sees the averaged parameters; ranks
    have equal weights whatever their frames, as W requires, and those without frames keep averaging.
    """

    #: Steps, frames or seconds between exchanges.
    period: Period = field(default_factory=lambda: Period(1))
    #: Which ranks average with each other.
    topology: Literal["ring", "random", "exponential", "complete"] = "ring"
    #: Number format of an exchange: full precision, or differences in 8 or 4 bits a value.
    compression: Compression = "none"
    #: Overlap the exchange with forward and backward; false: exchange between backward and update.
    overlap: bool = True
    #: Seed of the pairs that `random` draws.
    seed: int = 0

    @property
    def traits(self) -> Traits:
        return replace(super().traits, needs_peers=self.topology != "complete", partners_follow_size=True)

    def predicted_exchange(self, model: Model) -> Exchange | None:
        return Exchange(
            Pattern.NEIGHBOURS,
            model.steps_in(self.period),
            model.nbytes * share_of_bytes(self.compression),
            topology=self.topology,
            overlaps=self.overlap,
        )

    def check_options(self) -> None:
        super().check_options()
        if self.compression != "none" and self.topology != "ring":
            instead = "topology=ring"
            if self.topology == "complete":
                instead = f"delayed_averaging:period=1,delay=1,compression={self.compression}"
            raise ConfigError(
                f"dpsgd:topology={self.topology},compression={self.compression}: compression sends "
                f"differences, which needs neighbours that stay the same; use {instead}, or leave "
                "compression out"
            )

    def set_up(self) -> None:
        super().set_up()
        self._mixing_due = False
        self._num_mixings = 0
        self._route = self._make_route()

    def _make_route(self) -> Route:
        values = self.replica.parameters.values
        if self.topology == "complete":
            return AllToAll(self.comm, values)
        if self.compression == "none" or self.comm.size == 1:
            return Neighbours(self.peers, self.timeline, values)
        refuse_half_precision(f"{self.name}:compression={self.compression}", values.dtype)
        return QuantisedNeighbours(self.peers, self.timeline, values, self._mixing(), self.compression)

    def resume(self) -> None:
        self._route.open()

    def pause(self) -> None:
        self._route.close()

    def before_backward(self, frames: int) -> None:
        super().before_backward(frames)
        # From here to `step` nothing writes the parameters.  Between steps, when they are saved and
        # evaluated, no exchange is in flight.
        if self._mixing_due and self.overlap:
            self._route.start(self._mixing())

    def start_apart(self) -> None:
        super().start_apart()
        self._route.start_from_here()

    def step(self, progress: Progress) -> None:
        if self._mixing_due:
            with self.timeline.span(Span.COMM):
                if not self.overlap:
                    self._route.start(self._mixing())
                self._route.complete()
            self._mixing_due = False
            self._num_mixings += 1
        super().step(progress)

    def exchange(self) -> None:
        """Start averaging the parameters as they are now, overlapped with the next step."""
        self._mixing_due = self.comm.size > 1

    def weight(self) -> float:
        """Return 1: W preserves the plain mean over ranks."""
        return 1.0

    def _mixing(self) -> Mixing:
        rank, size, number = self.comm.rank, self.comm.size, self._num_mixings
        if self.topology == "random":
            return topology.matching_mixing(rank, topology.random_matching(size, self.seed, number))
        if self.topology == "exponential":
            return topology.exponential_mixing(rank, size, number)
        return topology.ring_mixing(rank, size)

    def finish(self) -> None:
        self._mixing_due = False
        if self._together is None:  # while gradients are averaged, replicas are equal
            self.average_parameters()
        self.comm.broadcast(self.replica.parameters.whole, name="parameters")

    def state_dict(self) -> dict[str, Any]:
        counts = {"mixing_due": self._mixing_due, "num_mixings": self._num_mixings}
        return super().state_dict() | counts | self._route.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._mixing_due = state["mixing_due"] and self.comm.size > 1
        self._num_mixings = state["num_mixings"]
        self._route.load_state_dict(state)
