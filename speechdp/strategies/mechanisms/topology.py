"""Exchange topologies: ring, one-peer exponential graph, random pairs, bipartite graphs.

Pure functions of rank, size, step and seed, so that all ranks agree without a message.  A *mixing* is what
one rank sends and receives in one synchronous step.  Its weights are equal, 1 / (1 + number of sources), so
the matrix over all ranks is doubly stochastic and keeps their mean.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: Which pairs of an active and a passive rank exchange in an asynchronous strategy.
BipartiteKind = Literal["all", "ring", "exponential"]


@dataclass(frozen=True)
class Mixing:
    """One rank's part of a step: x_i <- (x_i + sum of its sources' x_j) / (1 + number of sources).

    Attributes:
        destinations: ranks that get this rank's parameters, each once, in the order of sending.
        sources: equally many ranks whose parameters it gets, in the order of receiving: while all ranks send
            to their k-th destination, each receives from its k-th source.  In another order, ranks whose
            messages are not buffered could wait for each other in a cycle.
    """

    destinations: tuple[int, ...]
    sources: tuple[int, ...]

    @property
    def weight(self) -> float:
        """Weight of each averaged vector, including this rank's own."""
        return 1.0 / (1 + len(self.sources))


def ring_neighbours(rank: int, size: int) -> tuple[int, int]:
    """Return the left and the right neighbour; with two ranks both are the other rank."""
    return (rank - 1) % size, (rank + 1) % size


def ring_mixing(rank: int, size: int) -> Mixing:
    """Return the mixing with both neighbours: weights of 1/3, of 1/2 with two ranks, 1 for a single rank."""
    left, right = ring_neighbours(rank, size)
    if size < 3:
        return Mixing((), ()) if size == 1 else Mixing((left,), (left,))
    return Mixing((left, right), (right, left))


def exponential_offset(size: int, step: int) -> int:
    """Return the distance of the peer of `step`: 1, 2, 4, ... below `size`, cyclically; 0 for one rank."""
    num_offsets = (size - 1).bit_length()
    return 2 ** (step % num_offsets) if num_offsets else 0


def exponential_mixing(rank: int, size: int, step: int) -> Mixing:
    """Return the mixing of the one-peer exponential graph: send `offset` to the right, receive from the left.

    It is directed, so it works for every size.  If the size is a power of two, log2(size) consecutive steps
    give the exact mean on every rank; otherwise they come close to it.
    """
    offset = exponential_offset(size, step)
    return Mixing(((rank + offset) % size,), ((rank - offset) % size,)) if offset else Mixing((), ())


def random_matching(size: int, seed: int, step: int) -> tuple[int, ...]:
    """Return each rank's partner in random pairs, drawn anew for every step.

    The same on every rank, without a message.  With an odd size one rank is left over: -1.
    """
    order = list(range(size))
    # A string seeds through a hash, so neighbouring seeds and steps give independent draws.
    random.Random(f"{seed}/{step}").shuffle(order)
    partners = [-1] * size
    for a, b in zip(order[0::2], order[1::2], strict=False):
        partners[a], partners[b] = b, a
    return tuple(partners)


def matching_mixing(rank: int, partners: Sequence[int]) -> Mixing:
    """Return the mixing with the partner: weights of 1/2, or 1 for a rank without partner."""
    other = () if partners[rank] < 0 else (partners[rank],)
    return Mixing(other, other)


def is_active(rank: int) -> bool:
    """Return whether `rank` starts exchanges (even ranks) or answers them (odd ranks).

    An exchange is always between an active and a passive rank, so ranks cannot wait for each other in a
    cycle.
    """
    return rank % 2 == 0


def passive_partners(rank: int, size: int, kind: BipartiteKind) -> tuple[int, ...]:
    """Return the passive ranks with which the active `rank` exchanges, sorted.

    all: every passive rank.
    ring: the neighbours; in a ring of odd size the first and the last rank, both active, are not connected.
    exponential: 1, 3, 5, 9, 17, ... ranks away on both sides; each distance is odd because an even one
        connects ranks of the same kind.  With an odd number of ranks a distance may wrap around to an active
        rank, which is left out.
    """
    assert is_active(rank), f"rank {rank} is passive"
    return _partners(rank, size, kind)


def active_partners(rank: int, size: int, kind: BipartiteKind) -> tuple[int, ...]:
    """Return the active ranks with which the passive `rank` exchanges, sorted; see `passive_partners`."""
    assert not is_active(rank), f"rank {rank} is active"
    return _partners(rank, size, kind)


def _partners(rank: int, size: int, kind: BipartiteKind) -> tuple[int, ...]:
    if kind == "all":
        return tuple(range(1 if is_active(rank) else 0, size, 2))
    distances = _odd_distances(size) if kind == "exponential" else [1]
    reached = {(rank + sign * distance) % size for distance in distances for sign in (1, -1)}
    return tuple(sorted(r for r in reached if is_active(r) != is_active(rank)))


def _odd_distances(size: int) -> list[int]:
    powers = [1 + 2**k for k in range(1, size.bit_length())]
    return [1, *(d for d in powers if d < size)]
