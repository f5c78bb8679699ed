"""Who keeps the others waiting: judged from statuses alone."""

from __future__ import annotations

import dataclasses

import pytest

from speechdp.watchdog.late_ranks import Sighting, Standpoint, describe_late
from speechdp.watchdog.status import RankStatus
from tests.helpers.statuses import status

#: Looked since 20 s by the looking rank's clock, judged at 60 s; it was last seen to change at 59 s.
BEGUN_S, SEEN_S, NOW_S = 20.0, 59.0, 60.0
TOGETHER = Standpoint(NOW_S, silence_s=18.0, still_s=30.0)
APART = dataclasses.replace(TOGETHER, synchronous=False)


def seen(last: RankStatus, at_s: float = SEEN_S) -> Sighting:
    """Return what was seen of a rank whose status changed last at `at_s`."""
    sighting = Sighting(f"rank {last.rank}", BEGUN_S)
    sighting.note(dataclasses.replace(last, written="before"), BEGUN_S)
    if at_s > BEGUN_S:
        sighting.note(last, at_s)
    return sighting


def test_a_rank_that_waits_for_data() -> None:
    others = [seen(status(1)), seen(status(2, "data_wait"))]
    assert describe_late(status(0), others, TOGETHER) == "rank 2 on n3 (in data_wait for 60 s)"


def test_the_rank_itself() -> None:
    own = status(0, "data_wait", still_s=60)
    assert describe_late(own, [seen(status(1))], TOGETHER) == "rank 0 on n1 (in data_wait for 60 s)"


def test_a_frozen_rank_whatever_it_was_doing() -> None:
    for doing in ("comm", "forward"):
        others = [seen(status(1)), seen(status(2, doing), BEGUN_S)]
        assert describe_late(status(0), others, TOGETHER) == "rank 2 on n3 (no sign of life for 40 s)"


def test_a_rank_that_was_killed_before_it_wrote_anything() -> None:
    others = [seen(status(1)), Sighting("rank 2 on n3", BEGUN_S)]
    assert describe_late(status(0), others, TOGETHER) == "rank 2 on n3 (no sign of life for 40 s)"


def test_several_at_once() -> None:
    others = [seen(status(1), BEGUN_S), seen(status(2, "data_wait")), seen(status(3, "eval"))]
    assert describe_late(status(0), others, TOGETHER) == (
        "rank 2 on n3 (in data_wait for 60 s), rank 3 on n4 (in eval for 60 s), "
        "rank 1 on n2 (no sign of life for 40 s)"
    )


@pytest.mark.parametrize("at", [TOGETHER, APART])
def test_all_wait_for_one_another(at: Standpoint) -> None:
    assert describe_late(status(0), [seen(status(1))], at) == "nobody, all ranks wait for one another"


def test_with_periodic_exchange_the_rank_with_fewest_steps_is_late() -> None:
    """Others may have gone on to the exchange; rank 2 also stands still, but was not what they wait for."""
    others = [seen(status(1, "data_wait", step=9)), seen(status(2, "data_wait", step=16))]
    assert describe_late(status(0, step=16), others, TOGETHER) == "rank 1 on n2 (in data_wait for 60 s)"


def test_a_rank_behind_that_waits_as_well() -> None:
    others = [seen(status(1, step=11))]
    assert describe_late(status(0), others, TOGETHER) == "rank 1 on n2 (in comm for 60 s)"
    waits_for_a_silent_one = [*others, seen(status(2), BEGUN_S)]
    expected = "rank 2 on n3 (no sign of life for 40 s)"
    assert describe_late(status(0), waits_for_a_silent_one, TOGETHER) == expected


def test_asynchronous_ranks_have_different_numbers_of_steps() -> None:
    """Only those are late that stand still; few steps are no sign of it."""
    others = [
        seen(status(1, "forward", step=3, still_s=0.2)),
        seen(status(2, "h2d", step=40)),
        seen(status(3, step=20)),
    ]
    assert describe_late(status(0, step=30), others, APART) == "rank 2 on n3 (in h2d for 60 s)"


def test_who_waits_elsewhere_than_in_an_exchange() -> None:
    waiting = dataclasses.replace(status(1, "eval", step=11), waits=True)
    expected = "rank 1 on n2 (in eval, waiting for other ranks, for 60 s)"
    assert describe_late(status(0), [seen(waiting)], TOGETHER) == expected


def test_a_long_list_is_cut() -> None:
    others = [seen(status(rank, "data_wait")) for rank in range(1, 12)]
    text = describe_late(status(0), others, TOGETHER)
    assert text.count("data_wait") == 8 and text.endswith(" and 3 more")


def test_a_sighting_knows_when_the_other_has_moved() -> None:
    sighting = Sighting("rank 1", 0.0)
    sighting.note(None, 1.0)
    sighting.note(status(1, step=5), 2.0)
    assert (sighting.moved_s, sighting.silent_s(3.0)) == (None, 3.0)  # may have been written long before
    sighting.note(status(1, step=5, still_s=60.0), 4.0)
    assert (sighting.moved_s, sighting.silent_s(5.0)) == (None, 1.0)
    sighting.note(status(1, step=6), 6.0)
    sighting.note(None, 7.0)
    assert (sighting.moved_s, sighting.silent_s(8.0)) == (6.0, 2.0)
