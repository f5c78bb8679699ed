"""How a profile's numbers and jobs are written in plots, tables and sentences: one place, one style."""

from __future__ import annotations

from speechdp.experiments.profile.record import BLOCKING, FED, POOLED, STRONG, WEAK, ProfileJob

#: Headings of what is compared over numbers of ranks.
SCALING_TITLES = {
    WEAK: "Weak scaling: a rank's batch constant",
    STRONG: "Strong scaling: all ranks' batch constant",
}


def loader_title(job: ProfileJob) -> str:
    """Say what trainloader a job had, for a heading."""
    titles = {
        BLOCKING: "blocking trainloader",
        POOLED: "trainloader beside training",
        FED: "trainloader on feeder ranks",
    }
    return titles.get(job.kind, job.name)
