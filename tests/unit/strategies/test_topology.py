"""Graphs of ranks: who exchanges with whom, and what that does to their mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speechdp.strategies.mechanisms import topology
from speechdp.strategies.mechanisms.topology import BipartiteKind, Mixing
from tests.helpers.mixings import mixing_matrix

SIZES = list(range(1, 18))
KINDS: tuple[BipartiteKind, ...] = ("all", "ring", "exponential")


def matrix(mixings: list[Mixing]) -> Tensor:
    return torch.tensor(mixing_matrix(mixings), dtype=torch.float64)


def ring(size: int) -> list[Mixing]:
    return [topology.ring_mixing(rank, size) for rank in range(size)]


def exponential(size: int, step: int) -> list[Mixing]:
    return [topology.exponential_mixing(rank, size, step) for rank in range(size)]


def matched(partners: tuple[int, ...]) -> list[Mixing]:
    return [topology.matching_mixing(rank, partners) for rank in range(len(partners))]


def second_singular_value(w: Tensor) -> float:
    """Return what is left of the distance from the mean after multiplying by `w`."""
    size = len(w)
    return float(torch.linalg.svdvals(w - torch.full_like(w, 1 / size))[0])


def test_ring_neighbours() -> None:
    assert topology.ring_neighbours(0, 4) == (3, 1)
    assert topology.ring_neighbours(3, 4) == (2, 0)
    assert topology.ring_neighbours(0, 2) == (1, 1)
    assert topology.ring_neighbours(0, 1) == (0, 0)


def test_exponential_offsets_go_round() -> None:
    assert [topology.exponential_offset(8, s) for s in range(5)] == [1, 2, 4, 1, 2]
    assert [topology.exponential_offset(9, s) for s in range(5)] == [1, 2, 4, 8, 1]
    assert [topology.exponential_offset(2, s) for s in range(2)] == [1, 1]
    assert topology.exponential_offset(1, 3) == 0


@pytest.mark.parametrize("size", SIZES)
def test_what_one_sends_the_other_expects(size: int) -> None:
    steps = [ring(size), *(exponential(size, s) for s in range(5))]
    steps += [matched(topology.random_matching(size, 1, s)) for s in range(5)]
    for mixings in steps:
        for rank, mixing in enumerate(mixings):
            assert rank not in mixing.destinations + mixing.sources
            assert len(set(mixing.sources)) == len(mixing.sources) == len(mixing.destinations)
            # In the same turn, too: else every rank could wait for one that is busy with another.
            assert all(mixings[other].sources[k] == rank for k, other in enumerate(mixing.destinations))
            assert all(mixings[other].destinations[k] == rank for k, other in enumerate(mixing.sources))


@pytest.mark.parametrize("size", SIZES)
def test_mixing_matrices_are_doubly_stochastic(size: int) -> None:
    matrices = [matrix(ring(size)), *(matrix(exponential(size, s)) for s in range(5))]
    matrices += [matrix(matched(topology.random_matching(size, 3, s))) for s in range(5)]
    for w in matrices:
        ones = torch.ones(size, dtype=torch.float64)
        assert bool((w >= 0).all())
        torch.testing.assert_close(w @ ones, ones)
        torch.testing.assert_close(ones @ w, ones)


def test_ring_weights() -> None:
    third = pytest.approx(1 / 3)
    assert mixing_matrix(ring(4))[0] == [third, third, 0, third]
    assert mixing_matrix(ring(3)) == [[third] * 3] * 3
    assert mixing_matrix(ring(2)) == [[0.5, 0.5]] * 2
    assert mixing_matrix(ring(1)) == [[1.0]]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_exponential_graphs_reach_the_mean_of_a_power_of_two(size: int) -> None:
    num_steps = size.bit_length() - 1
    mixed = torch.eye(size, dtype=torch.float64)
    for step in range(num_steps):
        mixed = matrix(exponential(size, step)) @ mixed
    torch.testing.assert_close(mixed, torch.full_like(mixed, 1 / size))


@pytest.mark.parametrize("size", [6, 7, 8, 12, 16, 17])
def test_exponential_graphs_mix_faster_than_a_ring(size: int) -> None:
    num_steps = (size - 1).bit_length()
    around = along = torch.eye(size, dtype=torch.float64)
    for step in range(num_steps):
        around = matrix(ring(size)) @ around
        along = matrix(exponential(size, step)) @ along
    assert second_singular_value(along) < 0.75 * second_singular_value(around)


def test_random_pairs() -> None:
    drawn = {topology.random_matching(6, 0, step) for step in range(100)}
    assert len(drawn) == 15  # all there are: 5 * 3 * 1
    for partners in drawn:
        assert all(partners[partners[rank]] == rank != partners[rank] for rank in range(6))
    assert topology.random_matching(6, 0, 4) == topology.random_matching(6, 0, 4)
    assert any(topology.random_matching(6, 0, s) != topology.random_matching(6, 1, s) for s in range(3))


def test_random_pairs_of_an_odd_number_leave_each_rank_over_at_times() -> None:
    left_over = [topology.random_matching(5, 0, step) for step in range(100)]
    assert all(partners.count(-1) == 1 for partners in left_over)
    assert {partners.index(-1) for partners in left_over} == set(range(5))
    assert topology.random_matching(1, 0, 0) == (-1,)


@pytest.mark.parametrize("size", range(2, 34))
@pytest.mark.parametrize("kind", KINDS)
def test_bipartite_partners_agree_and_nobody_is_alone(size: int, kind: BipartiteKind) -> None:
    active = set(filter(topology.is_active, range(size)))
    asks = {rank: topology.passive_partners(rank, size, kind) for rank in active}
    answers = {rank: topology.active_partners(rank, size, kind) for rank in set(range(size)) - active}
    edges = {(a, p) for a, partners in asks.items() for p in partners}
    assert edges == {(a, p) for p, partners in answers.items() for a in partners}
    assert all(asks.values())
    assert all(answers.values())
    assert all(p not in active for _, p in edges)
    assert _reached(edges) == set(range(size)), "the graph falls apart"


def _reached(edges: set[tuple[int, int]]) -> set[int]:
    reached = {0}
    while new := {r for edge in edges if reached & set(edge) for r in edge} - reached:
        reached |= new
    return reached


def test_bipartite_graphs_by_hand() -> None:
    assert [*filter(topology.is_active, range(5))] == [0, 2, 4]
    assert topology.passive_partners(0, 5, "ring") == (1,)  # 4 is active, too
    assert topology.passive_partners(0, 6, "ring") == (1, 5)
    assert topology.active_partners(1, 2, "ring") == (0,)
    assert topology.passive_partners(2, 6, "all") == (1, 3, 5)
    assert topology.passive_partners(0, 16, "exponential") == (1, 3, 5, 7, 9, 11, 13, 15)
    assert topology.passive_partners(0, 32, "exponential") == (1, 3, 5, 9, 15, 17, 23, 27, 29, 31)
