"""What a strategy declares of its ranks, from its options alone.

`Roster`: who trains on which part of the data, and with whom.  `Exchange`: what is sent when, and who waits
for whom, from which `simulate` and `tune` predict its speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from speechdp.parallel.period import Period, PeriodUnit


@dataclass(frozen=True)
class Roster:
    """Who trains on what.

    Attributes:
        part_of_rank: part of the data of each rank, numbered from 0; None for a rank that trains on nothing
            (a server), whose steps have no frames.
        team_of_rank: team of each rank, numbered from 0, all of the same size.  With an asynchronous strategy
            ranks of a team take their steps together, teams at their own pace.
    """

    part_of_rank: list[int | None]
    team_of_rank: list[int]

    @property
    def num_parts(self) -> int:
        """Parts the data are cut into: the ranks that train."""
        return sum(part is not None for part in self.part_of_rank)

    @property
    def parts_of_team(self) -> list[list[int]]:
        """Parts of each team, in the order of its ranks; teams without any are left out."""
        teams: dict[int, list[int]] = {}
        for part, team in zip(self.part_of_rank, self.team_of_rank, strict=True):
            if part is not None:
                teams.setdefault(team, []).append(part)
        return [teams[team] for team in sorted(teams)]

    def seat(self, rank: int) -> tuple[int, int] | None:
        """Return the place of a rank's team in `parts_of_team` and its own in the team; None for a server."""
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


@dataclass(frozen=True)
class Exchange:
    """How a strategy exchanges.

    Attributes:
        period: steps between exchanges.
        nbytes: of the vector that is exchanged, as it travels.
        buckets: bytes of the pieces that are exchanged while backward still runs, in the order of backward;
            empty: all of it after the step's work.
        delay: steps after which a sum is waited for (DELAYED).
        topology: who exchanges with whom (NEIGHBOURS, GOSSIP).
        overlaps: the exchange runs beside the next step's forward and backward pass (NEIGHBOURS).
        groups: ranks that sum their gradients at every step (GOSSIP).
        dedicated: rank 0 only serves.
        at_server: rank 0 gathers and hands back (TOGETHER); its update replaces the ranks' own (SERVER).
        rounds: every so many exchanges there is one between nodes, the others are inside nodes (TOGETHER); 0:
            all are over all ranks at once.
        node_size: consecutive ranks of a node in this sense; 0: as the cluster's nodes have them.
        nbytes_between: of the vector that goes between nodes.
    """

    pattern: Pattern
    period: int
    nbytes: float
    buckets: tuple[float, ...] = ()
    delay: int = 0
    topology: str = ""
    overlaps: bool = True
    groups: int = 1
    dedicated: bool = False
    at_server: bool = False
    rounds: int = 0
    node_size: int = 0
    nbytes_between: float = 0.0


@dataclass(frozen=True)
class Model:
    """What is exchanged, and how long a rank computes in between.

    Attributes:
        nbytes: of the parameters.
        optimizer_vectors: vectors of that size that its optimizer keeps.
        frames_per_step: of a rank.
        step_s: of a rank alone.
    """

    nbytes: float
    optimizer_vectors: int
    frames_per_step: float
    step_s: float

    def steps_in(self, period: Period) -> int:
        """Return a period in steps, 1 at least."""
        if period.unit is PeriodUnit.FRAMES:
            return max(1, round(period.value / self.frames_per_step))
        if period.unit is PeriodUnit.SECONDS:
            return max(1, round(period.value / self.step_s))
        return int(period.value)


def buckets_of(nbytes: float, bucket_mib: float) -> tuple[float, ...]:
    """Return the pieces in which gradients are exchanged during backward, bytes."""
    size = bucket_mib * 2**20
    whole = int(nbytes // size)
    rest = nbytes - whole * size
    return (size,) * whole + ((rest,) if rest > 0 else ())
