"""Messages between two ranks over MPI.  Imported by comm/mpi.py, which has initialised MPI."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from speechdp.comm.mpi import MPI, checked, meet, parts
from speechdp.comm.patience import sleep_until
from speechdp.comm.peers import CheckedPeers
from speechdp.comm.staging import Staged, as_bytes

#: A message makes progress only while somebody tests it: the longest sleep between two tests, s.
_LONGEST_SLEEP_S = 100e-6
#: A message is tested without a sleep for as long as it takes at this rate, bytes/s: through shared memory
#: without single copies its pieces come as fast as both ranks fetch them, and 64 MB with sleeps between
#: them take 10 times as long.  Over a network, which is slower, there is time to sleep.
_MEMORY_RATE = 2e9


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
                _finish(self._comm.Isend(_buffer(part), dest, tag), part.numel())

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
                _finish(message.Irecv(bytearray(num_bytes)), num_bytes)
                raise self.wrong_size(part.numel(), num_bytes, sender, tag)
            _finish(message.Irecv(_buffer(part)), num_bytes)
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


def _buffer(x: Tensor) -> Any:
    """Return flat bytes as something mpi4py takes: it knows GPU memory by the tensor's own protocol."""
    return x if x.is_cuda else x.numpy()


def _finish(request: Any, num_bytes: int) -> None:
    """Wait for a message of `num_bytes` that is under way."""
    sleep_until(request.Test, busy_s=num_bytes / _MEMORY_RATE, longest_sleep_s=_LONGEST_SLEEP_S)
