"""Distinguish slow links between hosts from good ones."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)
_SLOW_SHARE = 0.5


def slow_links(rates: Mapping[tuple[Node, Node], float]) -> tuple[dict[tuple[Node, Node], float], float]:
    """Return the links with less than half the speed of a good link, and that speed, bytes/s.

    The speed of a good link is the median, over hosts, of the speed of each host's fastest link.  It is not
    the median over links: among three hosts, one bad host slows two of the three links.

    Args:
        rates: speed between each pair of hosts, bytes/s.
    """
    if len(rates) < 2:
        return {}, 0.0
    best: dict[Node, float] = {}
    for pair, rate in rates.items():
        for node in pair:
            best[node] = max(best.get(node, 0.0), rate)
    good = statistics.median(best.values())
    return {pair: rate for pair, rate in rates.items() if rate < _SLOW_SHARE * good}, good


def suspects(slow: Mapping[tuple[Node, Node], float]) -> tuple[Node, ...]:
    """Return the members of most of the given pairs: one bad host slows both of its links."""
    counts: dict[Node, int] = {}
    for pair in slow:
        for node in pair:
            counts[node] = counts.get(node, 0) + 1
    most = max(counts.values())
    return tuple(node for node, count in counts.items() if count == most)
