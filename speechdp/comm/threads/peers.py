"""Messages between ranks that are threads of one process: mailboxes guarded by the job's condition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from speechdp.comm.loss_tolerance import PeerLost
from speechdp.comm.peers import CheckedPeers
from speechdp.comm.staging import as_bytes
from speechdp.comm.threads.job import ThreadJob


class Mailboxes:
    """Messages of one channel that have not yet been received, oldest first in each box.

    Args:
        job: its condition guards the boxes.
        members: rank in the job of every rank of the channel.
    """

    def __init__(self, job: ThreadJob, members: Sequence[int]) -> None:
        self.job, self.members = job, members
        self._boxes: defaultdict[tuple[int, int], list[tuple[int, Tensor]]] = defaultdict(list)
        # Losses already reported to each rank in receives from any source.
        self._reported: defaultdict[int, frozenset[int]] = defaultdict(frozenset)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of the channel that have vanished."""
        return frozenset(r for r, member in enumerate(self.members) if member in self.job.lost)

    def put(self, source: int, dest: int, tag: int, message: Tensor) -> None:
        """Leave `message` for `dest`.  Raises PeerLost if `dest` has vanished."""
        with self.job.changed:
            self.job.check_here(self.members[source])
            if dest in self.lost:
                raise PeerLost(self.lost)
            self._boxes[dest, tag].append((source, message))
            self.job.changed.notify_all()

    def take(self, rank: int, source: int | None, tag: int) -> tuple[int, Tensor]:
        """Wait for a message to `rank` with `tag`, from `source` or any rank; return (sender, message).

        Raises:
            PeerLost: `source` has vanished; with source None, a rank has vanished since the last PeerLost.
            CommunicationError: no such message can arrive any more, or none arrived in time.
        """
        sources = [r for r in range(len(self.members)) if r != rank] if source is None else [source]
        missing = [self.members[r] for r in sources]
        what = f"recv(tag {tag})"
        with self.job.changed:
            while True:
                if source is None:
                    self._report_losses(rank)  # before looking for a message, as MPI does
                if (message := self._pop(rank, sources, tag)) is not None:
                    return message
                if source in self.lost:
                    raise PeerLost(self.lost)
                self.job.wait(what, self.members[rank], missing, for_any=source is None)

    def _report_losses(self, rank: int) -> None:
        news = self.lost - self._reported[rank]
        self._reported[rank] |= news
        if news:
            raise PeerLost(self.lost)

    def _pop(self, rank: int, sources: list[int], tag: int) -> tuple[int, Tensor] | None:
        box = self._boxes[rank, tag]
        for number, (sender, _) in enumerate(box):
            if sender in sources:
                return box.pop(number)
        return None


class ThreadPeers(CheckedPeers):
    """One rank's end of a channel between threads.

    Args:
        rank: this rank in the channel.
        boxes: the channel's mailboxes, shared by its ranks.
        meet: returns once every rank of the channel has called it.
    """

    def __init__(self, rank: int, boxes: Mailboxes, meet: Callable[[], None]) -> None:
        super().__init__(rank, len(boxes.members))
        self._boxes, self._meet = boxes, meet

    @property
    def lost(self) -> frozenset[int]:  # type: ignore[override]
        return self._boxes.lost

    def _send(self, x: Tensor, dest: int, tag: int) -> None:
        self._boxes.put(self.rank, dest, tag, as_bytes(x).clone())

    def _recv(self, x: Tensor, source: int | None, tag: int) -> int:
        sender, message = self._boxes.take(self.rank, source, tag)
        if message.nbytes != x.nbytes:
            raise self.wrong_size(x.nbytes, message.nbytes, sender, tag)
        as_bytes(x).copy_(message)
        return sender

    def _close(self) -> None:
        self._meet()
