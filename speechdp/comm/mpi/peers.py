"""Messages between two ranks over MPI.  Imported by comm/mpi/communicator.py, which initialises MPI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from speechdp.comm.loss_tolerance import PeerLost
from speechdp.comm.mpi.library import MPI, checked, close_channel, parts
from speechdp.comm.mpi.ulfm import failed_ranks, is_loss
from speechdp.comm.peers import CheckedPeers
from speechdp.comm.staging import Staged, as_bytes
from speechdp.comm.waiting import sleep_until
from speechdp.errors import CommunicationError

#: Longest sleep between two tests of a message, s: it makes progress only while it is tested.
_LONGEST_SLEEP_S = 100e-6
#: A message is tested without sleeping for as long as it would take at this rate, bytes/s.  Through shared
#: memory without single-copy transfers its pieces arrive as fast as both ranks fetch them, and with sleeps
#: between them 64 MB take 10 times as long.  Over a network, which is slower, there is time to sleep.
_MEMORY_RATE = 2e9
#: MPI reports a loss by itself; for a message in flight, losses are also checked once in so many tests.
_TESTS_PER_LOOK = 500


class MpiPeers(CheckedPeers):
    """A channel over an mpi4py communicator of its own.

    Every wait tests and sleeps in turn: MPI's own waits would keep a core busy.  A message is matched
    (Improbe) before it is received, so that several threads can wait on one communicator.

    Messages of more than 2^30 bytes are sent in pieces.  If such a message turns out to have an unexpected
    size, its remaining pieces stay in the channel, which is then unusable.

    Args:
        comm: mpi4py communicator that nothing else uses; `close` frees it.
        reads_cuda: whether MPI accepts GPU memory.
    """

    def __init__(self, comm: Any, *, reads_cuda: bool) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm, self._reads_cuda = comm, reads_cuda

    def _send(self, x: Tensor, dest: int, tag: int) -> None:
        staged = Staged(as_bytes(x), direct=self._reads_cuda)

        def run() -> None:
            for part in parts(staged.fetch()):
                self._finish(self._comm.Isend(_buffer(part), dest, tag), part.numel(), dest)

        checked(f"send to rank {dest}", run)

    def _recv(self, x: Tensor, source: int | None, tag: int) -> int:
        staged = Staged(as_bytes(x), direct=self._reads_cuda, load=False)
        sender = checked(f"receive with tag {tag}", lambda: self._fill(staged.fetch(), source, tag))
        staged.store()
        return sender

    def _close(self) -> None:
        close_channel(self._comm)

    def _fill(self, x: Tensor, source: int | None, tag: int) -> int:
        """Receive one message into `x`, flat bytes, and return its sender."""
        sender = MPI.ANY_SOURCE if source is None else source
        for part in parts(x):
            message, status = self._match(sender, tag)
            # A message's later pieces come from the rank that sent its first piece.
            sender = status.Get_source()
            num_bytes = status.Get_count(MPI.BYTE)
            if num_bytes != part.numel():
                # MPI cannot return a matched message to the queue; receiving it keeps the channel in order.
                self._finish(message.Irecv(bytearray(num_bytes)), num_bytes, sender)
                raise self.wrong_size(part.numel(), num_bytes, sender, tag)
            self._finish(message.Irecv(_buffer(part)), num_bytes, sender)
        return int(sender)

    def _match(self, source: int, tag: int) -> tuple[Any, Any]:
        """Wait until a message has arrived and match it; return it and its status."""
        status = MPI.Status()
        message: Any = None

        def arrived() -> bool:
            nonlocal message
            message = self._comm.Improbe(source, tag, status)
            return message is not None

        sleep_until(arrived)
        return message, status

    def _finish(self, request: Any, num_bytes: int, other: int) -> None:
        """Wait for a message of `num_bytes` in flight from or to rank `other`."""
        sleep_until(request.Test, busy_s=num_bytes / _MEMORY_RATE, longest_sleep_s=_LONGEST_SLEEP_S)


class TolerantMpiPeers(MpiPeers):
    """A channel that survives lost ranks (ULFM): calls that wait for them raise PeerLost."""

    def __init__(self, comm: Any, *, reads_cuda: bool) -> None:
        super().__init__(comm, reads_cuda=reads_cuda)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._abandoned: list[Any] = []

    def _send(self, x: Tensor, dest: int, tag: int) -> None:
        with self._noting_losses():
            super()._send(x, dest, tag)

    def _recv(self, x: Tensor, source: int | None, tag: int) -> int:
        with self._noting_losses(acknowledge=source is None):
            return super()._recv(x, source, tag)

    def _close(self) -> None:
        return None  # freeing is collective: MPI would wait for lost ranks

    @contextmanager
    def _noting_losses(self, *, acknowledge: bool = False) -> Iterator[None]:
        """Raise PeerLost for MPI's errors about lost ranks.

        Args:
            acknowledge: whether to acknowledge the losses to MPI, which refuses receives from any source
                until then.
        """
        try:
            yield
        except CommunicationError as error:
            if not (isinstance(error.__cause__, MPI.Exception) and is_loss(error.__cause__)):
                raise
            if acknowledge:
                checked("acknowledging a loss", self._comm.Ack_failed)
            raise self._loss() from None

    def _finish(self, request: Any, num_bytes: int, other: int) -> None:
        num_tests = 0

        def over() -> bool:
            nonlocal num_tests
            num_tests += 1
            if request.Test():
                return True
            if num_tests % _TESTS_PER_LOOK == 0 and other in failed_ranks(self._comm) and not request.Test():
                self._abandoned.append(request)  # with its memory, which MPI may still write
                raise self._loss()
            return False

        sleep_until(over, busy_s=num_bytes / _MEMORY_RATE, longest_sleep_s=_LONGEST_SLEEP_S)

    def _loss(self) -> PeerLost:
        # After the acknowledgement: the result must include every acknowledged rank.
        failed = failed_ranks(self._comm)
        with self._counting:
            self.lost |= failed
            return PeerLost(self.lost)


def _buffer(x: Tensor) -> Any:
    """Return flat bytes in a form mpi4py accepts; it recognises GPU memory by the tensor's own protocol."""
    return x if x.is_cuda else x.numpy()
