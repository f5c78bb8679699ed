"""Plans that are there before they are asked for."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from speechdp.data.plan.epoch_plan import CorpusIndex, EpochPlan, PlanOptions, plan_epoch
from speechdp.data.plan.planner import Planner
from tests.helpers.waiting import no_thread_left

INDEX = CorpusIndex.of_lengths([np.arange(1, 30)])


def make(epoch: int) -> EpochPlan:
    return plan_epoch(INDEX, PlanOptions(3), epoch, 2)


def test_the_next_plan_is_made_before_it_is_asked_for_and_each_only_once() -> None:
    made: list[int] = []
    second = threading.Event()

    def note(epoch: int) -> EpochPlan:
        made.append(epoch)
        if epoch == 1:
            second.set()
        return make(epoch)

    with closing(Planner(note, 3)) as planner:
        first = planner(0)
        assert second.wait(300)
        for epoch in (0, 0, 1, 1, 2, 2):
            np.testing.assert_array_equal(planner(epoch).frames, make(epoch).frames)
        assert planner(2) is planner(2)
        np.testing.assert_array_equal(first.frames, make(0).frames)
    assert made == [0, 1, 2]


def test_an_epoch_beyond_the_last_is_made_only_if_asked_for() -> None:
    made: list[int] = []

    def note(epoch: int) -> EpochPlan:
        made.append(epoch)
        return make(epoch)

    with closing(Planner(note, 1)) as planner:
        planner(0)
        planner(4)
    assert made == [0, 4]


def test_errors_are_raised_where_the_plan_is_asked_for_and_no_thread_is_left() -> None:
    def fail(epoch: int) -> Any:
        raise MemoryError("no room for a plan")

    with no_thread_left():
        with closing(Planner(fail, 2)) as planner, pytest.raises(MemoryError, match="no room"):
            planner(0)
        planner.close()
