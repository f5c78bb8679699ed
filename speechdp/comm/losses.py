"""What is raised where ranks are gone and losses are tolerated."""

from __future__ import annotations

from collections.abc import Collection

from speechdp.errors import CommunicationError


class PeerLost(CommunicationError):  # noqa: N818 (what happened; not always an error)
    """Ranks are gone that this one was to hear from; only where losses are tolerated.

    Attributes:
        ranks: all that are known to be gone by now.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = frozenset(ranks)
        named = ", ".join(str(rank) for rank in sorted(self.ranks))
        super().__init__(f"lost contact with rank {named}; go on with --resume")


def leader_lost() -> CommunicationError:
    """Return the error of ranks that have lost rank 0."""
    return CommunicationError(
        "rank 0 is gone, which deals the batches, evaluates and saves; go on with --resume"
    )
