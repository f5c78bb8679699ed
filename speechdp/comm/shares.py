"""Work that is shared out among ranks, some of which may be lost over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from speechdp.comm.base import Communicator

T = TypeVar("T")


def in_shares(comm: Communicator, work: Callable[[int, int], T]) -> T:
    """Have each rank do its share and return what the shares come to together.  Collective.

    Args:
        work: called with this rank's share, 0 <= share < number, and the number of shares; ends with the
            collective that puts them together.  Called again where a rank was lost with its share.
    """
    while True:
        alive = comm.alive
        result = work(alive.index(comm.rank), len(alive))
        if comm.alive == alive:
            return result
