"""Exchange times in a latency-bandwidth model: T(n) = alpha + n * beta for a message of n bytes.

Source: Hockney 1994 for the model; Patarasuk & Yuan 2009 for the ring; Thakur et al. 2005 for recursive
doubling; Sanders, Speck & Traeff 2009 for the two trees; all recalled.  The hierarchical form is NCCL's and
Horovod's: sums inside a node, between nodes, inside again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Samples: TypeAlias = npt.NDArray[np.float64]
#: Up to this size back-ends sum in log2(N) messages of the whole vector rather than in a ring, bytes.
SMALL_BYTES = 32 * 1024
#: Algorithm of an allreduce; `auto`: the fastest of the three.
Algorithm = Literal["auto", "ring", "tree", "hierarchical"]


@dataclass(frozen=True)
class LinkSpeed:
    """A link between two ranks: one value, or one for each replicate of the bootstrap.  (replicates,)

    Attributes:
        latency_s: alpha, time of an empty message.
        s_per_byte: beta, the inverse of the bandwidth.
    """

    latency_s: Samples
    s_per_byte: Samples

    @classmethod
    def of(cls, latency_s: float, bytes_per_s: float) -> LinkSpeed:
        """Return a link of known latency, s, and bandwidth, bytes/s."""
        return cls(np.array([latency_s]), np.array([1 / bytes_per_s]))

    def message_s(self, nbytes: float) -> Samples:
        """Return the time of a message, s."""
        return self.latency_s + nbytes * self.s_per_byte

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth, bytes/s; infinite if a byte takes no time."""
        mean = float(self.s_per_byte.mean())
        return 1 / mean if mean > 0 else math.inf

    def faster(self, factor: float) -> LinkSpeed:
        """Return a link with `factor` times the bandwidth."""
        return replace(self, s_per_byte=self.s_per_byte / factor)

    def part(self, replicates: slice) -> LinkSpeed:
        """Return the link of some replicates; a link with a single value is the same for all."""
        if len(self.latency_s) == len(self.s_per_byte) == 1:
            return self
        count = max(len(self.latency_s), len(self.s_per_byte))
        latency, per_byte = (np.broadcast_to(a, (count,)) for a in (self.latency_s, self.s_per_byte))
        return LinkSpeed(latency[replicates], per_byte[replicates])


@dataclass(frozen=True)
class Cluster:
    """Nodes with equally many ranks; rank r is on node r // ranks_per_node.

    Attributes:
        between: link of a node to the others; its ranks share it, each direction separately.
        within: link between two ranks of a node.  No exchange is faster than this, because ranks also copy
            and add what arrives over the network.
        algorithm: algorithm of allreduces.
    """

    ranks_per_node: int
    within: LinkSpeed
    between: LinkSpeed
    algorithm: Algorithm = "ring"

    def part(self, replicates: slice) -> Cluster:
        """Return the cluster of some replicates."""
        return replace(self, within=self.within.part(replicates), between=self.between.part(replicates))

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes for `ranks` ranks."""
        return -(-ranks // self.ranks_per_node)

    def message_s(self, nbytes: float, *, crosses: bool, sharing: int = 1) -> Samples:
        """Return the time of a message, s.

        Args:
            crosses: whether it goes from one node to another.
            sharing: number of messages that leave the node at the same time.
        """
        inside = self.within.message_s(nbytes)
        if not crosses:
            return inside
        slower: Samples = np.maximum(self.between.message_s(sharing * nbytes), inside)
        return slower

    def allreduce_s(self, nbytes: float, ranks: int) -> Samples:
        """Return the time for `ranks` ranks to sum a vector of `nbytes` bytes, s; 0 for one rank."""
        if ranks == 1:
            return np.zeros(1)
        if nbytes < SMALL_BYTES and self.algorithm == "ring":
            return self.doubling_s(nbytes, ranks)
        forms = {
            "ring": self.ring_s,
            "tree": self.tree_s,
            "hierarchical": self.hierarchical_s,
        }
        if self.algorithm != "auto":
            return forms[self.algorithm](nbytes, ranks)
        ring, tree, hierarchical = (form(nbytes, ranks) for form in forms.values())
        fastest: Samples = np.minimum(np.minimum(ring, tree), hierarchical)
        return fastest

    def ring_s(self, nbytes: float, ranks: int) -> Samples:
        """Return the time of a ring: 2 (N - 1) times a message of n / N bytes, node after node.

        Every node has one message of the ring in flight in each direction.
        """
        return 2 * (ranks - 1) * self.message_s(nbytes / ranks, crosses=self.nodes(ranks) > 1)

    def doubling_s(self, nbytes: float, ranks: int) -> Samples:
        """Return the time of recursive doubling: log2(N) times a message of all n bytes to another rank.

        The ranks of a node send theirs at the same time.
        """
        sharing = min(ranks, self.ranks_per_node)
        crosses = self.nodes(ranks) > 1
        return math.ceil(math.log2(ranks)) * self.message_s(nbytes, crosses=crosses, sharing=sharing)

    def tree_s(self, nbytes: float, ranks: int) -> Samples:
        """Return the time of two pipelined trees: 2 log2(N) latencies, each byte up once and down once."""
        crosses = self.nodes(ranks) > 1
        depth = math.ceil(math.log2(ranks))
        empty = self.message_s(0, crosses=crosses)
        return 2 * depth * empty + 2 * (self.message_s(nbytes, crosses=crosses) - empty)

    def hierarchical_s(self, nbytes: float, ranks: int) -> Samples:
        """Return the time of rings inside the nodes, then between them, then inside again.

        Between nodes each rank has its own ring for its part, n / ranks_per_node bytes; these rings share the
        node's link.
        """
        nodes, inside = self.nodes(ranks), min(ranks, self.ranks_per_node)
        if nodes == 1 or inside == 1:
            return self.ring_s(nbytes, ranks)
        within = 2 * (inside - 1) * self.within.message_s(nbytes / inside)
        part = nbytes / inside / nodes
        return within + 2 * (nodes - 1) * self.message_s(part, crosses=True, sharing=inside)
