"""How a profile's numbers and jobs are written in plots, tables and sentences: one place, one style."""

from __future__ import annotations

from speechdp.profile.record import BLOCKING, FED, POOLED, STRONG, WEAK, ProfileJob

#: Headings of what is compared over numbers of ranks.
SCALING_TITLES = {
    WEAK: "Weak scaling: a rank's batch constant",
    STRONG: "Strong scaling: all ranks' batch constant",
}


def number(value: float) -> str:
    """Write a number with three digits, three of them behind the point at most, thousands separated."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    return f"{value:.{digits}f}"


def milliseconds(seconds: float) -> str:
    """Write seconds in ms without the unit: `12.3`, `1,240`."""
    return number(1e3 * seconds)


def rank_count(ranks: int) -> str:
    """Write a number of ranks: `1 rank`, `4 ranks`."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def loader_title(job: ProfileJob) -> str:
    """Say what trainloader a job had, for a heading."""
    titles = {
        BLOCKING: "blocking trainloader",
        POOLED: "trainloader beside training",
        FED: "trainloader on feeder ranks",
    }
    return titles.get(job.kind, job.name)
