"""Which ranks keep the others waiting, judged from what is known of all.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speechdp.watchdog.status import RankStatus

_MOST_NAMED = 8


@dataclass
class Sighting:
    """What one rank has seen of another; times by the seeing rank's own clock, s.

    Attributes:
        name: of the other, as messages have it.
        begun_s: when it began to look.
        status: the last one read; None: none yet.
        changed_s: when another one was last seen to have taken its place.
        moved_s: when the other was first seen to have got on since the look began; None: it has not.
    """

    name: str
    begun_s: float
    status: RankStatus | None = None
    changed_s: float | None = None
    moved_s: float | None = None

    def note(self, status: RankStatus | None, now_s: float) -> None:
        """Take what was read; None, for nothing or nonsense, is no news."""
        before = self.status
        if status is None or status == before:
            return
        self.name, self.status = status.name, status
        if before is not None:  # the first one read may be of long ago
            self.changed_s = now_s
            if (status.pid, status.beats) != (before.pid, before.beats):
                self.moved_s = now_s

    def silent_s(self, now_s: float) -> float:
        """Return for how long nothing new has been read, s."""
        return now_s - (self.begun_s if self.changed_s is None else self.changed_s)


@dataclass(frozen=True)
class Standpoint:
    """From where lateness is judged.

    Attributes:
        now_s: by the clock of the sightings, s.
        silence_s: a rank without news for so long gives no sign of life.
        still_s: a rank without progress for so long stands still; the others of an asynchronous run go on.
        synchronous: ranks take every step together.
    """

    now_s: float
    silence_s: float
    still_s: float
    synchronous: bool = True


def describe_late(own: RankStatus, others: Iterable[Sighting], at: Standpoint) -> str:
    """Return who is late and doing what, for a message: `rank 3 on n4 (in data_wait for 61 s), ...`."""
    sightings = list(others)
    silent = [sighting for sighting in sightings if sighting.silent_s(at.now_s) >= at.silence_s]
    heard = [(s.status, s.silent_s(at.now_s)) for s in sightings if s.status is not None and s not in silent]
    alive = [(own, 0.0), *heard]
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
    """Return those of the ranks that live, each with the age of its status in s, that are late."""
    busy = [pair for pair in alive if not pair[0].waits and pair[0].still_s + pair[1] >= at.still_s]
    if not at.synchronous:
        return busy
    fewest = min(status.step for status, _ in alive)
    behind = [pair for pair in alive if pair[0].step == fewest]
    if len(behind) == len(alive):
        return busy
    # Those behind are late, also where they wait: for a rank that is silent, or in another exchange.
    return [pair for pair in behind if pair in busy] or busy or ([] if any_silent else behind)


def describe_doing(status: RankStatus, age_s: float = 0.0) -> str:
    """Return what a rank is doing and for how long, `age_s` after it said so."""
    waiting = ", waiting for other ranks," if status.waits and status.doing != "comm" else ""
    return f"in {status.doing}{waiting} for {status.doing_s + age_s:.0f} s"
