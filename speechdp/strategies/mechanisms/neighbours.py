"""Exchange parameters for averaging: by one allreduce, or by messages between neighbours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from speechdp.comm.background import JobThread
from speechdp.comm.base import Communicator, PeerCommunicator, Work
from speechdp.strategies.mechanisms.number_formats import BITS, Compression, message_bytes
from speechdp.strategies.mechanisms.quantisation import Quantiser, stretches
from speechdp.strategies.mechanisms.quantised_mean import Outbox
from speechdp.strategies.mechanisms.topology import Mixing
from speechdp.timing.timeline import Span, Timeline


class Route(ABC):
    """A way to exchange parameters for averaging; at most one exchange is in flight."""

    def open(self) -> None:
        """Prepare for exchanges."""
        return None

    def close(self) -> None:
        """End what `open` started."""
        return None

    @abstractmethod
    def start(self, mixing: Mixing) -> None:
        """Start exchanging the parameters, which may be read but not written until `complete`."""

    @abstractmethod
    def complete(self) -> None:
        """Wait for the exchange and write the average to the parameters."""

    def start_from_here(self) -> None:
        """Note that the parameters are now the same on all ranks."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the parameters are those it was saved with.  Collective, while closed."""
        return None


class AllToAll(Route):
    """One allreduce of a copy, because it works in place while the model still uses the parameters."""

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


class _Messages(Route):
    """Exchange messages with neighbours, with one thread to send and one to receive.

    If ranks sent before they received, two of them could wait for each other.
    """

    def __init__(self, peers: PeerCommunicator, timeline: Timeline, parameters: Tensor) -> None:
        self._peers, self._timeline, self._parameters = peers, timeline, parameters
        self._mixing: Mixing
        # On a GPU the threads' copies use a separate stream: otherwise they and the kernels of the concurrent
        # step would wait for each other.
        self._stream = torch.cuda.Stream(parameters.device) if parameters.is_cuda else None  # type: ignore[no-untyped-call]

    def open(self) -> None:
        if self._peers.size > 1:
            self._sender = JobThread(f"dpsgd-send-{self._peers.rank}", self._send_all)
            self._receiver = JobThread(f"dpsgd-receive-{self._peers.rank}", self._receive_all)

    def close(self) -> None:
        if self._peers.size > 1:
            self._sender.close()
            self._receiver.close()

    def start(self, mixing: Mixing) -> None:
        self._mixing = mixing
        if self._stream is not None:
            # After the update that wrote the parameters, and after the last average, which read the received
            # data.
            self._stream.wait_stream(torch.cuda.current_stream(self._parameters.device))
        self._sender.start()
        self._receiver.start()

    def complete(self) -> None:
        self._receiver.wait()
        self._sender.wait()
        if self._stream is not None:
            torch.cuda.current_stream(self._parameters.device).wait_stream(self._stream)
        self._average()

    def _send_all(self) -> None:
        with torch.cuda.stream(self._stream):
            message = self._message()
            for destination in self._mixing.destinations:
                self._peers.send(message, destination)

    def _receive_all(self) -> None:
        with self._timeline.span(Span.COMM), torch.cuda.stream(self._stream):
            for number, source in enumerate(self._mixing.sources):
                self._receive(number, source)

    @abstractmethod
    def _message(self) -> Tensor:
        """Return the message to every neighbour; called in the sender's thread."""

    @abstractmethod
    def _receive(self, number: int, source: int) -> None:
        """Receive from the source of this index in the mixing; called in the receiver's thread."""

    @abstractmethod
    def _average(self) -> None:
        """Write the average to the parameters; neither thread is running."""


