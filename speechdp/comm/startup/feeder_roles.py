"""Decide which ranks of a job train, and which feed them: the last ranks of each host.  Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from speechdp.errors import ConfigError


@dataclass(frozen=True)
class Roles:
    """The roles of a job's ranks; all numbers are ranks of the whole job.

    Attributes:
        hosts: host of every rank.
        trainers, feeders: ranks, ascending.
    """

    hosts: tuple[str, ...]
    trainers: tuple[int, ...]
    feeders: tuple[int, ...]

    def feeders_of(self, trainer: int) -> list[int]:
        """Return a trainer's feeders: those of its host, so that batches travel through memory.

        Each trainer gets them in a different order, so that not all trainers ask the same feeder first.
        """
        host = self.hosts[trainer]
        nearby = [rank for rank in self.feeders if self.hosts[rank] == host]
        first = [rank for rank in self.trainers if self.hosts[rank] == host].index(trainer) % len(nearby)
        return nearby[first:] + nearby[:first]

    def trainers_of(self, feeder: int) -> list[int]:
        """Return the trainers that a feeder feeds."""
        return [rank for rank in self.trainers if self.hosts[rank] == self.hosts[feeder]]


def assign_roles(hosts: Sequence[str], num_feeders: int) -> Roles:
    """Make the last `num_feeders` ranks of each host feeders.

    Args:
        hosts: host of every rank of the job.
        num_feeders: feeders per host, at least 1.

    Raises:
        ConfigError: a host would have no rank that trains.
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
