"""Deal an epoch's batches to teams of ranks as they ask for them, so that asynchronous ranks share the data.

A team (a rank, or a group of ranks that step together) first gets the batches of its own part, so that it
reads that part's shards.  Then it helps the team that has the most batches left.  Every batch is dealt
exactly once, whatever the teams' speeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from speechdp.data.plan.epoch_plan import EpochPlan

#: Batches that a rank holds but has not finished: one read ahead, one being trained on.
BACKLOG = 2
#: Batches after which the measured pace of a team is trusted.
_PACED = 3


@dataclass(frozen=True)
class Deal:
    """Batch `index` of the part of team `owner`, and the frames of all its members' batches."""

    owner: int
    index: int
    frames: int


class Dealer:
    """One epoch's batches.

    Args:
        plan: the epoch's plan.
        parts_of_team: each team's parts of the plan; a team's batch k consists of batch k of all its parts.
    """

    def __init__(self, plan: EpochPlan, parts_of_team: list[list[int]]) -> None:
        self._frames = [plan.frames[parts].sum(axis=0) for parts in parts_of_team]
        # A step in which none of a team's parts has a frame is not a batch.
        self._batches = [np.flatnonzero(frames) for frames in self._frames]
        self.num_batches = sum(len(batches) for batches in self._batches)
        self.num_dealt = 0
        self._next = [0] * len(parts_of_team)
        self._end = [len(batches) for batches in self._batches]
        self._given_s: list[float | None] = [None] * len(parts_of_team)
        self._pace_s: list[float] = [0.0] * len(parts_of_team)
        self._num_given = [0] * len(parts_of_team)
        self._done: set[int] = set()
        self._lost: set[int] = set()
        self._returned: list[Deal] = []

    @property
    def all_done(self) -> bool:
        """Whether every team that is not lost has been told that it gets no more batches in this epoch."""
        return len(self._done | self._lost) == len(self._batches)

    @property
    def any_done(self) -> bool:
        """Whether any team that is not lost has been told so."""
        return bool(self._done - self._lost)

    def lose(self, team: int, deals: list[Deal]) -> None:
        """Continue without `team`; deal to others its remaining batches and `deals`, which it had in hand."""
        self._lost.add(team)
        self._returned += deals
        self.num_dealt -= len(deals)

    def take(self, team: int, now_s: float) -> Deal | None:
        """Return the next batch for `team`, or None if it gets no more in this epoch.

        A team that got None may ask again at any time: another team may have been lost since.

        Args:
            team: the team that asks.
            now_s: the current time, s; the teams' paces decide who gets the last batches.
        """
        pace_s = self._pace_at(team, now_s)
        deal = self._next_deal(team, pace_s)
        if deal is None:
            # Record nothing here: asking in vain does not make a team faster.
            self._done.add(team)
            return None
        self._pace_s[team], self._given_s[team] = pace_s, now_s
        self._num_given[team] += 1
        self._done.discard(team)
        self.num_dealt += 1
        return deal

    def _next_deal(self, team: int, pace_s: float) -> Deal | None:
        if self._returned:
            return self._returned.pop(0)
        owner = self._owner(team)
        if owner is None or self._would_come_last(team, pace_s):
            return None
        if owner == team:
            place = self._next[team]
            self._next[team] += 1
        else:
            self._end[owner] -= 1
            place = self._end[owner]
        index = int(self._batches[owner][place])
        return Deal(owner, index, int(self._frames[owner][index]))

    def _owner(self, team: int) -> int | None:
        left = [end - start for start, end in zip(self._next, self._end, strict=True)]
        if left[team]:
            return team
        richest = max(range(len(left)), key=left.__getitem__)
        return richest if left[richest] else None

    def _pace_at(self, team: int, now_s: float) -> float:
        """Return the time per batch of a team that asks now, s; 0 before its second request."""
        given_s = self._given_s[team]
        if given_s is None:
            return 0.0
        latest = now_s - given_s
        return 0.7 * self._pace_s[team] + 0.3 * latest if self._num_given[team] > 1 else latest

    def _would_come_last(self, team: int, pace_s: float) -> bool:
        """Return whether the others would wait for `team` if it took one of the last batches.

        If a slow team takes the last batch, all others wait for the length of its step.
        """
        others = [t for t in range(len(self._batches)) if t != team and t not in self._done | self._lost]
        if self._num_given[team] < _PACED or any(self._num_given[t] <= _PACED for t in others) or not others:
            return False
        left = self.num_batches - self.num_dealt
        per_s = sum(1 / max(self._pace_s[t], 1e-9) for t in others)
        # Every team holds a backlog; the others would share the batches that are left.
        without_s = left / per_s + BACKLOG * max(self._pace_s[t] for t in others)
        return (1 + BACKLOG) * pace_s > without_s

    def state(self) -> dict[str, Any]:
        """Return what has been dealt, JSON-like."""
        state = {"next": list(self._next), "end": list(self._end), "dealt": self.num_dealt}
        return with_returned(state, self._returned)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same plan and teams."""
        self._next, self._end, self.num_dealt = list(state["next"]), list(state["end"]), state["dealt"]
        self._returned = [Deal(*deal) for deal in state.get("returned", [])]


def with_returned(state: dict[str, Any], deals: list[Deal]) -> dict[str, Any]:
    """Return a dealer's state with `deals` added to the batches that must be dealt again."""
    if not deals:
        return state
    returned = [[deal.owner, deal.index, deal.frames] for deal in deals]
    return {**state, "returned": [*state.get("returned", []), *returned]}
