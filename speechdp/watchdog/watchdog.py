"""End a job that hangs: after --hang-timeout without a step show all stacks and name the ranks that are late.

Two threads beside training: one watches and never touches a disk, so that nothing can keep it from ending the
rank; the other writes RUN/status/rank-NNNN.json and, once this rank stands still, reads those of the others.
Clocks of other hosts count nothing: a rank is alive while its file changes under this rank's own clock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from speechdp import exit_codes
from speechdp.process.bounded import bounded
from speechdp.watchdog.late_ranks import Sighting, Standpoint, describe_doing, describe_late
from speechdp.watchdog.stacks import describe_stacks
from speechdp.watchdog.status import RankStatus, StatusFolder

#: Seconds between two statuses, a share of the timeout and its bounds.
_INTERVAL_SHARE, _LEAST_INTERVAL_S, _MOST_INTERVAL_S = 0.1, 1.0, 5.0
#: Share of the timeout after which a rank that stands still looks at the others.
_LOOK_SHARE = 0.3
#: Share of the timeout after which a rank that stands still, and does not wait, is late.
_LATE_SHARE = 0.5
#: Statuses missed before a rank gives no sign of life.
_MISSED = 3
#: Seconds that the rank which ends the job gives the others to show their stacks ...
_GRACE_S = 1.5
#: ... and that they leave it to end them, of a script, too.  A launcher on a busy machine took more than 4 s,
#: and the job said twice why it ended.
FALLBACK_S = 10.0
#: Longest a disk or a full pipe may take at the end, s.
_PATIENCE_S = 1.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Watch:
    """What is watched.

    Attributes:
        timeout_s: without progress, above 0.
        folder: where ranks tell what they are doing.
        look: returns this rank's status, given for how long it has stood still, s, and whether to find out if
            it waits; from any thread.
        others: ranks to read about, and their names; those that are gone with consent are left out.
        synchronous: ranks take every step together.
        prefix: how this rank's messages begin, e.g. `speechdp: rank 1 on n2`.
        before_end: called first of all at the end, e.g. to give the terminal back.
        fed_by: names of the ranks that feed those that train; "" where these read themselves.
    """

    timeout_s: float
    folder: StatusFolder
    look: Callable[[float, bool], RankStatus]
    others: Callable[[], dict[int, str]]
    synchronous: bool
    prefix: str
    before_end: Callable[[], None]
    fed_by: str = ""

    @property
    def interval_s(self) -> float:
        """Seconds between two statuses."""
        return min(max(_INTERVAL_SHARE * self.timeout_s, _LEAST_INTERVAL_S), _MOST_INTERVAL_S)

    @property
    def silence_s(self) -> float:
        """Seconds without a new status after which a rank gives no sign of life."""
        return min(_MISSED * self.interval_s, _LATE_SHARE * self.timeout_s)

    def status(self, still_s: float) -> RankStatus:
        """Return this rank's status; whether it waits only where it has stood still for long enough.

        That is before it may count as late, also by a status that is as old as one may be.
        """
        counts_from_s = min(_LOOK_SHARE * self.timeout_s, _LATE_SHARE * self.timeout_s - self.silence_s)
        return self.look(still_s, still_s >= counts_from_s)


class Stillness:
    """For how long a rank has stood still, not counting time in which it could not run at all.

    Attributes:
        still_s: since the last progress, s.
        awake_s: seconds in which this process could run; stops while it is frozen or the machine suspended.
    """

    def __init__(self, now_s: float, most_s: float) -> None:
        """Begin to count.

        Args:
            now_s: by a monotonic clock.
            most_s: of a longer gap between two looks only so much was this rank's own time.
        """
        self.still_s = self.awake_s = 0.0
        self._last_s, self._most_s, self._beats = now_s, most_s, -1

    def look(self, now_s: float, beats: int) -> float:
        """Return `still_s`, given the time and the signs of progress so far."""
        gap_s = min(now_s - self._last_s, self._most_s)
        self._last_s = now_s
        self.awake_s += gap_s
        self.still_s = self.still_s + gap_s if beats == self._beats else 0.0
        self._beats = beats
        return self.still_s


class Watchdog:
    """Watches this rank while its block runs; ends the process with `exit_codes.HUNG` if it hangs.

    Args:
        watch: what is watched.
        end: leaves the process.
        say: writes to stderr.
    """

    def __init__(
        self,
        watch: Watch,
        *,
        end: Callable[[int], None] = os._exit,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._watch, self._end, self._say = watch, end, say or _write_stderr
        tick_s = min(1.0, watch.timeout_s / 20)
        self._tick_s = tick_s
        self._stillness = Stillness(time.monotonic(), 2 * tick_s)
        self._sightings: dict[int, Sighting] = {}
        self._looked_s: float | None = None
        self._called = False
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"speechdp-{name}", daemon=True)
            for target, name in ((self._run, "watchdog"), (self._tell, "status"))
        ]

    def __enter__(self) -> Watchdog:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(_PATIENCE_S)  # a disk that hangs keeps its thread, not the run

    # --- the thread that watches

    def _run(self) -> None:
        while not self._done.wait(self._tick_s):
            own = self._watch.status(self._stillness.still_s)
            still_s = self._stillness.look(time.monotonic(), own.beats)
            if self._is_due(own, still_s):
                self._end_job()
                return

    def _looks(self, still_s: float) -> bool:
        return still_s >= _LOOK_SHARE * self._watch.timeout_s

    def _is_due(self, own: RankStatus, still_s: float) -> bool:
        """Tell whether nothing has happened for too long; a rank that waits lets slower ones get on."""
        # Where another rank has said that the job hangs, less will do.
        timeout_s = self._watch.timeout_s * (_LOOK_SHARE if self._called else 1.0)
        if still_s < timeout_s:
            return False
        moved = [s.moved_s for s in list(self._sightings.values()) if s.moved_s is not None]
        return not (own.waits and moved and self._stillness.awake_s - max(moved) < timeout_s)

    def _end_job(self) -> None:
        watch, still_s = self._watch, self._stillness.still_s
        own = watch.status(still_s)
        what = f"no step ended for {still_s:.0f} s (step {own.step}, {describe_doing(own)})"
        line = f"{watch.prefix}: {what}{self._late(own)}\n"
        # The first rank ends the job; the others show their stacks and wait for it, but not for ever.
        is_first = bounded(lambda: watch.folder.claim_end(line), default=False)
        bounded(watch.before_end, default=None)
        where = own.name.removeprefix("rank ")
        stacks = f"Stacks of rank {where}, {what}:\n{describe_stacks()}"
        bounded(lambda: self._say(stacks), default=None)
        if self._watch.others():
            time.sleep(_GRACE_S if is_first else FALLBACK_S)
        bounded(lambda: self._say(line), default=None)
        self._end(exit_codes.HUNG)

    def _late(self, own: RankStatus) -> str:
        """Return the part of the message that names who is late; "" on a rank by itself."""
        watch, now_s = self._watch, self._stillness.awake_s
        names = watch.others()
        if not names:
            return ""
        looked_s = self._looked_s
        if looked_s is None or now_s - looked_s >= watch.silence_s:
            return f"; which ranks are late is unknown: {watch.folder.path} cannot be read"
        at = Standpoint(now_s, watch.silence_s, _LATE_SHARE * watch.timeout_s, watch.synchronous)
        sightings = [s for rank, s in sorted(self._sightings.items()) if rank in names]
        late = f"; late: {describe_late(own, sightings, at)}"
        if watch.fed_by and "in data_wait" in late:
            late += f"; batches come from {watch.fed_by}"
        return late

    # --- the thread that reads and writes

    def _tell(self) -> None:
        write_due_s = read_due_s = 0.0
        wait_s = 0.0
        while not self._done.wait(wait_s):
            now_s, still_s = time.monotonic(), self._stillness.still_s
            looks = self._looks(still_s)
            if not looks:
                self._sightings, self._looked_s, read_due_s = {}, None, 0.0
            with contextlib.suppress(OSError):  # training goes on without; the next try may succeed
                if now_s >= write_due_s:
                    write_due_s = now_s + self._watch.interval_s
                    self._watch.folder.write(self._watch.status(still_s))
                if looks and now_s >= read_due_s:
                    read_due_s = now_s + self._watch.interval_s
                    self._read_others()
                if looks and not self._called:
                    self._called = self._watch.folder.is_ending()
            wait_s = _POLL_S

    def _read_others(self) -> None:
        for rank, name in self._watch.others().items():
            sighting = self._sightings.get(rank) or Sighting(name, self._stillness.awake_s)
            sighting.note(self._watch.folder.read(rank), self._stillness.awake_s)
            self._sightings[rank] = sighting
        self._looked_s = self._stillness.awake_s


def _write_stderr(text: str) -> None:
    """Write by the descriptor: a thread that hangs while it prints holds the lock of sys.stderr."""
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(2, data) :]
