"""Every rank's side of an asynchronous run's dealing: ask rank 0 for work over a dedicated channel.

A rank asks whenever its loader has room.  Rank 0 answers with a batch, with a meeting, or with a request to
ask again soon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator

import torch

from speechdp.comm.background import ExchangeThread
from speechdp.comm.base import PeerCommunicator
from speechdp.comm.loss_tolerance import PeerLost, leader_lost
from speechdp.data.plan.assignment import Assignment, Meeting, MeetingKind, PlanPosition, meeting_of
from speechdp.data.plan.epoch_plan import EpochPlan
from speechdp.dealing.batch_server import BatchReply, BatchServer, Item
from speechdp.dealing.epoch_batches import Deal
from speechdp.parallel.declared import Roster

_REQUEST, _ANSWER = 1, 2
#: Seconds that a rank waits before it asks again, if rank 0 had no work for it.
_WAIT_S = 0.002
_KINDS = list(MeetingKind)
_LAST = {MeetingKind.STOP, MeetingKind.END}
#: First number of an answer: a batch, wait, or 2 + the index in _KINDS of the meeting's kind.
_BATCH, _WAIT = 0, 1
_ANSWER_NUMBERS = 7


class Dealing:
    """One rank's view of a run's dealing: its assignments, and on rank 0 also the answers to other ranks.

    Args:
        peers: a channel used only for dealing.
        roster: which rank trains on which parts.
        plan: returns the plan of an epoch.
        server: decides what each rank does next; on rank 0, else None.
        stop_asked: returns whether this rank was asked to stop.
        on_loss: on rank 0, called with every rank that was lost.
    """

    def __init__(
        self,
        peers: PeerCommunicator,
        roster: Roster,
        plan: Callable[[int], EpochPlan],
        server: BatchServer | None,
        stop_asked: Callable[[], bool],
        on_loss: Callable[[int], None] = lambda rank: None,
    ) -> None:
        assert (server is not None) == (peers.rank == 0)
        self._peers, self._plan = peers, plan
        self._seat, self._parts = roster.seat(peers.rank), roster.parts_of_team
        self._server, self._stop_asked, self._on_loss = server, stop_asked, on_loss
        self._closed = threading.Event()
        self._thread: ExchangeThread | None = None
        if server is not None and peers.size > 1:
            self._thread = ExchangeThread("dealing", self._serve)

    def assignments(self) -> Iterator[Assignment]:
        """Yield this rank's assignments until the run ends.  Called in a loader's thread."""
        frames = 0
        while not self._closed.is_set():
            answer = self._ask()
            if answer.item is None:
                time.sleep(_WAIT_S)
                continue
            if isinstance(answer.item, Meeting):
                yield meeting_of(answer.item)
                if answer.item.kind in _LAST:
                    return
            else:
                # Frames that all ranks together were dealt since this rank last asked: its share of their
                # progress.
                yield self._batch(answer, answer.item, max(0, answer.frames - frames) if frames else 0)
                frames = answer.frames

    def _batch(self, answer: BatchReply, deal: Deal, frames_since: int) -> Assignment:
        assert self._seat is not None
        part = self._parts[deal.owner][self._seat[1]]
        plan = self._plan(answer.epoch)
        return Assignment(
            plan.ranks[part].batch(deal.index),
            PlanPosition(answer.epoch, part, deal.index),
            answer.num_dealt - 1,
            answer.num_batches,
            frames_since / self._peers.size,
            frames_since,
        )

    def _ask(self) -> BatchReply:
        if self._server is not None:
            return self._server.answer(self._peers.rank, stop=self._stop_asked())
        numbers = torch.empty(_ANSWER_NUMBERS, dtype=torch.int64)
        try:
            self._peers.send(torch.tensor([int(self._stop_asked())]), 0, tag=_REQUEST)
            self._peers.recv(numbers, 0, tag=_ANSWER)
        except PeerLost:
            raise leader_lost() from None
        return _decode(numbers.tolist())

    def _serve(self) -> None:
        asking = set(range(1, self._peers.size))
        while asking:
            try:
                self._serve_next(asking)
            except PeerLost as loss:
                asking -= loss.ranks
                self.lose(loss.ranks)

    def _serve_next(self, asking: set[int]) -> None:
        assert self._server is not None
        request = torch.empty(1, dtype=torch.int64)
        rank = self._peers.recv(request, tag=_REQUEST)
        if rank not in asking:
            return  # the rank was lost after it sent this request
        answer = self._server.answer(rank, stop=bool(request.item()))
        self._peers.send(_encode(answer), rank, tag=_ANSWER)
        if isinstance(answer.item, Meeting) and answer.item.kind in _LAST:
            asking.remove(rank)

    def lose(self, ranks: Collection[int]) -> None:
        """Continue without `ranks`.  Does nothing on ranks other than 0."""
        if self._server is not None:
            for rank in sorted(ranks):
                if self._server.lose(rank):
                    self._on_loss(rank)

    def stop_asking(self) -> None:
        """End `assignments` early, so that the loader can be joined after training has failed."""
        self._closed.set()

    def close(self) -> None:
        """Join the thread and close the channel.  Collective, at the run's end."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._peers.close()


def _encode(answer: BatchReply) -> torch.Tensor:
    what, first, second = _WAIT, 0, 0
    epoch, frames = answer.epoch, answer.frames
    if isinstance(answer.item, Deal):
        what, first, second = _BATCH, answer.item.owner, answer.item.index
    elif answer.item is not None:
        what, first = 2 + _KINDS.index(answer.item.kind), answer.item.step
        epoch, frames = answer.item.epoch, answer.item.frames
    return torch.tensor([what, epoch, first, second, frames, answer.num_dealt, answer.num_batches])


def _decode(numbers: list[int]) -> BatchReply:
    what, epoch, first, second, frames, num_dealt, num_batches = numbers
    item: Item | None = None
    if what == _BATCH:
        item = Deal(first, second, 0)
    elif what != _WAIT:
        item = Meeting(_KINDS[what - 2], epoch, first, frames)
    return BatchReply(item, epoch, frames, num_dealt, num_batches)
