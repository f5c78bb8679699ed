"""Shared parts of strategies with a server on rank 0: workers ask, the server answers in order of arrival.

There are two roles: a `Server` on rank 0 keeps the common vector; a `Link` on each rank lets its worker ask.
On rank 0 the link calls the server directly, under a lock; elsewhere messages go to a thread of rank 0, over
a `Wire`.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from speechdp.comm.background import ExchangeThread
from speechdp.comm.base import PeerCommunicator
from speechdp.errors import ConfigError
from speechdp.parallel.declared import Roster

SERVER = 0
#: Tags: a request, its vector, the version in the answer, the answer's vector; and what a worker sends before
#: the server starts.
_ASKED, GIVEN_TAG, _VERSION, ANSWER_TAG, BEFORE_TAG = range(5)
#: Replaces an answer, in place, by what the worker will read.
Rounding = Callable[[Tensor], None]


class Kind(IntEnum):
    """The kinds of requests."""

    FETCH = 0
    """Get the common vector."""
    GIVE = 1
    """Hand over a vector and get one back."""
    LEAVE = 2
    """Leave until the next FETCH or GIVE; there is no answer."""


@dataclass(frozen=True)
class ServerRequest:
    """The message before the vector.

    Attributes:
        kind: kind of request.
        version: version of the common vector in this worker's last answer.
        frames: number of frames in the vector.
        learning_rate: learning rate of the worker's schedule.
    """

    kind: Kind
    version: int = 0
    frames: int = 0
    learning_rate: float = 0.0

    def encode(self) -> Tensor:
        """Return the message; double precision holds every count exactly."""
        return torch.tensor([self.kind, self.version, self.frames, self.learning_rate], dtype=torch.float64)

    @staticmethod
    def decode(message: Tensor) -> ServerRequest:
        """Read what `encode` wrote."""
        kind, version, frames, learning_rate = message.tolist()
        return ServerRequest(Kind(int(kind)), int(version), int(frames), learning_rate)


class Wire:
    """How vectors travel between workers and the server: in full precision.

    A worker calls `give` and `hear`.  The server calls `take`, `round` if it applies its own answer, and
    `reply`, in this order, for one worker after another.
    """

    def give(self, peers: PeerCommunicator, x: Tensor) -> None:
        """Send a vector to the server."""
        peers.send(x, SERVER, tag=GIVEN_TAG)

    def take(self, peers: PeerCommunicator, worker: int, out: Tensor) -> None:
        """Receive a worker's vector."""
        peers.recv(out, worker, tag=GIVEN_TAG)

    def round(self, answer: Tensor) -> None:
        """Replace an answer by what the worker will read."""

    def reply(self, peers: PeerCommunicator, worker: int, answer: Tensor) -> None:
        """Send an answer to a worker."""
        peers.send(answer, worker, tag=ANSWER_TAG)

    def hear(self, peers: PeerCommunicator, out: Tensor) -> None:
        """Receive the server's answer."""
        peers.recv(out, SERVER, tag=ANSWER_TAG)


class Server(ABC):
    """The common vector and the rule that changes it.

    Attributes:
        vector: the vector that all workers share.
        version: number of changes of the vector so far.
    """

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector
        self.version = 0
        self._lock = threading.Lock()
        # Without its own stream on a GPU, the server would wait for the work that its rank's worker has
        # queued.
        self._stream = torch.cuda.Stream(vector.device) if vector.is_cuda else None  # type: ignore[no-untyped-call]

    @abstractmethod
    def serve(
        self, request: ServerRequest, given: Tensor, answer: Tensor, rounding: Rounding | None
    ) -> Tensor:
        """Serve a request, under the lock; return the answer: `answer` filled, or a vector that stays as is.

        Args:
            request: FETCH or GIVE.
            given: the vector handed over; undefined with FETCH.  May be overwritten.
            answer: buffer for the answer; it may be the same memory as `given`.
            rounding: applies the rounding of the wire, for a server that must apply exactly what the worker
                reads; None: the worker is on this rank and reads full precision.
        """

    def serve_here(self, request: ServerRequest, given: Tensor, answer: Tensor) -> int:
        """Answer this rank's own worker; return the version."""
        self._finish_worker_kernels()
        with self._lock, self.on_stream():
            served = self.serve(request, given, answer, None)
            if served is not answer:
                answer.copy_(served)
            version = self.version
        self.end_round()
        return version

    def serve_messages(self, peers: PeerCommunicator, wire: Wire, buffer: Tensor) -> None:
        """Answer the other ranks' workers until each of them has left.

        The lock is held while the vector is used, not while a message is in flight: this rank's worker must
        not wait for another's network.  Hence the answer is copied out of the vector before it is sent.

        Args:
            peers: the channel.
            wire: how vectors travel.
            buffer: buffer for the vector handed over, and for the answer.
        """
        asked = ServerRequest(Kind.LEAVE).encode()
        num_workers = peers.size - 1
        with self.on_stream():
            while num_workers > 0:
                worker = peers.recv(asked, tag=_ASKED)
                request = ServerRequest.decode(asked)
                if request.kind is Kind.LEAVE:
                    num_workers -= 1
                    continue
                if request.kind is Kind.GIVE:
                    wire.take(peers, worker, buffer)
                with self._lock:
                    answer = self.serve(request, buffer, buffer, wire.round)
                    version = torch.tensor([self.version])
                peers.send(version, worker, tag=_VERSION)
                wire.reply(peers, worker, answer)

    def begin_round(self) -> None:
        """Order the server's work after this thread's work so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def end_round(self) -> None:
        """Order this thread's work after the server's work so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the block's kernels on the server's stream; no effect on a CPU."""
        with torch.cuda.stream(self._stream):
            yield

    def _finish_worker_kernels(self) -> None:
        """Wait, asleep, until this thread's kernels are done: under the lock they would delay all workers."""
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._stream.device))
            done.synchronize()


