"""Messages between two ranks over MPI.  Imported by comm/mpi/communicator.py, which has initialised MPI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from speechdp.comm.loss_tolerance import PeerLost
from speechdp.comm.mpi.library import MPI, checked, meet, parts
from speechdp.comm.mpi.ulfm import failed_ranks, is_loss
from speechdp.comm.peers import CheckedPeers
from speechdp.comm.staging import Staged, as_bytes
from speechdp.comm.waiting import sleep_until
from speechdp.errors import CommunicationError

#: A message makes progress only while somebody tests it: the longest sleep between two tests, s.
_LONGEST_SLEEP_S = 100e-6
#: A message is tested without a sleep for as long as it takes at this rate, bytes/s: through shared memory
#: without single copies its pieces come as fast as both ranks fetch them, and 64 MB with sleeps between
#: them take 10 times as long.  Over a network, which is slower, there is time to sleep.
_MEMORY_RATE = 2e9
#: MPI tells of a loss by itself; a message that is under way is looked after besides, once in so many tests.
_TESTS_PER_LOOK = 500


class MpiPeers(CheckedPeers):
    """A channel over an mpi4py communicator of its own.

    Every wait tests and sleeps in turn: MPI's own would keep a core busy.  A message is matched before it is
    received (Improbe), so that several threads can wait on one communicator.

    Messages of more than 2^30 bytes go in pieces.  When one of those turns out to have another size than was
    expected, the rest of its pieces stays in the channel, which is then of no more use.

    Args:
        comm: mpi4py communicator that nobody else uses; `close` frees it.
        reads_cuda: MPI takes the GPU's memory itself.
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
        def run() -> None:
            meet(self._comm)
            self._comm.Free()

        checked("closing a channel", run)

    def _fill(self, x: Tensor, source: int | None, tag: int) -> int:
        """Receive one message into `x`, flat bytes, and return its sender."""
        sender = MPI.ANY_SOURCE if source is None else source
        for part in parts(x):
            message, status = self._match(sender, tag)
            # The pieces of a message that follow the first come from the rank that sent that one.
            sender = status.Get_source()
            num_bytes = status.Get_count(MPI.BYTE)
            if num_bytes != part.numel():
                # MPI cannot give a matched message back; taken, it leaves the channel in order.
                self._finish(message.Irecv(bytearray(num_bytes)), num_bytes, sender)
                raise self.wrong_size(part.numel(), num_bytes, sender, tag)
            self._finish(message.Irecv(_buffer(part)), num_bytes, sender)
        return int(sender)

    def _match(self, source: int, tag: int) -> tuple[Any, Any]:
        """Wait until a message has arrived and reserve it; return it and its status."""
        status = MPI.Status()
        message: Any = None

        def arrived() -> bool:
            nonlocal message
            message = self._comm.Improbe(source, tag, status)
            return message is not None

        sleep_until(arrived)
        return message, status

    def _finish(self, request: Any, num_bytes: int, other: int) -> None:
        """Wait for a message of `num_bytes` that is under way from or to rank `other`."""
        sleep_until(request.Test, busy_s=num_bytes / _MEMORY_RATE, longest_sleep_s=_LONGEST_SLEEP_S)


class TolerantMpiPeers(MpiPeers):
    """A channel that goes on without ranks that are gone (ULFM): calls that wait for them raise PeerLost."""

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
        return None  # freeing is collective: MPI would wait for ranks that are gone

    @contextmanager
    def _noting_losses(self, *, acknowledge: bool = False) -> Iterator[None]:
        """Raise PeerLost where MPI says so.

        Args:
            acknowledge: receiving from anybody goes on after this: MPI refuses it until the caller says that
                it knows who is gone.
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
        # After the acknowledgement: whoever was acknowledged must be among them.
        failed = failed_ranks(self._comm)
        with self._counting:
            self.lost |= failed
            return PeerLost(self.lost)


def _buffer(x: Tensor) -> Any:
    """Return flat bytes as something mpi4py takes: it knows GPU memory by the tensor's own protocol."""
    return x if x.is_cuda else x.numpy()