class Neighbours(_Messages):
    """Send the parameters in full, directly from their memory."""

    def __init__(self, peers: PeerCommunicator, timeline: Timeline, parameters: Tensor) -> None:
        super().__init__(peers, timeline, parameters)
        self._inboxes: list[Tensor] = []

    def start(self, mixing: Mixing) -> None:
        while len(self._inboxes) < len(mixing.sources):
            self._inboxes.append(torch.empty_like(self._parameters))
        super().start(mixing)

    def _message(self) -> Tensor:
        return self._parameters

    def _receive(self, number: int, source: int) -> None:
        self._peers.recv(self._inboxes[number], source)

    def _average(self) -> None:
        # The running mean of the parameters and the received vectors: one pass over memory per neighbour.
        for number in range(len(self._mixing.sources)):
            self._parameters.lerp_(self._inboxes[number], 1 / (number + 2))


class QuantisedNeighbours(_Messages):
    """Send quantised differences to what fixed neighbours know of the parameters.

    Update rule: with Q quantisation and x^_i what rank i's neighbours know of x_i, bitwise equal on all,
        rank i:   q_i = Q(x_i - x^_i);   x^_i <- x^_i + q_i
        for each neighbour j, when q_j is received:   x^_j <- x^_j + q_j
        then      x_i <- x_i + sum_j W_ij (x^_j - x^_i)
    Over all ranks the last sum vanishes, so W's mean is kept whatever Q does.  The rounding error of x_i is
    part of the next difference, since x^_i lacks it.  The neighbours' x^_j are kept separately, although
    their weighted sum would suffice: its rounding errors would stay, and move the mean at every exchange.

    Source: CHOCO-SGD, Koloskova, Stich & Jaggi 2019 (arXiv 1902.00340), recalled.  Deviation: its consensus
    step size gamma, small enough for any compression, is 1: an error of Q is at most a 14th of the largest
    difference in its block, and with the ring's W its effect shrinks from exchange to exchange.

    Args:
        peers, timeline, parameters: as in other routes.
        mixing: mixing of every exchange.
        compression: number format of the differences.
    """

    def __init__(
        self,
        peers: PeerCommunicator,
        timeline: Timeline,
        parameters: Tensor,
        mixing: Mixing,
        compression: Compression,
    ) -> None:
        super().__init__(peers, timeline, parameters)
        self._mixing = mixing
        #: x^ of each neighbour, and of this rank.
        self._known = {source: parameters.clone() for source in mixing.sources}
        self._own = parameters.clone()
        bits, length = BITS[compression], parameters.numel()
        # One quantiser per thread.
        self._writer, self._reader = Quantiser(bits, parameters), Quantiser(bits, parameters)
        memory = torch.zeros(2, message_bytes(length, bits), dtype=torch.uint8, device=parameters.device)
        self._outgoing = self._writer.message(memory[0], length)
        self._incoming = self._reader.message(memory[1], length)

    def start_from_here(self) -> None:
        for known in (self._own, *self._known.values()):
            known.copy_(self._parameters)

    def _message(self) -> Tensor:
        self._writer.write_difference(self._outgoing, self._parameters, self._own)
        return self._outgoing.whole

    def _receive(self, number: int, source: int) -> None:
        self._peers.recv(self._incoming.whole, source)
        self._reader.add_difference(self._incoming, self._known[source])

    def _average(self) -> None:
        for start, end in stretches(self._parameters.numel()):
            difference = self._writer.values[: end - start]
            for known in self._known.values():
                # A rank and its neighbour compute bitwise the same difference with opposite signs.
                torch.sub(known[start:end], self._own[start:end], out=difference)
                self._parameters[start:end].add_(difference, alpha=self._mixing.weight)

    def state_dict(self) -> dict[str, Any]:
        return {"known": self._own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # The neighbours may have been others, or none, when it was saved: tell each what it knows now.
        self._own.copy_(state.get("known", self._parameters))
        outbox = Outbox(self._peers)
        outbox.open()
        for destination in self._mixing.destinations:
            outbox.post(self._own, destination, tag=0)
        for source in self._mixing.sources:
            self._peers.recv(self._known[source], source)
        outbox.flush()
        outbox.close()
