"""Pairwise exchanges of parameters overlapped with training: who starts, who answers, how a session ends."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from speechdp.comm.background import ExchangeThread, JobThread
from speechdp.comm.base import PeerCommunicator
from speechdp.comm.loss_tolerance import PeerLost
from speechdp.strategies.mechanisms import topology
from speechdp.strategies.mechanisms.pending_correction import EffectiveParameters
from speechdp.strategies.mechanisms.topology import BipartiteKind
from speechdp.timing.timeline import Span, Timeline

#: Number of header tags.  Each session has its own, so that a header from a rank that is ahead is not taken
#: for one of this session; the tags repeat only long after.
_NUM_SESSIONS = 500
#: Tag of messages with parameters.
_PARAMETERS = 500
#: Contents of a header: parameters follow, or nothing more in this session.
_MIX, _DONE = 0, 1


@dataclass(frozen=True)
class Role:
    """A learner's role in the bipartite graph of learners.

    Attributes:
        learner: its index.
        is_active: whether it starts exchanges; otherwise it answers them.
        partners: learners on the other side that it exchanges with; empty: it takes no part.
    """

    learner: int
    is_active: bool
    partners: tuple[int, ...]

    @staticmethod
    def of(learner: int, num_learners: int, kind: BipartiteKind) -> Role:
        """Return the role of `learner` among `num_learners`."""
        active = topology.is_active(learner)
        find = topology.passive_partners if active else topology.active_partners
        return Role(learner, active, find(learner, num_learners, kind))


class Gossip:
    """The exchanges of one learner: mixings x_i, x_j <- (x_i + x_j) / 2 with one partner after another.

    An active learner has a thread that makes one exchange per `request`, with a randomly drawn partner.  A
    request is skipped if an earlier one still waits, so training never waits.  A passive learner has a thread
    that answers any partner.  Both send at the same time.

    A session lasts from `start` to `stop`.  At its end, an active learner's thread tells all partners that it
    is done; a passive one's ends when all its partners have told it so.  Only passive learners wait for
    learners that still train, and they continue to answer meanwhile.  Messages between two ranks keep their
    order, so none is in flight afterwards.  An exchange with a lost learner is dropped on this side; that
    learner is not asked or waited for again.

    Args:
        peers: the channel.
        role: this learner's role; it may change between sessions.
        ranks: rank of each learner; for a group its first rank, which has access to the channel.
        effective: the parameters to mix.
        timeline: where exchanges are recorded.
    """

    def __init__(
        self,
        peers: PeerCommunicator,
        role: Role,
        ranks: Sequence[int],
        effective: EffectiveParameters,
        timeline: Timeline,
    ) -> None:
        self._peers, self._role, self._ranks = peers, role, ranks
        self._effective, self._timeline = effective, timeline
        self._changed = threading.Condition()
        self._requested = self._stopping = False
        self._session = 0
        self._thread: ExchangeThread | None = None
        #: Exchanges started so far; it determines the partner of the next one.
        self.num_begun = 0
        #: Requests skipped because an earlier one was waiting.
        self.num_skipped = 0

    def take_role(self, role: Role, ranks: Sequence[int]) -> None:
        """Change role and learners from the next session on."""
        self._role, self._ranks = role, ranks

    def start(self) -> None:
        """Start a session."""
        self._session = (self._session + 1) % _NUM_SESSIONS
        self._requested = self._stopping = False
        if self._role.partners:
            run = self._begin_exchanges if self._role.is_active else self._answer
            self._thread = ExchangeThread(f"gossip of learner {self._role.learner}", run)

    def request(self) -> None:
        """Request an exchange, if this learner starts any; raise the thread's error, if it failed."""
        if self._thread is None:
            return
        self._thread.check()
        if self._role.is_active:
            with self._changed:
                self.num_skipped += self._requested
                self._requested = True
                self._changed.notify()

    def stop(self) -> None:
        """End the session: make the exchange still requested, and wait for the thread to end."""
        if self._thread is not None:
            with self._changed:
                self._stopping = True
                self._changed.notify()
            self._thread.join()
            self._thread = None

    def next_partner(self) -> int | None:
        """Return the partner of the next exchange that this learner starts; None: all are lost."""
        partners = [
            learner for learner in self._role.partners if self._ranks[learner] not in self._peers.lost
        ]
        # A string seeds through a hash, so neighbouring learners and numbers give independent draws.
        chance = random.Random(f"{self._role.learner}/{self.num_begun}")
        return chance.choice(partners) if partners else None

    def _begin_exchanges(self) -> None:
        with self._effective.side(), _Sender(self._peers, self._effective) as sender:
            while self._await_request():
                partner = self.next_partner()
                if partner is not None:
                    self.num_begun += 1
                    with self._timeline.span(Span.COMM), contextlib.suppress(PeerLost):
                        self._mix(self._ranks[partner], sender)
            for learner in self._role.partners:
                with contextlib.suppress(PeerLost):
                    self._peers.send(torch.tensor([_DONE]), self._ranks[learner], tag=self._session)

    def _mix(self, other: int, sender: _Sender) -> None:
        self._peers.send(torch.tensor([_MIX]), other, tag=self._session)
        self._exchange(other, sender)

    def _await_request(self) -> bool:
        """Wait for a request; return False if there is none and the session ends."""
        with self._changed:
            while not self._requested and not self._stopping:
                self._changed.wait()
            wanted, self._requested = self._requested, False
            return wanted

    def _answer(self) -> None:
        training = {self._ranks[learner] for learner in self._role.partners}
        with self._effective.side(), _Sender(self._peers, self._effective) as sender:
            while training:
                try:
                    self._answer_next(training, sender)
                except PeerLost as loss:
                    training -= loss.ranks

    def _answer_next(self, training: set[int], sender: _Sender) -> None:
        header = torch.zeros(1, dtype=torch.int64)
        source = self._peers.recv(header, tag=self._session)
        if source in self._peers.lost:
            return  # sent before it was lost
        assert source in training, f"rank {source} is no partner, or was done"
        if header.item() == _DONE:
            training.remove(source)
        else:
            with self._timeline.span(Span.COMM):
                self._exchange(source, sender)

    def _exchange(self, other: int, sender: _Sender) -> None:
        sender.begin(self._effective.snapshot(), other)
        try:
            self._peers.recv(self._effective.incoming, other, tag=_PARAMETERS)
        except PeerLost:
            sender.finish()
            raise
        self._effective.correct()
        sender.finish()


class _Sender:
    """A thread that sends while the exchange's own thread receives.

    Both ranks send their parameters at the same time, which halves the time of an exchange over a network.
    If each sent before it received, they would wait for each other.
    """

    def __init__(self, peers: PeerCommunicator, effective: EffectiveParameters) -> None:
        self._peers, self._effective = peers, effective
        self._message: tuple[Tensor, int]

    def __enter__(self) -> _Sender:
        self._thread = JobThread(f"{threading.current_thread().name}, sending", self._send)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._thread.close()
        else:
            self._thread.dismiss()  # it may be sending a message that nobody will ever receive

    def begin(self, x: Tensor, dest: int) -> None:
        """Start sending `x`, which must not be changed before `finish`."""
        self._message = x, dest
        self._thread.start()

    def finish(self) -> None:
        """Wait until it is sent; raise the thread's error, if any."""
        self._thread.wait()

    def _send(self) -> None:
        x, dest = self._message
        # Only the receiving side handles the loss of the other rank: what it sent before still counts.
        with self._effective.side(), contextlib.suppress(PeerLost):
            self._peers.send(x, dest, tag=_PARAMETERS)
