"""Write the names of a profile's comparisons and jobs in one style for plots, tables and sentences."""

from __future__ import annotations

from speechdp.experiments.profile.record import BLOCKING, FED, POOLED, STRONG, WEAK, ProfileJob

#: Headings of the comparisons over numbers of ranks.
SCALING_TITLES = {
    WEAK: "Weak scaling: a rank's batch constant",
    STRONG: "Strong scaling: all ranks' batch constant",
}


def loader_title(job: ProfileJob) -> str:
    """Name the trainloader of a job, for a heading."""
    titles = {
        BLOCKING: "blocking trainloader",
        POOLED: "trainloader beside training",
        FED: "trainloader on feeder ranks",
    }
    return titles.get(job.kind, job.name)
