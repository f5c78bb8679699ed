"""Which ranks of a job train, and which feed them: the last ranks of each host.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from speechdp.errors import ConfigError


@dataclass(frozen=True)
class Roles:
    """What the ranks of a job do; all ranks are those of the job.

    Attributes:
        hosts: host of every rank.
        trainers, feeders: ranks, ascending.
    """

    hosts: tuple[str, ...]
    trainers: tuple[int, ...]
    feeders: tuple[int, ...]

    def feeders_of(self, trainer: int) -> list[int]:
        """Return who feeds a trainer: the feeders of its host, where batches travel through memory.

        They come in an order of the trainer's own, so that not all trainers ask the same one first.
        """
        host = self.hosts[trainer]
        nearby = [rank for rank in self.feeders if self.hosts[rank] == host]
        first = [rank for rank in self.trainers if self.hosts[rank] == host].index(trainer) % len(nearby)
        return nearby[first:] + nearby[:first]

    def trainers_of(self, feeder: int) -> list[int]:
        """Return whom a feeder feeds."""
        return [rank for rank in self.trainers if self.hosts[rank] == self.hosts[feeder]]


def assign_roles(hosts: Sequence[str], num_feeders: int) -> Roles:
    """Make the last `num_feeders` ranks of each host feeders.

    Args:
        hosts: host of every rank of the job.
        num_feeders: at least 1.

    Raises:
        ConfigError: no rank of a host would train.
    """
    counts = Counter(hosts)
    for host, count in counts.items():
        if count <= num_feeders:
            raise ConfigError(
                f"--feeders {num_feeders}: of the ranks on {host}, {count}, none would train; start at least "
                f"{num_feeders + 1} on each host"
            )
    seen: Counter[str] = Counter()
    trainers: list[int] = []
    feeders: list[int] = []
    for rank, host in enumerate(hosts):
        seen[host] += 1
        (feeders if seen[host] > counts[host] - num_feeders else trainers).append(rank)
    return Roles(tuple(hosts), tuple(trainers), tuple(feeders))
