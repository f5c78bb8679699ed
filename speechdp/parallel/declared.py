"""What a strategy declares about its ranks, from its options alone.

`Roster`: who trains on which part of the data, and who steps together.  `Exchange`: what is sent when, and
who waits for whom; `simulate` and `tune` predict the strategy's speed from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period, PeriodUnit


@dataclass(frozen=True)
class Roster:
    """Which rank trains on which data, and with whom.

    Attributes:
        part_of_rank: part of the data of each rank, numbered from 0; None for a rank that trains on none (a
            server), whose steps have no frames.
        team_of_rank: team of each rank, numbered from 0; all teams have the same size.  With an asynchronous
            strategy, ranks of a team take their steps together, and each team goes at its own pace.
    """

    part_of_rank: list[int | None]
    team_of_rank: list[int]

    @property
    def num_parts(self) -> int:
        """Number of parts the data are cut into: that of the ranks that train."""
        return sum(part is not None for part in self.part_of_rank)

    @property
    def parts_of_team(self) -> list[list[int]]:
        """Parts of each team, in the order of its ranks; teams without parts are left out."""
        teams: dict[int, list[int]] = {}
        for part, team in zip(self.part_of_rank, self.team_of_rank, strict=True):
            if part is not None:
                teams.setdefault(team, []).append(part)
        return [teams[team] for team in sorted(teams)]

    def seat(self, rank: int) -> tuple[int, int] | None:
        """Return the index of a rank's team in `parts_of_team` and its own in the team; None for a server."""
        part = self.part_of_rank[rank]
        for team, parts in enumerate(self.parts_of_team):
            if part in parts:
                return team, parts.index(part)
        return None


class Pattern(Enum):
    """Who waits for whom."""

    TOGETHER = "all ranks wait for all"
    DELAYED = "all ranks sum, and wait for it some steps later"
    NEIGHBOURS = "each rank waits for a few"
    GOSSIP = "no rank waits"
    SERVER = "each rank waits for the server alone"


#: Who exchanges with whom, for the patterns that leave it open; "" counts as "ring".
_TOPOLOGIES = {
    Pattern.NEIGHBOURS: ("ring", "random", "exponential", "complete"),
    Pattern.GOSSIP: ("ring", "all", "exponential"),
}


@dataclass(frozen=True)
class Exchange:
    """How a strategy exchanges.

    Attributes:
        period: steps between exchanges.
        nbytes: bytes of the exchanged vector, as it is sent.
        buckets: bytes of the pieces that are exchanged while backward still runs, in the order of backward;
            empty: everything is exchanged after the step's computation.
        delay: number of steps after which ranks wait for a sum (DELAYED).
        topology: who exchanges with whom: `ring`, `random` (pairs), `exponential` or `complete` (NEIGHBOURS);
            `ring`, `all` or `exponential` (GOSSIP); as the options of `dpsgd` and `ad_psgd`.
        overlaps: the exchange runs beside the next step's forward and backward pass (NEIGHBOURS).
        group_size: number of ranks in a group that sums its gradients at every step (GOSSIP).
        dedicated: rank 0 only serves.
        at_server: rank 0 gathers and hands back (TOGETHER); its update replaces the ranks' own (SERVER).
        rounds: one in so many exchanges is between nodes, the others are inside nodes (TOGETHER); 0: every
            exchange is over all ranks.
        node_size: consecutive ranks that count as a node; 0: the cluster's nodes.
        nbytes_between: bytes of the vector sent between nodes.

    Raises:
        ConfigError: a value with which nothing can be predicted.
    """

    pattern: Pattern
    period: int
    nbytes: float
    buckets: tuple[float, ...] = ()
    delay: int = 0
    topology: str = ""
    overlaps: bool = True
    group_size: int = 1
    dedicated: bool = False
    at_server: bool = False
    rounds: int = 0
    node_size: int = 0
    nbytes_between: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise ConfigError(f"Exchange: pattern={self.pattern!r}: give a Pattern, e.g. Pattern.TOGETHER")
        if not (isinstance(self.period, int) and self.period >= 1):
            raise ConfigError(
                f"Exchange: period={self.period!r}: give a number of steps, at least 1, "
                "e.g. model.steps_in(self.period)"
            )
        if self.nbytes < 0 or self.nbytes_between < 0 or any(piece < 0 for piece in self.buckets):
            raise ConfigError("Exchange: bytes must not be negative")
        if not 0 <= self.delay <= self.period:
            raise ConfigError(
                f"Exchange: delay={self.delay}: at least 0 and at most the period, {self.period}"
            )
        known = _TOPOLOGIES.get(self.pattern)
        if known and self.topology not in ("", *known):
            raise ConfigError(f"Exchange: topology={self.topology!r}: {self.pattern} has {', '.join(known)}")


@dataclass(frozen=True)
class Model:
    """The size of what is exchanged, and how long a rank computes in between.

    Attributes:
        nbytes: bytes of the parameters.
        optimizer_vectors: number of vectors of that size that the optimizer keeps.
        frames_per_step: frames of one rank in a step.
        step_s: time of a step of one rank without exchanges, s.
    """

    nbytes: float
    optimizer_vectors: int
    frames_per_step: float
    step_s: float

    def steps_in(self, period: Period) -> int:
        """Return the number of steps in a period, at least 1."""
        if period.unit is PeriodUnit.FRAMES:
            return max(1, round(period.value / self.frames_per_step))
        if period.unit is PeriodUnit.SECONDS:
            return max(1, round(period.value / self.step_s))
        return int(period.value)


def buckets_of(nbytes: float, bucket_mib: float) -> tuple[float, ...]:
    """Return the sizes of the pieces in which gradients are exchanged during backward, bytes."""
    size = bucket_mib * 2**20
    whole = int(nbytes // size)
    rest = nbytes - whole * size
    return (size,) * whole + ((rest,) if rest > 0 else ())
