"""Pairwise exchanges of parameters overlapped with training: who starts, who answers, how they end."""

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

#: Tags of headers, one a session, so that a rank which is ahead cannot be taken for one of this session; they
#: come round again long after.
_NUM_SESSIONS = 500
#: Tag of parameters.
_PARAMETERS = 500
#: What a header says: parameters follow, or nothing more in this session.
_MIX, _DONE = 0, 1


@dataclass(frozen=True)
class Role:
    """A learner's part in the bipartite graph of learners.

    Attributes:
        learner: its number.
        is_active: it begins exchanges; else it answers.
        partners: learners on the other side with which it exchanges; none: it has no part.
    """

    learner: int
    is_active: bool
    partners: tuple[int, ...]

    @staticmethod
    def of(learner: int, num_learners: int, kind: BipartiteKind) -> Role:
        """Return the part of `learner` among `num_learners`."""
        active = topology.is_active(learner)
        find = topology.passive_partners if active else topology.active_partners
        return Role(learner, active, find(learner, num_learners, kind))


class Gossip:
    """The exchanges of one learner: mixings x_i, x_j <- (x_i + x_j) / 2 with one partner after the other.

    An active learner has a thread that makes one exchange for each `request`, with a partner drawn at
    random; requests that come while one already waits are skipped, so training never waits.  A passive one
    has a thread that answers whoever comes.  Both send at the same time.

    A session lasts from `start` to `stop`.  An active learner's thread ends by telling all its partners; a
    passive one's ends when all its partners have told it.  Nobody waits for a learner that still trains but
    passive ones, and these go on answering meanwhile; since messages of a pair keep their order, none is
    under way afterwards.  An exchange with a learner that is gone is none, on this side; it is not asked or
    waited for again.

    Args:
        peers: the channel.
        role: this learner's part; may be another one in the next session.
        ranks: rank of each learner; of a group the first one, which holds the channel's end.
        effective: what is mixed.
        timeline: exchanges are recorded there.
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
        #: Exchanges begun so far; the partner of the next one follows from it.
        self.num_begun = 0
        #: Requests that came while another one waited.
        self.num_skipped = 0

    def take_role(self, role: Role, ranks: Sequence[int]) -> None:
        """Have another part from the next session on, among other learners."""
        self._role, self._ranks = role, ranks

    def start(self) -> None:
        """Begin a session."""
        self._session = (self._session + 1) % _NUM_SESSIONS
        self._requested = self._stopping = False
        if self._role.partners:
            run = self._begin_exchanges if self._role.is_active else self._answer
            self._thread = ExchangeThread(f"gossip of learner {self._role.learner}", run)

    def request(self) -> None:
        """Ask for an exchange, if this learner begins any; raise what the thread has failed with."""
        if self._thread is None:
            return
        self._thread.check()
        if self._role.is_active:
            with self._changed:
                self.num_skipped += self._requested
                self._requested = True
                self._changed.notify()

    def stop(self) -> None:
        """End the session: make the exchange that is still asked for and wait for the thread's end."""
        if self._thread is not None:
            with self._changed:
                self._stopping = True
                self._changed.notify()
            self._thread.join()
            self._thread = None

    def next_partner(self) -> int | None:
        """Return the partner of the next exchange that this learner begins; None: all are gone."""
        partners = [
            learner for learner in self._role.partners if self._ranks[learner] not in self._peers.lost
        ]
        # A string is hashed whole: neighbouring learners and numbers have nothing to do with one another.
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
        """Wait for a request; return False when there is none and the session ends."""
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
            return  # what it had sent before
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

    Both ranks send their parameters at the same time, which halves an exchange over a network and which two
    threads that each send first could not do: each would wait for the other to receive.
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
            self._thread.dismiss()  # it may be in a message that nobody will ever take

    def begin(self, x: Tensor, dest: int) -> None:
        """Start sending `x`, which must not be changed before `finish`."""
        self._message = x, dest
        self._thread.start()

    def finish(self) -> None:
        """Wait until it is sent; raise what went wrong."""
        self._thread.wait()

    def _send(self) -> None:
        x, dest = self._message
        # Whether the other one is gone concerns the side that receives: what has come from it counts.
        with self._effective.side(), contextlib.suppress(PeerLost):
            self._peers.send(x, dest, tag=_PARAMETERS)
