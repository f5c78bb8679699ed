"""Which part of the data each rank trains on, and with whom it takes its steps."""

from __future__ import annotations

from dataclasses import dataclass


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
