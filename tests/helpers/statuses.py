"""Made-up statuses of ranks."""

from __future__ import annotations

from speechdp.watchdog.status import RankStatus


def status(rank: int, doing: str = "comm", *, step: int = 12, still_s: float = 59.0) -> RankStatus:
    """Return the status of a rank that makes no progress at a step."""
    return RankStatus(
        rank=rank,
        name=f"rank {rank} on n{rank + 1}",
        host=f"n{rank + 1}",
        pid=100 + rank,
        epoch=0,
        step=step,
        doing=doing,
        doing_s=still_s,
        waits=doing == "comm",
        beats=step,
        still_s=still_s,
        written="2026-11-22T02:00:00+00:00",
    )