class Link:
    """Lets the worker of one rank ask the server, between `open` and `close`.

    Args:
        peers: the channel.
        server: on rank 0; None elsewhere.
        wire: how vectors travel; this rank's own.

    Attributes:
        version: version of the common vector in this worker's last answer.
        ages: number of answers to GIVE by age, the number of changes by others since the previous answer.
    """

    def __init__(self, peers: PeerCommunicator, server: Server | None, wire: Wire) -> None:
        assert (server is not None) == (peers.rank == SERVER)
        self._peers, self._server, self._wire = peers, server, wire
        self._thread: ExchangeThread | None = None
        self._buffer = None if server is None or peers.size == 1 else torch.empty_like(server.vector)
        self.version = 0
        self.ages: list[int] = []

    def open(self) -> None:
        """Start a round: let rank 0 serve."""
        if self._server is not None and self._buffer is not None:
            server, buffer = self._server, self._buffer
            server.begin_round()
            self._thread = ExchangeThread(
                "server", lambda: server.serve_messages(self._peers, self._wire, buffer)
            )

    def close(self) -> None:
        """End the round on this rank; on rank 0, once every other worker has ended it.

        No message is in flight afterwards: a worker leaves only when it has its last answer.
        """
        if self._server is None:
            self._peers.send(ServerRequest(Kind.LEAVE).encode(), SERVER, tag=_ASKED)
        elif self._thread is not None:
            self._thread.join()
            self._thread = None
            self._server.end_round()

    def check(self) -> None:
        """Raise the error of the server's thread, if it failed."""
        if self._thread is not None:
            self._thread.check()

    def fetch(self, answer: Tensor) -> None:
        """Put the common vector into `answer`."""
        self.version = self._ask(ServerRequest(Kind.FETCH), answer, answer)

    def give(self, given: Tensor, answer: Tensor, *, frames: int = 0, learning_rate: float = 0.0) -> None:
        """Hand over `given`, put the answer into `answer`, and count its age."""
        request = ServerRequest(Kind.GIVE, self.version, frames, learning_rate)
        version = self._ask(request, given, answer)
        age = version - 1 - self.version
        self.ages.extend([0] * (age + 1 - len(self.ages)))
        self.ages[age] += 1
        self.version = version

    def _ask(self, request: ServerRequest, given: Tensor, answer: Tensor) -> int:
        if self._server is not None:
            return self._server.serve_here(request, given, answer)
        self._peers.send(request.encode(), SERVER, tag=_ASKED)
        if request.kind is Kind.GIVE:
            self._wire.give(self._peers, given)
        version = torch.zeros(1, dtype=torch.int64)
        self._peers.recv(version, SERVER, tag=_VERSION)
        self._wire.hear(self._peers, answer)
        return int(version)


def worker_roster(size: int, *, dedicated: bool) -> Roster:
    """Return the roster: each rank trains at its own pace, but a dedicated server has no data."""
    workers = list(range(size - dedicated))
    return Roster([*([None] if dedicated else []), *workers], list(range(size)))


def refuse_too_few(strategy: str, size: int, needed: int) -> None:
    """Raise ConfigError if `dedicated=true` leaves too few workers.

    Args:
        strategy: name of the strategy.
        size: number of ranks.
        needed: lowest number of ranks.
    """
    if size < needed:
        raise ConfigError(
            f"{strategy}:dedicated=true: rank 0 only serves, so at least {needed} ranks are needed, "
            f"not {size}; start more ranks or use dedicated=false"
        )
