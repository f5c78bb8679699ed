"""Dealing batches to ranks of different speed: all of them once, meetings in one order, little waiting."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.plan.assignment import Assignment, Meeting, MeetingKind
from speechdp.data.plan.epoch_plan import CorpusIndex, EpochPlan, PlanOptions, plan_epoch
from speechdp.dealing.batch_client import Dealing
from speechdp.dealing.batch_server import BatchServer, DealingLimits
from speechdp.dealing.epoch_batches import BACKLOG, Deal, Dealer
from speechdp.parallel.declared import Roster
from tests.helpers.waiting import no_thread_left

EPOCHS = 2


def planner(parts: int, utterances: int = 57) -> Callable[[int], EpochPlan]:
    lengths = np.random.default_rng(3).integers(5, 30, size=utterances)
    index = CorpusIndex.of_lengths([lengths])
    return lambda epoch: plan_epoch(index, PlanOptions(4, seed=1), epoch, parts)


def roster(size: int, group: int = 1) -> Roster:
    return Roster(list(range(size)), [rank // group for rank in range(size)])


@dataclass
class Log:
    """What a rank was told, in order."""

    items: list[Any]

    @property
    def batches(self) -> list[tuple[int, int, int]]:
        return [item for item in self.items if isinstance(item, tuple)]

    @property
    def meetings(self) -> list[tuple[MeetingKind, int, int, int]]:
        return [(m.kind, m.epoch, m.step, m.frames) for m in self.items if isinstance(m, Meeting)]


def play(server: BatchServer, size: int, order: list[int], stop_after: int | None = None) -> list[Log]:
    """Let ranks ask in the order of `order`, again and again, until all have been told that it is over."""
    logs = [Log([]) for _ in range(size)]
    going = set(range(size))
    asked = 0
    while going:
        for rank in order:
            if rank not in going:
                continue
            asked += 1
            assert asked < 10_000, "ranks are kept waiting for ever"
            answer = server.answer(rank, stop=stop_after is not None and asked > stop_after)
            if isinstance(answer.item, Deal):
                logs[rank].items.append((answer.epoch, answer.item.owner, answer.item.index))
            elif isinstance(answer.item, Meeting):
                logs[rank].items.append(answer.item)
                if answer.item.kind in {MeetingKind.STOP, MeetingKind.END}:
                    going.discard(rank)
    return logs


orders = st.integers(1, 5).flatmap(
    lambda size: st.lists(st.integers(0, size - 1), min_size=size, max_size=12).map(
        lambda extra: [*range(size), *extra]
    )
)


@settings(deadline=None, max_examples=60)
@given(orders, st.integers(0, 3))
def test_every_batch_is_dealt_once_and_meetings_come_in_one_order(order: list[int], every: int) -> None:
    size = max(order) + 1
    plan = planner(size)
    logs = play(BatchServer(plan, roster(size), DealingLimits(EPOCHS, checkpoint_steps=every)), size, order)
    dealt = Counter(batch for log in logs for batch in log.batches)
    expected = {
        (epoch, rank, int(index))
        for epoch in range(EPOCHS)
        for rank in range(size)
        for index in np.flatnonzero(plan(epoch).frames[rank])
    }
    assert set(dealt) == expected and set(dealt.values()) == {1}
    assert all(log.meetings == logs[0].meetings for log in logs)
    kinds = [kind for kind, *_ in logs[0].meetings]
    assert kinds.count(MeetingKind.EPOCH) == EPOCHS and kinds[-1] is MeetingKind.END
    assert (MeetingKind.CHECKPOINT in kinds) == (every > 0)
    # What was trained on before a meeting is what the meeting says.
    for place, (_, _, step, frames) in enumerate(logs[0].meetings):
        before = [b for log in logs for b in batches_before(log, place)]
        assert sum(int(plan(e).frames[r, i]) for e, r, i in before) == frames
        assert -(-len(before) // size) == step


def batches_before(log: Log, meeting: int) -> list[tuple[int, int, int]]:
    places = [i for i, item in enumerate(log.items) if isinstance(item, Meeting)]
    return [item for item in log.items[: places[meeting]] if isinstance(item, tuple)]


@settings(deadline=None, max_examples=60)
@given(orders, st.integers(1, 60))
def test_a_stopped_run_goes_on_with_exactly_what_was_not_dealt(order: list[int], stop_after: int) -> None:
    size = max(order) + 1
    plan = planner(size)
    first = play(BatchServer(plan, roster(size), DealingLimits(EPOCHS)), size, order, stop_after)
    last = [item for item in first[0].items if isinstance(item, Meeting)][-1]
    batches = [batch for log in first for batch in log.batches]
    if last.kind is MeetingKind.STOP:
        second = play(BatchServer(plan, roster(size), DealingLimits(EPOCHS), last.state), size, order)
        batches += [batch for log in second for batch in log.batches]
    assert len(batches) == len(set(batches)) == sum(int((plan(e).frames > 0).sum()) for e in range(EPOCHS))


def test_members_of_a_team_get_the_same_batches_and_a_server_only_meetings() -> None:
    plan = planner(4)
    logs = play(BatchServer(plan, roster(4, group=2), DealingLimits(1)), 4, [0, 2, 2, 1, 3, 0, 2])
    assert logs[0].items == logs[1].items and logs[2].items == logs[3].items
    assert set(logs[0].batches).isdisjoint(logs[2].batches)
    serving = Roster([None, 0, 1], [0, 1, 2])
    logs = play(BatchServer(planner(2), serving, DealingLimits(1)), 3, [0, 1, 2])
    assert logs[0].batches == [] and logs[0].meetings == logs[1].meetings == logs[2].meetings


def test_max_steps_end_the_run() -> None:
    logs = play(BatchServer(planner(2), roster(2), DealingLimits(EPOCHS, max_steps=3)), 2, [0, 1])
    assert sum(len(log.batches) for log in logs) == 6
    assert [kind for kind, *_ in logs[0].meetings] == [MeetingKind.END]


def test_max_steps_end_the_run_where_a_slow_rank_has_left_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dealer, "_would_come_last", lambda self, team, pace_s: team == 1)
    logs = play(BatchServer(planner(2), roster(2), DealingLimits(EPOCHS, max_steps=3)), 2, [0, 1])
    assert [len(log.batches) for log in logs] == [6, 0]
    assert [kind for log in logs for kind, *_ in log.meetings] == [MeetingKind.END] * 2


def test_a_paused_run_stops_after_its_steps_and_goes_on_with_the_rest() -> None:
    plan = planner(2)
    first = play(BatchServer(plan, roster(2), DealingLimits(EPOCHS, pause_at=3)), 2, [0, 1])
    assert sum(len(log.batches) for log in first) == 6
    last = [item for item in first[0].items if isinstance(item, Meeting)][-1]
    assert (last.kind, last.step) == (MeetingKind.STOP, 3)
    at_once = play(BatchServer(plan, roster(2), DealingLimits(EPOCHS, pause_at=3), last.state), 2, [0, 1])
    assert [log.batches for log in at_once] == [[], []]
    assert at_once[0].meetings == at_once[1].meetings == [(MeetingKind.STOP, last.epoch, 3, last.frames)]
    rest = play(BatchServer(plan, roster(2), DealingLimits(EPOCHS), last.state), 2, [0, 1])
    batches = [batch for log in (*first, *rest) for batch in log.batches]
    assert len(batches) == len(set(batches)) == sum(int((plan(e).frames > 0).sum()) for e in range(EPOCHS))


@pytest.mark.parametrize("slowness", [2, 5])
def test_a_slow_rank_gets_less_and_keeps_nobody_waiting_for_long(slowness: int) -> None:
    """Simulate a rank that is slower: the epoch lasts hardly longer than the sum of the speeds allows."""
    plan = planner(3, utterances=1200)(0)
    dealer = Dealer(plan, [[0], [1], [2]])
    step_s = [1.0, 1.0, float(slowness)]
    # A rank holds a backlog; it asks for more whenever it has done a batch.
    asks = [(0.0, team) for team in range(3)] * BACKLOG
    heapq.heapify(asks)
    ends = [0.0] * 3
    counts = [0] * 3
    while asks:
        now, team = heapq.heappop(asks)
        if dealer.take(team, now) is None:
            continue
        counts[team] += 1
        ends[team] = max(ends[team], now) + step_s[team]
        heapq.heappush(asks, (ends[team], team))
    ideal = dealer.num_batches / sum(1 / s for s in step_s)
    assert sum(counts) == dealer.num_batches
    assert counts[2] == pytest.approx(counts[0] / slowness, rel=0.2)
    assert max(ends) <= ideal + 1.5 * slowness, (max(ends), ideal)


@pytest.mark.parametrize("slowness", [3, 10])
def test_a_slow_rank_does_not_get_the_last_batch_by_asking_again(slowness: int) -> None:
    """A rank that was given nothing asks every 2 ms: it must not end after the others for that."""
    plan = planner(3, utterances=1200)(0)
    dealer = Dealer(plan, [[0], [1], [2]])
    step_s = [0.1, 0.1, 0.1 * slowness]
    asks = [(0.0, team) for team in range(3)] * BACKLOG
    heapq.heapify(asks)
    ends = [0.0] * 3
    num_refused = [0] * 3
    while not dealer.all_done:
        now, team = heapq.heappop(asks)
        if dealer.take(team, now) is None:
            num_refused[team] += 1
            heapq.heappush(asks, (now + 0.002, team))
        else:
            ends[team] = max(ends[team], now) + step_s[team]
            heapq.heappush(asks, (ends[team], team))
    assert dealer.num_dealt == dealer.num_batches
    assert num_refused[2] > 10, "the end of the epoch was not come to"
    assert ends[2] <= max(ends[:2]) + 0.1, ends


@pytest.mark.parametrize("size", [1, 2, 4])
def test_over_a_channel_all_ranks_get_what_the_server_deals(size: int) -> None:
    plan = planner(size)

    def work(comm: Communicator) -> list[Assignment]:
        limits = DealingLimits(EPOCHS, checkpoint_steps=2)
        server = BatchServer(plan, roster(size), limits) if comm.rank == 0 else None
        dealing = Dealing(comm.peers(), roster(size), plan, server, lambda: False)
        assignments = list(dealing.assignments())
        dealing.close()
        return assignments

    with no_thread_left():
        ranks = run_threads(size, work)
    frames = sum(int(a.segments.num_frames.sum()) for rank in ranks for a in rank)
    assert frames == sum(int(plan(epoch).frames.sum()) for epoch in range(EPOCHS))
    meetings = [[a.meeting.kind for a in rank if a.meeting is not None] for rank in ranks]
    assert all(kinds == meetings[0] for kinds in meetings) and meetings[0][-1] is MeetingKind.END
