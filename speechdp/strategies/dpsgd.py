"""Synchronous decentralised SGD: every rank averages with its neighbours while it computes its gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from speechdp.comm.background import JobThread
from speechdp.comm.base import Communicator, PeerCommunicator, Work
from speechdp.parallel.period import Period
from speechdp.parallel.strategy import Progress, Traits
from speechdp.strategies.mechanisms import topology
from speechdp.strategies.mechanisms.periodic import PeriodicStrategy
from speechdp.strategies.mechanisms.topology import Mixing
from speechdp.timing.timeline import Span, Timeline


@dataclass(eq=False)
class Dpsgd(PeriodicStrategy):
    """Average parameters with a few neighbours in every step, overlapped with forward and backward.

    Update rule: x_i <- (sum_j W_ij x_j) - lr * g_i(x_i), with g_i the mean gradient of rank i's own frames at
    its parameters *before* they are averaged, so that exchange and gradient need not wait for each other.
    W is symmetric or circulant, its rows and columns add up to 1: the mean over ranks moves by the mean of
    the updates.  W of a step:
    ring: 1/3 for oneself, the left and the right neighbour (1/2 and 1/2 with two ranks);
    random: 1/2 and 1/2 in pairs drawn anew for every exchange, 1 for the one an odd number leaves over;
    exponential: 1/2 for oneself and for the rank 1, 2, 4, ... places to the left, one distance an exchange;
    complete: 1/N for everybody.
    With a longer period W is the identity in all steps but the first after each period.

    Exchange: the parameters, from where they lie, to each neighbour: their bytes twice a rank and exchange in
    a ring of three or more, otherwise once; complete: one allreduce, 2 (N-1)/N times their bytes.

    Guarantee: the same exchanges in the same order on every rank, so runs repeat and resume bitwise;
    replicas differ until `finish`, where they become their mean, bitwise equal.

    Source: Lian et al. 2017 (arXiv 1705.09056, algorithm 1, recalled); random pairs as in Zhang et al. 2020
    (arXiv 2002.01119, known from summaries: details are ours); one-peer exponential graph as in BlueFog.
    Deviations: momentum and weight decay are the local optimizer's, which sees the averaged parameters;
    ranks count alike whatever their frames, as W demands, and those without frames keep averaging.
    """

    #: Steps, frames or seconds between exchanges.
    period: Period = field(default_factory=lambda: Period(1))
    #: Who averages with whom.
    topology: Literal["ring", "random", "exponential", "complete"] = "ring"
    #: Overlap the exchange with forward and backward; false: exchange between backward and update.
    overlap: bool = True
    #: Decides which pairs `random` draws.
    seed: int = 0

    @property
    def traits(self) -> Traits:
        return replace(super().traits, needs_peers=self.topology != "complete", partners_follow_size=True)

    def set_up(self) -> None:
        super().set_up()
        self._mixing_due = False
        self._num_mixings = 0
        self._route: _Route
        if self.topology == "complete":
            self._route = _AllToAll(self.comm, self.replica.parameters.values)
        else:
            self._route = _Neighbours(self.peers, self.timeline, self.replica.parameters.values)

    def resume(self) -> None:
        self._route.open()

    def pause(self) -> None:
        self._route.close()

    def before_backward(self, frames: int) -> None:
        super().before_backward(frames)
        # From here to `step` nobody writes the parameters, and between steps, where they are saved and
        # evaluated, nothing is under way.
        if self._mixing_due and self.overlap:
            self._route.start(self._mixing())

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
        """Return 1: what W keeps is the plain mean over ranks."""
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
        if self._together is None:  # while gradients are averaged replicas are equal
            self.average_parameters()
        self.comm.broadcast(self.replica.parameters.whole, name="parameters")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mixing_due": self._mixing_due, "num_mixings": self._num_mixings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._mixing_due = state["mixing_due"] and self.comm.size > 1
        self._num_mixings = state["num_mixings"]


class _Route(ABC):
    """How parameters reach those they are averaged with; at most one exchange is under way."""

    def open(self) -> None:
        """Prepare for exchanges."""
        return None

    def close(self) -> None:
        """End what `open` began."""
        return None

    @abstractmethod
    def start(self, mixing: Mixing) -> None:
        """Start exchanging the parameters, which may be read but not written until `complete`."""

    @abstractmethod
    def complete(self) -> None:
        """Wait for the exchange and write the average to the parameters."""


class _AllToAll(_Route):
    """One allreduce of a copy: it works in place, and the model is still using the parameters."""

    def __init__(self, comm: Communicator, parameters: Tensor) -> None:
        self._comm, self._parameters = comm, parameters
        self._sum = torch.empty_like(parameters)
        self._work: Work

    def start(self, mixing: Mixing) -> None:
        self._sum.copy_(self._parameters)
        self._work = self._comm.allreduce_async(self._sum, name="mixing")

    def complete(self) -> None:
        self._work.wait()
        torch.div(self._sum, self._comm.size, out=self._parameters)


class _Neighbours(_Route):
    """Messages to and from neighbours, sent and received by a thread each.

    Two threads, because a rank that sent before it received would wait for one that does the same.
    """

    def __init__(self, peers: PeerCommunicator, timeline: Timeline, parameters: Tensor) -> None:
        self._peers, self._timeline, self._parameters = peers, timeline, parameters
        self._inboxes: list[Tensor] = []
        self._mixing: Mixing
        # On a GPU the threads order their copies on a stream of their own: neither waits for the kernels of
        # the step that runs meanwhile, nor do those wait for them.
        self._stream = torch.cuda.Stream(parameters.device) if parameters.is_cuda else None  # type: ignore[no-untyped-call]

    def open(self) -> None:
        if self._peers.size > 1:
            self._sender = JobThread(f"dpsgd-send-{self._peers.rank}", self._send)
            self._receiver = JobThread(f"dpsgd-receive-{self._peers.rank}", self._receive)

    def close(self) -> None:
        if self._peers.size > 1:
            self._sender.close()
            self._receiver.close()

    def start(self, mixing: Mixing) -> None:
        self._mixing = mixing
        while len(self._inboxes) < len(mixing.sources):
            self._inboxes.append(torch.empty_like(self._parameters))
        if self._stream is not None:
            # After the update that made the parameters, and after the last average that read the inboxes.
            self._stream.wait_stream(torch.cuda.current_stream(self._parameters.device))
        self._sender.start()
        self._receiver.start()

    def complete(self) -> None:
        self._receiver.wait()
        self._sender.wait()
        if self._stream is not None:
            torch.cuda.current_stream(self._parameters.device).wait_stream(self._stream)
        # The running mean of the parameters and what has come: one pass over memory for each neighbour.
        for number in range(len(self._mixing.sources)):
            self._parameters.lerp_(self._inboxes[number], 1 / (number + 2))

    def _send(self) -> None:
        with torch.cuda.stream(self._stream):
            for destination in self._mixing.destinations:
                self._peers.send(self._parameters, destination)

    def _receive(self) -> None:
        with self._timeline.span(Span.COMM), torch.cuda.stream(self._stream):
            for number, source in enumerate(self._mixing.sources):
                self._peers.recv(self._inboxes[number], source)
