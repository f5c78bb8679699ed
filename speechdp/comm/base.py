"""The interface of all communicator back-ends (`serial`, `threads`, `horovod`, `mpi`, `torch`).

All methods are collective unless they say otherwise: every rank calls them, in the same order, with
tensors of the same shape and dtype.  `rank`, `size` and `local_rank` come from the back-end, never from
a guess at the environment.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from speechdp.comm.calls import Calls
from speechdp.comm.packets import Allocate, PacketChannel, fresh
from speechdp.errors import CommunicationError, ConfigError


class ReduceOp(Enum):
    """How an allreduce combines the ranks' values, element by element."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"

    def combine(self, total: Tensor, part: Tensor) -> None:
        """Combine one rank's values, `part`, into `total`, in place."""
        if self is ReduceOp.SUM:
            total += part
        elif self is ReduceOp.MAX:
            torch.maximum(total, part, out=total)
        else:
            torch.minimum(total, part, out=total)


class Work(ABC):
    """An exchange in progress.  The tensor must not be touched before `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the result is in the tensor.  Raises CommunicationError if a peer is lost."""


class CompletedWork(Work):
    """An exchange that is already complete."""

    def wait(self) -> None:
        return None


class PeerCommunicator(ABC):
    """Point-to-point messages on a separate channel, so that they cannot be mixed up with other traffic.

    Only `close` is collective.  Several threads of a rank may use one channel at a time, as long as no two
    of them receive with the same tag.  Messages from one rank with one tag arrive in the order in which they
    were sent.  A rank never sends to itself.

    Attributes:
        sent_bytes: payload this rank has sent over the channel so far.
        lost: ranks that are known to be lost; none unless losses are tolerated.
    """

    rank: int
    size: int
    sent_bytes: int = 0
    lost: frozenset[int] = frozenset()

    @abstractmethod
    def send(self, x: Tensor, dest: int, *, tag: int = 0) -> None:
        """Send `x` and return once its memory may be written again.  Waiting sleeps and keeps no core busy.

        This may take until the receiver has received it: two ranks that send to each other before they
        receive need a separate thread for sending.

        Args:
            x: contiguous tensor of any dtype, on the CPU or on this rank's GPU; sent as bytes.
            dest: receiver, another rank.
            tag: kind of message, 0 <= tag < 1000; a `recv` takes only messages with its own tag.

        Raises:
            PeerLost: losses are tolerated, and the receiver is lost.
            CommunicationError: the message cannot be sent.
        """

    @abstractmethod
    def recv(self, x: Tensor, source: int | None = None, *, tag: int = 0) -> int:
        """Receive a message of exactly the size of `x` into `x`, and return the rank that sent it.

        Args:
            x: contiguous tensor of the shape and dtype that was sent.
            source: sender; None takes the next message with this tag, whoever sent it.
            tag: as in `send`.

        Raises:
            PeerLost: losses are tolerated, and the sender is lost; with source None, a rank was lost since
                the last such call (the next call waits for the remaining ranks).
            CommunicationError: the sender is lost, or the message has a different size.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the channel.  Collective; no message may be in flight; safe to call twice."""

    def abandon(self) -> None:
        """Give up this rank's end after an error, without waiting for the others; no call may follow."""
        return None


