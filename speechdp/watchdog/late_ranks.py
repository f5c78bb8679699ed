"""Judge which ranks keep the others waiting from the statuses of all.  Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speechdp.watchdog.status import RankStatus

_MOST_NAMED = 8


@dataclass
class Sighting:
    """What one rank has seen of another; times by the observing rank's own clock, s.

    Attributes:
        name: name of the other rank in messages.
        begun_s: time at which observation began.
        status: status that was read last; None: none yet.
        changed_s: time at which a changed status was last read; None: no change yet.
        moved_s: time at which the other's progress was last seen; None: none since observation began.
    """

    name: str
    begun_s: float
    status: RankStatus | None = None
    changed_s: float | None = None
    moved_s: float | None = None

    def note(self, status: RankStatus | None, now_s: float) -> None:
        """Record the status just read; None (nothing, or nonsense) changes nothing."""
        before = self.status
        if status is None or status == before:
            return
        self.name, self.status = status.name, status
        if before is not None:  # the first status read may be old
            self.changed_s = now_s
            if (status.pid, status.beats) != (before.pid, before.beats):
                self.moved_s = now_s

    def silent_s(self, now_s: float) -> float:
        """Return the time since a new status was last read, or since observation began, s."""
        return now_s - (self.begun_s if self.changed_s is None else self.changed_s)


@dataclass(frozen=True)
class Standpoint:
    """The time and limits by which lateness is judged.

    Attributes:
        now_s: current time by the clock of the sightings, s.
        silence_s: time without a new status after which a rank is considered silent, s.
        still_s: time without progress after which a rank counts as standing still, s; in an asynchronous run
            the others continue meanwhile.
        synchronous: whether ranks take every step together.
    """

    now_s: float
    silence_s: float
    still_s: float
    synchronous: bool = True


def describe_late(own: RankStatus, others: Iterable[Sighting], at: Standpoint) -> str:
    """Return the late ranks and what they do, for a message: `rank 3 on n4 (in data_wait for 61 s), ...`."""
    sightings = list(others)
    silent = [sighting for sighting in sightings if sighting.silent_s(at.now_s) >= at.silence_s]
    seen = [(s.status, s.silent_s(at.now_s)) for s in sightings if s.status is not None and s not in silent]
    alive = [(own, 0.0), *seen]
    late = [
        f"{status.name} ({describe_doing(status, age_s)})"
        for status, age_s in sorted(_late(alive, at, any_silent=bool(silent)), key=lambda pair: pair[0].rank)
    ]
    late += [f"{s.name} (no sign of life for {s.silent_s(at.now_s):.0f} s)" for s in silent]
    if not late:
        return "nobody, all ranks wait for one another"
    more = len(late) - _MOST_NAMED
    return ", ".join(late[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _late(
    alive: Sequence[tuple[RankStatus, float]], at: Standpoint, *, any_silent: bool
) -> list[tuple[RankStatus, float]]:
    """Return the late ones of the ranks that give signs of life, each with the age of its status, s."""
    busy = [pair for pair in alive if not pair[0].waits and pair[0].still_s + pair[1] >= at.still_s]
    if not at.synchronous:
        return busy
    fewest = min(status.step for status, _ in alive)
    behind = [pair for pair in alive if pair[0].step == fewest]
    if len(behind) == len(alive):
        return busy
    # Ranks that are behind are late even if they wait: for a silent rank, or in another exchange.
    return [pair for pair in behind if pair in busy] or busy or ([] if any_silent else behind)


def describe_doing(status: RankStatus, age_s: float = 0.0) -> str:
    """Return what a rank is doing and for how long, from a status that is `age_s` old."""
    waiting = ", waiting for other ranks," if status.waits and status.doing != "comm" else ""
    return f"in {status.doing}{waiting} for {status.doing_s + age_s:.0f} s"
