"""Deal an epoch's batches to teams of ranks as they ask for them: how asynchronous ranks share the data.

A team (a rank, or a group of ranks that step together) gets its own batches first, so that it reads the
shards of its own part; then it helps the team that has most left.  Every batch is dealt exactly once,
whatever the teams' speeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from speechdp.data.plan.epoch_plan import EpochPlan

#: Batches a rank holds that it has not trained on yet: one read ahead, one in work.
BACKLOG = 2
#: Batches after which a team's pace is trusted.
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
        parts_of_team: the parts of the plan that each team has; a team's batch k is batch k of them all.
    """

    def __init__(self, plan: EpochPlan, parts_of_team: list[list[int]]) -> None:
        self._frames = [plan.frames[parts].sum(axis=0) for parts in parts_of_team]
        # Steps in which none of a team's parts has a frame are no batches.
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
        """Whether every team that is left has been told that there is nothing more for it in this epoch."""
        return len(self._done | self._lost) == len(self._batches)

    @property
    def any_done(self) -> bool:
        """Whether a team that is left has been told so."""
        return bool(self._done - self._lost)

    def lose(self, team: int, deals: list[Deal]) -> None:
        """Go on without `team`; deal to others what it leaves, `deals` of this epoch among it."""
        self._lost.add(team)
        self._returned += deals
        self.num_dealt -= len(deals)

    def take(self, team: int, now_s: float) -> Deal | None:
        """Return the next batch for `team`, or None if there is nothing more for it in this epoch.

        A team that was told so may ask again, as often as it likes: others may be lost.

        Args:
            team: who asks.
            now_s: the time, s; the pace of the teams decides who gets the last batches.
        """
        pace_s = self._pace_at(team, now_s)
        deal = self._next_deal(team, pace_s)
        if deal is None:
            # Nothing is noted of it: a team does not become faster by asking in vain.
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
        """Return the time that a batch takes a team which asks now, s; 0 before its second."""
        given_s = self._given_s[team]
        if given_s is None:
            return 0.0
        latest = now_s - given_s
        return 0.7 * self._pace_s[team] + 0.3 * latest if self._num_given[team] > 1 else latest

    def _would_come_last(self, team: int, pace_s: float) -> bool:
        """Say whether the others would be waiting for `team` if it took one of the last batches.

        A slow team that takes the last batch keeps all others waiting for the length of its step.
        """
        others = [t for t in range(len(self._batches)) if t != team and t not in self._done | self._lost]
        if self._num_given[team] < _PACED or any(self._num_given[t] <= _PACED for t in others) or not others:
            return False
        left = self.num_batches - self.num_dealt
        per_s = sum(1 / max(self._pace_s[t], 1e-9) for t in others)
        # All hold a backlog; what is left, the others would share.
        without_s = left / per_s + BACKLOG * max(self._pace_s[t] for t in others)
        return (1 + BACKLOG) * pace_s > without_s

    def state(self) -> dict[str, Any]:
        """Return what has been dealt, JSON-like."""
        state = {"next": list(self._next), "end": list(self._end), "dealt": self.num_dealt}
        return with_returned(state, self._returned)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same plan and teams."""
        self._next, self._end, self.num_dealt = list(state["next"]), list(state["end"]), state["dealt"]
        self._returned = [Deal(*deal) for deal in state.get("returned", [])]


def with_returned(state: dict[str, Any], deals: list[Deal]) -> dict[str, Any]:
    """Return a dealer's state in which `deals` are to be dealt again, besides what is already."""
    if not deals:
        return state
    returned = [[deal.owner, deal.index, deal.frames] for deal in deals]
    return {**state, "returned": [*state.get("returned", []), *returned]}