class Communicator(ABC):
    """N equal ranks that exchange tensors.

    Attributes:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        local_rank: index of this rank among those on the same host; selects the GPU.
        device: the device this rank computes on; the CPU by default.
        role: role of this rank for messages, e.g. "feeder"; "" for a training rank.
        calls: where `DataParallel` notes which of its calls this rank is in; None: no `DataParallel` yet.
        spans_job: whether these are all the ranks that trained together at the start, not a group of them.
        sent_bytes: bytes this rank has sent so far in allreduces and broadcasts, assuming a ring allreduce.
    """

    backend: ClassVar[str]
    #: dtypes that the back-end sums correctly.  It refuses others: bfloat16 passed to MPI as bytes, for
    #: example, would give wrong sums without an error.
    reducible: ClassVar[frozenset[torch.dtype]] = frozenset(
        {torch.float32, torch.float64, torch.int32, torch.int64}
    )

    rank: int
    size: int
    local_rank: int
    device: torch.device = torch.device("cpu")
    role: str = ""
    calls: Calls | None = None
    spans_job: bool = True
    sent_bytes: float = 0.0
    #: Whether this back-end, started in this way, has point-to-point messages (`peers`) and groups (`split`).
    has_peers: bool = True

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that take part in collectives: all, or the remaining ones if losses are tolerated.

        After the same collective it is the same on every rank.  Work that is divided among the ranks before
        a collective, and combined in that collective, is complete if `alive` has not changed meanwhile.
        """
        return tuple(range(self.size))

    @property
    def gone(self) -> frozenset[int]:
        """Ranks this rank knows to be lost, whether or not all agree; empty unless losses are tolerated.

        Not collective; may be called from any thread.
        """
        return frozenset()

    def tolerate_loss(self) -> None:
        """Continue without lost ranks from now on, instead of raising.  Collective.

        Rank 0 must not be lost.  Every collective then gives all remaining ranks the same result: sums are
        over these ranks, and lists have one entry for each.  Channels opened after this call raise PeerLost.

        Raises:
            ConfigError: as for `check_loss_tolerance`.
        """
        self.check_loss_tolerance()

    def check_loss_tolerance(self) -> None:
        """Raise the error that `tolerate_loss` would raise, but change nothing.  Not collective.

        Raises:
            ConfigError: this back-end cannot tolerate losses; the message names one that can.
        """
        raise ConfigError(
            f"--tolerate-loss: the {self.backend} back-end cannot continue without a lost rank; start "
            "several ranks with --backend mpi and Open MPI 5, or leave it out"
        )

    def allreduce_async(self, x: Tensor, *, name: str, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Start combining `x` over all ranks, in place.  Collective.

        Args:
            x: contiguous tensor of a dtype in `reducible`; any shape, the same on every rank.
            name: name of the exchange, for messages; Horovod matches the ranks' tensors by it.  Exchanges in
                progress at the same time may share a name if all ranks start them, and wait for them, in the
                same order.
            op: how values are combined.

        Returns:
            Work to wait on before `x` is read or written.

        Raises:
            CommunicationError: the tensor cannot be reduced by this back-end.
        """
        if x.dtype not in self.reducible:
            known = ", ".join(sorted(str(d).removeprefix("torch.") for d in self.reducible))
            raise CommunicationError(
                f"the {self.backend} back-end cannot sum {str(x.dtype).removeprefix('torch.')} "
                f"(tensor {name!r}); convert it to one of: {known}"
            )
        if not x.is_contiguous():
            raise CommunicationError(f"tensor {name!r} is not contiguous; exchange a flat buffer")
        if self.size == 1 or x.numel() == 0:
            return CompletedWork()
        self.sent_bytes += 2 * (self.size - 1) / self.size * x.nbytes
        return self._allreduce_async(x, name, op)

    def allreduce(self, x: Tensor, *, name: str, op: ReduceOp = ReduceOp.SUM) -> Tensor:
        """Combine `x` over all ranks in place, wait, and return it.  Collective."""
        self.allreduce_async(x, name=name, op=op).wait()
        return x

    def broadcast(self, x: Tensor, *, name: str, root: int = 0) -> Tensor:
        """Overwrite `x` on every rank in place with the `x` of `root`, and return it.  Collective."""
        if not x.is_contiguous():
            raise CommunicationError(f"tensor {name!r} is not contiguous; broadcast a flat buffer")
        if self.size > 1 and x.numel() > 0:
            self.sent_bytes += (self.size - 1) / self.size * x.nbytes
            self._broadcast(x, name, root)
        return x

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the `value` of every rank in `alive`, in rank order.  Collective.

        Values are sent as JSON, not pickle, so that a message can never run code.  `value` must be made of
        None, bool, int, float, str, list and dict (NaN and infinity included).
        """
        encoded = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(encoded)]
        return [json.loads(part) for part in self._allgather_bytes(encoded)]

    def broadcast_object(self, value: Any, *, root: int = 0) -> Any:
        """Return `root`'s JSON-like `value` on every rank; other ranks' values are ignored.  Collective."""
        values = self.allgather_object(value if self.rank == root else None)
        return values[self.alive.index(root)]

    def peers(self) -> PeerCommunicator:
        """Open a channel for point-to-point messages.  Collective; each call opens a new one.

        Raises:
            ConfigError: the back-end has no such messages; the error says how to start ranks that have them.
        """
        raise ConfigError(
            f"the {self.backend} back-end has no messages between two ranks as it was started; "
            "start with mpirun, or speechdp launch without --launcher"
        )

    def packets(self, allocate: Allocate = fresh) -> PacketChannel:
        """Open a channel for packets, sent without waiting.  Collective; each call opens a new one.

        Args:
            allocate: returns memory for received tensors.

        Raises:
            ConfigError: this back-end has no packets.
        """
        raise ConfigError(
            f"the {self.backend} back-end has no packets between ranks; start with mpirun and --backend mpi"
        )

    def split(self, color: int) -> Communicator:
        """Return the communicator of the ranks that pass the same `color`, in rank order.  Collective.

        The new communicator keeps this one's `local_rank`, which still selects the GPU, and its `calls`,
        which the rank's watchdog reads.  It counts its own `sent_bytes`, and must be closed before this one.

        Raises:
            ConfigError: this back-end cannot be split.
        """
        group = self._split(color)
        group.calls = self.calls
        group.spans_job = self.spans_job and group.size == self.size
        return group

    def _split(self, color: int) -> Communicator:
        raise ConfigError(
            f"the {self.backend} back-end cannot be split into groups as it was started; "
            "start with mpirun, or speechdp launch without --launcher"
        )

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it.  Collective.  Waiting must not keep a core busy."""

    @abstractmethod
    def close(self) -> None:
        """Release the back-end's resources and join its threads.  Collective; safe to call twice."""

    def abandon(self) -> None:
        """Give up this rank's part after an error, without waiting for the others; no call may follow."""
        return None

    def leave(self, exit_code: int) -> None:
        """End this process after `close` if the back-end does not allow an ordinary exit; else return."""
        return None

    @abstractmethod
    def abort(self, exit_code: int) -> NoReturn:
        """End all ranks of the job immediately with `exit_code`.  Not collective; called by one rank."""

    @abstractmethod
    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, name: str, root: int) -> None: ...

    @abstractmethod
    def _allgather_bytes(self, data: bytes) -> list[bytes]: ...
