"""The orders of segments: sorted where they say so, cut and evened out as they say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechdp.data.plan.epoch_plan import CorpusIndex, EpochPlan, Order, plan_epoch
from speechdp.data.plan.orders import (
    GROUP_BATCHES,
    ORDERS,
    POOL_BATCHES,
    PlanOptions,
    arrange,
    costs_of,
    cut,
    even_out,
    steps_of,
)
from speechdp.data.plan.segments import IntArray

Lengths = npt.NDArray[np.int64]
some_lengths = st.lists(st.integers(1, 50), min_size=1, max_size=80).map(
    lambda n: np.array(n, dtype=np.int64)
)


def generator(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def one_rank(num_utterances: int, order: Order, batch_size: int = 4) -> EpochPlan:
    lengths = generator().integers(10, 2000, size=num_utterances)
    return plan_epoch(CorpusIndex.of_lengths([lengths]), PlanOptions(batch_size, order=order), 0, 1)


@given(
    some_lengths,
    st.sampled_from(ORDERS),
    st.integers(1, 3),
    st.sampled_from([0, 60]),
    st.sampled_from([1, 1000]),
)
def test_every_order_is_a_permutation(
    lengths: Lengths, order: Order, batch_size: int, batch_frames: int, times: int
) -> None:
    options = PlanOptions(batch_size, order=order, batch_frames=batch_frames)
    # A thousand times as long: lengths that do not fit in 16 bits.
    places = arrange(lengths * times, options, generator())
    assert sorted(places.tolist()) == list(range(len(lengths)))


def test_shuffled_segments_come_in_no_order() -> None:
    lengths = np.arange(1000)
    options = PlanOptions(4, order="shuffled")
    places = arrange(lengths, options, generator())
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.1


def blocks(lengths: Lengths, num: int) -> list[Lengths]:
    return [lengths[i : i + num] for i in range(0, len(lengths), num)]


def test_laplace_sorts_bins_up_and_down_in_turn_and_keeps_that_order() -> None:
    plan = one_rank(500, "laplace")
    num = 4 * POOL_BATCHES
    bins = blocks(plan.ranks[0].segments.num_frames, num)
    assert len(bins) == 8
    for number, lengths in enumerate(bins):
        assert lengths.tolist() == sorted(lengths.tolist(), reverse=number % 2 == 1)
    # Neighbours match across the ends of bins, and bins are of all lengths.
    jumps = [abs(int(one[-1]) - int(other[0])) for one, other in pairwise(bins)]
    assert max(jumps) < 400
    assert all(lengths.max() - lengths.min() > 1200 for lengths in bins)


@pytest.mark.parametrize("num_utterances", [640, 611])
def test_blocking_sort_sorts_groups_and_shuffles_batches_inside(num_utterances: int) -> None:
    plan = one_rank(num_utterances, "blocking-sort")
    for start in range(0, plan.num_steps, GROUP_BATCHES):
        steps = plan.group(start)
        assert steps == plan.group(steps[-1]) == range(start, min(start + GROUP_BATCHES, plan.num_steps))
        batches = [plan.ranks[0].batch(step).num_frames.tolist() for step in steps]
        in_order = sorted(batches, key=lambda batch: (batch[0], batch[-1]))
        assert batches != in_order
        # Put in order again, the group is one sorted list; as if cut from it after sorting.
        lengths = [length for batch in in_order for length in batch]
        assert lengths == sorted(lengths)
        assert lengths[-1] - lengths[0] > 1500


def test_pools_are_sorted_before_their_batches_are_shuffled() -> None:
    lengths = generator().permutation(1000)
    options = PlanOptions(4, order="pooled")
    arranged = lengths[arrange(lengths, options, generator())]
    assert all(pool.tolist() == sorted(pool.tolist()) for pool in blocks(arranged, 4 * POOL_BATCHES))
    longest = [int(plan.max()) for plan in batches_of(one_rank(1000, "pooled"))]
    pieces = [longest[i : i + POOL_BATCHES] for i in range(0, len(longest), POOL_BATCHES)]
    assert all(piece != sorted(piece) for piece in pieces[:-1])


def batches_of(plan: EpochPlan) -> list[IntArray]:
    return [plan.ranks[0].batch(step).num_frames for step in range(plan.num_steps)]


@given(some_lengths, st.sampled_from(ORDERS), st.integers(1, 300))
def test_batches_by_frames_take_all_that_fits(lengths: Lengths, order: Order, batch_frames: int) -> None:
    options = PlanOptions(0, order=order, batch_frames=batch_frames)
    arranged = lengths[arrange(lengths, options, generator())]
    bounds = cut(arranged, options)
    assert bounds[0] == 0 and bounds[-1] == len(lengths) and (np.diff(bounds) > 0).all()
    costs = costs_of(arranged, bounds)
    assert costs.frames.sum() == lengths.sum()
    assert (costs.padded[np.diff(bounds) > 1] <= batch_frames).all()
    if order == "blocking-sort":
        return  # the last batch of a group may be small
    for start, end in pairwise(bounds[:-1]):
        one_more = arranged[start : end + 1]
        assert len(one_more) * one_more.max() > batch_frames


def test_batches_of_a_group_are_not_cut_across_its_end() -> None:
    lengths = np.tile(np.arange(1, 101), 40)
    options = PlanOptions(0, order="blocking-sort", batch_frames=500)
    arranged = lengths[arrange(lengths, options, generator())]
    bounds = cut(arranged, options)
    assert all((np.diff(arranged[a:b]) >= 0).all() for a, b in pairwise(bounds))


@given(some_lengths, st.integers(1, 300), st.integers(0, 40))
def test_evening_out_halves_until_there_are_as_many(lengths: Lengths, batch_frames: int, more: int) -> None:
    bounds = cut(lengths, PlanOptions(0, order="shuffled", batch_frames=batch_frames))
    num = len(bounds) - 1 + more
    evened = even_out(lengths, bounds, num)
    assert set(bounds.tolist()) <= set(evened.tolist())
    assert len(evened) - 1 == min(num, len(lengths))
    assert (np.diff(evened) > 0).all()


def test_the_costliest_batch_is_halved_first() -> None:
    lengths = np.array([10, 10, 50, 2, 2, 2, 2, 9, 9, 9, 9])
    bounds = np.array([0, 2, 3, 7, 11])  # 20, 50 (one segment), 8 and 36 frames
    assert even_out(lengths, bounds, 5).tolist() == [0, 2, 3, 7, 9, 11]
    assert even_out(lengths, bounds, 6).tolist() == [0, 1, 2, 3, 7, 9, 11]
    assert even_out(lengths, bounds, 3).tolist() == bounds.tolist()
    nothing = np.array([0])
    assert even_out(lengths[:0], nothing, 4).tolist() == [0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch_frames", [0, 60])
def test_steps_are_a_permutation_of_batches_and_empty_ones(order: Order, batch_frames: int) -> None:
    options = PlanOptions(2, order=order, batch_frames=batch_frames)
    lengths = generator().integers(1, 50, 90)
    costs = costs_of(lengths, cut(lengths, PlanOptions(2)))
    steps = steps_of(costs, 50, options, generator())
    assert sorted(steps.tolist()) == list(range(50))


def test_shuffled_batches_meet_by_their_costs() -> None:
    options = PlanOptions(3, order="shuffled")
    of_ranks = []
    for rank, num in enumerate((300, 290)):
        lengths = generator(rank + 5).integers(1, 500, num)
        costs = costs_of(lengths, cut(lengths, options))
        steps = steps_of(costs, 100, options, generator())
        of_ranks.append(np.append(costs.padded, np.zeros(100 - len(costs.padded)))[steps])
    ranked = [sorted(costs, reverse=True) for costs in of_ranks]
    pairs = sorted(zip(*of_ranks, strict=True), reverse=True)
    assert pairs == list(zip(*ranked, strict=True))
    assert of_ranks[0].tolist() != ranked[0]
