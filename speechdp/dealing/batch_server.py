"""Rank 0's answers to the ranks of an asynchronous run that ask for work: batches and meetings.

A rank that has no more batches of an epoch meets the others before it gets a batch of the next epoch.  Every
rank is given a meeting at the same place between its batches, so all ranks agree on what came before it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from speechdp.data.plan.assignment import Meeting, MeetingKind
from speechdp.data.plan.epoch_plan import EpochPlan
from speechdp.dealing.epoch_batches import Deal, Dealer, with_returned
from speechdp.parallel.declared import Roster


@dataclass(frozen=True)
class DealingLimits:
    """The limits that decide when ranks meet.

    Attributes:
        epochs: epochs of the run.
        checkpoint_steps: steps between checkpoints, a step being a batch for every team; 0: epochs only.
        max_steps: steps of the run; 0: no limit.
        pause_at: step of the run after which all ranks stop as if asked to; 0: none.
    """

    epochs: int
    checkpoint_steps: int = 0
    max_steps: int = 0
    pause_at: int = 0


@dataclass
class _Where:
    """How far dealing has got."""

    epoch: int = 0
    batches: int = 0
    frames: int = 0


#: Most items that a rank may have been given without finishing them: the batch or meeting it works on, one
#: read ahead, and one that it has asked for meanwhile.
_IN_HAND = 3

Item = Deal | Meeting


@dataclass(frozen=True)
class BatchReply:
    """The answer to a rank that asks for work.

    Attributes:
        item: a batch or a meeting; None: ask again soon.
        epoch: epoch of the batch.
        frames: frames dealt so far in the run.
        num_dealt: batches dealt in this epoch.
        num_batches: batches of this epoch.
    """

    item: Item | None
    epoch: int = 0
    frames: int = 0
    num_dealt: int = 0
    num_batches: int = 1


class BatchServer:
    """Decides what each rank does next; lives on rank 0.  Thread-safe.

    Args:
        plan: returns the plan of an epoch.
        roster: which rank trains on which parts.
        limits: when ranks meet.
        state: state from a checkpoint to continue from.
    """

    def __init__(
        self,
        plan: Callable[[int], EpochPlan],
        roster: Roster,
        limits: DealingLimits,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._plan, self._limits = plan, limits
        self._parts = roster.parts_of_team
        self._seats = [roster.seat(rank) for rank in range(len(roster.part_of_rank))]
        self._members: list[list[int]] = [[] for _ in self._parts]
        for rank, seat in enumerate(self._seats):
            if seat is not None:
                self._members[seat[0]].append(rank)
        self._lock = threading.Lock()
        self._at = _Where()
        self._dealer: Dealer | None = None
        self._meetings: list[Meeting] = []
        # What each team has been given but not all its members have fetched yet.
        self._items: list[list[BatchReply]] = [[] for _ in self._parts]
        self._dropped = [0] * len(self._parts)
        self._met = [0] * len(self._parts)
        self._cursor = [0] * len(self._seats)
        self._lost: set[int] = set()
        self._in_hand: list[deque[BatchReply]] = [deque(maxlen=_IN_HAND) for _ in self._parts]
        if state:
            self._at = _Where(state["epoch"], state["batches"], state["frames"])
            if state["dealer"] is not None:
                self._open_epoch().load_state(state["dealer"])
                at = self._at.batches
                if self._is_pause(at) and not self._steps_done(at):  # the pause is reached: deal no batch
                    self._call(MeetingKind.STOP)

    def answer(self, rank: int, *, stop: bool) -> BatchReply:
        """Return what `rank` is to do next.

        Args:
            rank: the rank that asks.  It must not ask again after a STOP or END meeting.
            stop: this rank was asked to stop.
        """
        with self._lock:
            if stop:
                self._call(MeetingKind.STOP)
            seat = self._seats[rank]
            answer = self._next_meeting(rank) if seat is None else self._next_of_team(rank, seat[0])
            return answer or BatchReply(None)

    def lose(self, rank: int) -> bool:
        """Continue without `rank`, a team of its own; return False if it does not train or was lost before.

        The batches that it may not have trained on are dealt again, unless the dealing of their epoch has
        ended.
        """
        with self._lock:
            seat = self._seats[rank]
            if seat is None or seat[0] in self._lost:
                return False
            team = seat[0]
            self._lost.add(team)
            if self._dealer is not None:
                self._take_back(self._dealer, team)
            return True

    def _take_back(self, dealer: Dealer, team: int) -> None:
        """Deal again what `team` had in hand, also in a run that resumes from a meeting the team missed."""
        deals: list[Deal] = []
        missed = self._meetings[self._met[team] :]
        for answer in self._in_hand[team]:
            if isinstance(answer.item, Meeting):
                self._correct(answer.item, deals)
            elif answer.item is not None and answer.epoch == self._at.epoch:
                deals.append(answer.item)
        for meeting in missed:
            self._correct(meeting, deals)
        dealer.lose(team, deals)
        self._at.batches -= len(deals)
        self._at.frames -= sum(deal.frames for deal in deals)

    def _correct(self, meeting: Meeting, deals: list[Deal]) -> None:
        """Remove from a meeting's state the `deals` that were dealt before it but not trained on."""
        state = meeting.state
        if deals and state["epoch"] == self._at.epoch and state["dealer"] is not None:
            dealt = {**state["dealer"], "dealt": state["dealer"]["dealt"] - len(deals)}
            state["dealer"] = with_returned(dealt, deals)
            state["batches"] -= len(deals)
            state["frames"] -= sum(deal.frames for deal in deals)

    def _next_meeting(self, rank: int) -> BatchReply | None:
        if self._dealer is None:
            self._begin_epoch()
        if self._cursor[rank] == len(self._meetings):
            return None
        self._cursor[rank] += 1
        return BatchReply(self._meetings[self._cursor[rank] - 1])

    def _next_of_team(self, rank: int, team: int) -> BatchReply | None:
        items = self._items[team]
        place = self._cursor[rank] - self._dropped[team]
        if place == len(items):
            item = self._new_item(team)
            if item is None:
                return None
            items.append(item)
            self._in_hand[team].append(item)
        self._cursor[rank] += 1
        result = items[place]
        fetched = min(self._cursor[r] for r in self._members[team]) - self._dropped[team]
        del items[:fetched]
        self._dropped[team] += fetched
        return result

    def _new_item(self, team: int) -> BatchReply | None:
        if self._met[team] < len(self._meetings):
            self._met[team] += 1
            return BatchReply(self._meetings[self._met[team] - 1])
        if self._dealer is None and not self._begin_epoch():
            return self._new_item(team)
        dealer = self._open_epoch()
        deal = dealer.take(team, time.monotonic())
        if deal is None:
            if dealer.all_done:
                self._end_epoch()
                return self._new_item(team)
            return None
        self._at.batches += 1
        self._at.frames += deal.frames
        self._call_after(self._at.batches)
        return BatchReply(deal, self._at.epoch, self._at.frames, dealer.num_dealt, dealer.num_batches)

    def _begin_epoch(self) -> bool:
        """Open the next epoch if there is one; return whether there is."""
        if self._meetings and self._meetings[-1].kind in {MeetingKind.STOP, MeetingKind.END}:
            return False
        if self._at.epoch >= self._limits.epochs or self._steps_done(self._at.batches):
            self._call(MeetingKind.END)
            return False
        if self._is_pause(self._at.batches):
            self._call(MeetingKind.STOP)
            return False
        self._open_epoch()
        return True

    def _open_epoch(self) -> Dealer:
        if self._dealer is None:
            self._dealer = Dealer(self._plan(self._at.epoch), self._parts)
            for team in self._lost:
                self._dealer.lose(team, [])
        return self._dealer

    def _end_epoch(self) -> None:
        self._at.epoch += 1
        self._dealer = None
        self._call(MeetingKind.EPOCH)

    def _call_after(self, batches: int) -> None:
        between = self._limits.checkpoint_steps * len(self._parts)
        if self._steps_done(batches):
            self._call(MeetingKind.END)
        elif self._is_pause(batches):
            self._call(MeetingKind.STOP)
        elif between and batches % between == 0:
            self._call(MeetingKind.CHECKPOINT)

    def _steps_done(self, batches: int) -> bool:
        return 0 < self._limits.max_steps * len(self._parts) <= batches

    def _is_pause(self, batches: int) -> bool:
        return 0 < self._limits.pause_at * len(self._parts) <= batches

    def _call(self, kind: MeetingKind) -> None:
        """Call a meeting, unless the last one has been called or teams have begun to leave the epoch.

        END does not wait for the epoch to end: the batches until then would exceed --max-steps.
        """
        if self._meetings and self._meetings[-1].kind in {MeetingKind.STOP, MeetingKind.END}:
            return
        if kind is not MeetingKind.END and self._dealer is not None and self._dealer.any_done:
            return  # those teams would meet at a different place between their batches; the epoch ends soon
        dealer = None if self._dealer is None else self._dealer.state()
        state = {**vars(self._at), "dealer": dealer}
        step = -(-self._at.batches // len(self._parts))
        self._meetings.append(Meeting(kind, self._at.epoch, step, self._at.frames, state))
