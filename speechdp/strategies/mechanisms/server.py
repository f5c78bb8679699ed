"""What strategies with a server on rank 0 share: workers ask, the server answers in the order of arrival.

Two roles: a `Server` keeps the common vector, on rank 0; a `Link`, one a rank, is how its worker asks.  On
rank 0 that is the server itself, under a lock; elsewhere messages go to a thread of rank 0, over a `Wire`.
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
#: Tags: what is asked, the vector with it, the version in answer, the vector in answer; what a worker tells
#: before the server begins.
_ASKED, GIVEN_TAG, _VERSION, ANSWER_TAG, BEFORE_TAG = range(5)
#: Replaces, in place, an answer by what the worker will read of it.
Rounding = Callable[[Tensor], None]


class Kind(IntEnum):
    """What a worker wants."""

    FETCH = 0
    """The common vector."""
    GIVE = 1
    """To hand over a vector and get one back."""
    LEAVE = 2
    """Nothing more until it comes back with FETCH or GIVE; there is no answer."""


@dataclass(frozen=True)
class ServerRequest:
    """What comes before the vector.

    Attributes:
        kind: what is wanted.
        version: of the common vector when this worker last had an answer.
        frames: that the vector stands for.
        learning_rate: of the worker's schedule.
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
    """How vectors travel between workers and the server: as they are.

    A worker calls `give` and `hear`; the server calls `take`, `round` where it acts by what it answers, and
    `reply`, in this order, for one worker after another.
    """

    def give(self, peers: PeerCommunicator, x: Tensor) -> None:
        """Send a vector to the server."""
        peers.send(x, SERVER, tag=GIVEN_TAG)

    def take(self, peers: PeerCommunicator, worker: int, out: Tensor) -> None:
        """Receive a worker's vector."""
        peers.recv(out, worker, tag=GIVEN_TAG)

    def round(self, answer: Tensor) -> None:
        """Replace an answer by what the worker will read of it."""

    def reply(self, peers: PeerCommunicator, worker: int, answer: Tensor) -> None:
        """Send an answer to a worker."""
        peers.send(answer, worker, tag=ANSWER_TAG)

    def hear(self, peers: PeerCommunicator, out: Tensor) -> None:
        """Receive the server's answer."""
        peers.recv(out, SERVER, tag=ANSWER_TAG)


class Server(ABC):
    """The common vector and how it changes.

    Attributes:
        vector: what all workers share.
        version: changes of the vector so far.
    """

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector
        self.version = 0
        self._lock = threading.Lock()
        # Without a stream of its own the server would wait, on a GPU, for what its rank's worker has queued.
        self._stream = torch.cuda.Stream(vector.device) if vector.is_cuda else None  # type: ignore[no-untyped-call]

    @abstractmethod
    def serve(
        self, request: ServerRequest, given: Tensor, answer: Tensor, rounding: Rounding | None
    ) -> Tensor:
        """Do what is asked, alone, and return the answer: `answer` filled, or a vector nobody will change.

        Args:
            request: FETCH or GIVE.
            given: the vector handed over; undefined with FETCH.  May be overwritten.
            answer: where to put the answer; it may be the same memory as `given`.
            rounding: of what the worker will read, for a server that has to act by just that; None: the
                worker is of this rank and reads all of it.
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

        The lock is held while the vector is used, not while a message is under way: this rank's worker must
        not wait for another's network.  Hence the answer is copied out of the vector before it is sent.

        Args:
            peers: the channel.
            wire: what vectors go over.
            buffer: a vector for what is handed over, and for the answer.
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
        """Order what the server does after what this thread has done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def end_round(self) -> None:
        """Order what this thread does after what the server has done."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the block's kernels on the server's stream; on a CPU simply run it."""
        with torch.cuda.stream(self._stream):
            yield

    def _finish_worker_kernels(self) -> None:
        """Wait, asleep, until this thread's kernels are done: under the lock they would hold up everybody."""
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._stream.device))
            done.synchronize()


class Link:
    """How the worker of one rank asks the server, between `open` and `close`.

    Args:
        peers: the channel.
        server: on rank 0; None elsewhere.
        wire: what vectors go over; this rank's own.

    Attributes:
        version: of the common vector when this worker last had an answer.
        ages: how many answers there were by the number of changes others had made since the answer before.
    """

    def __init__(self, peers: PeerCommunicator, server: Server | None, wire: Wire) -> None:
        assert (server is not None) == (peers.rank == SERVER)
        self._peers, self._server, self._wire = peers, server, wire
        self._thread: ExchangeThread | None = None
        self._buffer = None if server is None or peers.size == 1 else torch.empty_like(server.vector)
        self.version = 0
        self.ages: list[int] = []

    def open(self) -> None:
        """Begin a round: let rank 0 serve."""
        if self._server is not None and self._buffer is not None:
            server, buffer = self._server, self._buffer
            server.begin_round()
            self._thread = ExchangeThread(
                "server", lambda: server.serve_messages(self._peers, self._wire, buffer)
            )

    def close(self) -> None:
        """End the round on this rank; on rank 0 once every other worker has ended it.

        No message is under way afterwards: a worker leaves only when it has its last answer.
        """
        if self._server is None:
            self._peers.send(ServerRequest(Kind.LEAVE).encode(), SERVER, tag=_ASKED)
        elif self._thread is not None:
            self._thread.join()
            self._thread = None
            self._server.end_round()

    def check(self) -> None:
        """Raise what the server's thread raised, if it has."""
        if self._thread is not None:
            self._thread.check()

    def fetch(self, answer: Tensor) -> None:
        """Put the common vector into `answer`."""
        self.version = self._ask(ServerRequest(Kind.FETCH), answer, answer)

    def give(self, given: Tensor, answer: Tensor, *, frames: int = 0, learning_rate: float = 0.0) -> None:
        """Hand over `given`, put what comes back into `answer`, and count the age."""
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
    """Return who trains on what, each at its own pace: a server on a rank of its own trains on nothing."""
    workers = list(range(size - dedicated))
    return Roster([*([None] if dedicated else []), *workers], list(range(size)))


def refuse_too_few(strategy: str, size: int, needed: int) -> None:
    """Raise ConfigError when `dedicated=true` leaves too few workers.

    Args:
        strategy: its name.
        size: ranks there are.
        needed: ranks there must be.
    """
    if size < needed:
        raise ConfigError(
            f"{strategy}:dedicated=true: rank 0 only serves, so at least {needed} ranks are needed, "
            f"not {size}; start more ranks or use dedicated=false"
        )
