"""The reports of a job's ranks, by host: the input of the judging functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rank:
    """One rank of the probe.

    Attributes:
        rank: its number, as the launcher counts.
        host: its host's name in the hostfile, or the node's own name if the launcher placed the rank.
        facts: results of each part of the probe.
    """

    rank: int
    host: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def by_host(ranks: Sequence[Rank], part: str) -> dict[str, Mapping[str, Any]]:
    """Return the results of each host's first rank in a part, without hosts that did not reach it."""
    found: dict[str, Mapping[str, Any]] = {}
    for rank in ranks:
        if part in rank.facts:
            found.setdefault(rank.host, rank.facts[part])
    return found


def label_ranks(
    facts: Mapping[int, Mapping[str, Any]], placed: Sequence[str], *, trust_place: bool
) -> list[Rank]:
    """Assign its host's name to every rank that reported.

    Args:
        facts: results of each rank, by part of the probe.
        placed: host of each rank, as requested from the launcher.
        trust_place: False if the launcher places ranks in an order of its own (srun).
    """
    labelled = []
    for rank in sorted(facts):
        own = str(facts[rank].get("node", {}).get("host", ""))
        place = placed[rank] if rank < len(placed) else ""
        host = place or own if trust_place else own or place
        labelled.append(Rank(rank, host or f"rank {rank}", facts[rank]))
    return labelled
