"""Messages between two ranks over a gloo group of their own.

Several threads of a rank may wait in one group at the same time: gloo matches by (source, tag) and waits in a
condition variable.  But gloo does not compare sizes: a message longer than the tensor ends the process
("terminate called"), a shorter one leaves the rest of the tensor unchanged.  So its size precedes every
message.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from speechdp.comm.peers import CheckedPeers
from speechdp.comm.staging import Staged, as_bytes
from speechdp.comm.torchdist.meeting import TIMEOUT, checked


class TorchPeers(CheckedPeers):
    """A channel over a gloo group.

    Args:
        store: store in which the ranks of the channel find one another; nothing else uses it.
        rank: this rank in the channel.
        size: number of ranks of the channel.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        # The group itself, not dist.new_group, in which every rank of the job would have to take part.
        self._group: Any = checked(
            "opening a channel", lambda: dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        )

    def _send(self, x: Tensor, dest: int, tag: int) -> None:
        payload = Staged(as_bytes(x)).fetch()

        def run() -> None:
            self._group.send([torch.tensor([payload.numel()])], dest, _header(tag)).wait()
            if payload.numel() > 0:
                self._group.send([payload], dest, _payload(tag)).wait()

        checked(f"send to rank {dest}", run)

    def _recv(self, x: Tensor, source: int | None, tag: int) -> int:
        staged = Staged(as_bytes(x), load=False)
        sender: int = checked(f"receive with tag {tag}", lambda: self._fill(staged.fetch(), source, tag))
        staged.store()
        return sender

    def _close(self) -> None:
        # Dropping the group would cut off messages that the others have not received yet.
        checked("closing a channel", lambda: self._group.barrier().wait())
        self._group = None

    def _abandon(self) -> None:
        self._group = None

    def _fill(self, x: Tensor, source: int | None, tag: int) -> int:
        """Receive one message into `x`, flat bytes, and return its sender."""
        header = torch.zeros(1, dtype=torch.int64)
        if source is None:
            work = self._group.recv_anysource([header], _header(tag))
        else:
            work = self._group.recv([header], source, _header(tag))
        work.wait()
        sender = int(work._source_rank()) if source is None else source
        num_bytes = int(header)
        fits = num_bytes == x.numel()
        payload = x if fits else torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes > 0:
            self._group.recv([payload], sender, _payload(tag)).wait()
        if not fits:
            raise self.wrong_size(x.numel(), num_bytes, sender, tag)
        return sender


def _header(tag: int) -> int:
    return 2 * tag


def _payload(tag: int) -> int:
    return 2 * tag + 1
