"""End a job that hangs: after --hang-timeout without a step, show all stacks and name the late ranks.

Two threads run beside training.  One watches and never touches a disk, so that nothing can keep it from
ending the rank.  The other writes RUN/status/rank-NNNN.json and, once this rank stands still, reads those of
the others.  Other hosts' clocks do not matter: a rank is alive while its file changes, timed by this rank's
own clock.
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

#: Time between two statuses, as a share of the timeout, and its bounds, s.
_INTERVAL_SHARE, _LEAST_INTERVAL_S, _MOST_INTERVAL_S = 0.1, 1.0, 5.0
#: Share of the timeout after which a rank that stands still looks at the others.
_LOOK_SHARE = 0.3
#: Share of the timeout after which a rank that stands still without waiting is late.
_LATE_SHARE = 0.5
#: Statuses missed before a rank gives no sign of life.
_MISSED = 3
#: Seconds that the rank that ends the job gives the others to show their stacks.
_GRACE_S = 1.5
#: Seconds that the others wait to be ended by it, in scripts, too.  With 4 s, a launcher on a busy machine
#: came too late, and the job printed twice why it ended.
FALLBACK_S = 10.0
#: Longest wait for a disk or a full pipe at the end, s.
_PATIENCE_S = 1.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Watch:
    """What a watchdog watches.

    Attributes:
        timeout_s: longest time without progress, s, above 0.
        folder: folder of the ranks' statuses.
        look: returns this rank's status, given the time it has stood still, s, and whether to find out if it
            waits; callable from any thread.
        others: returns the ranks to read about, with their names; without lost ranks if losses are tolerated.
        synchronous: whether ranks take every step together.
        prefix: beginning of this rank's messages, e.g. `speechdp: rank 1 on n2`.
        before_end: called before anything else at the end, e.g. to restore the terminal.
        fed_by: names of the ranks that feed the training ranks; "": these read their data themselves.
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
        """Return this rank's status; find out whether it waits only if it has stood still for long enough.

        "Long enough" begins before the rank may count as late, even by the oldest status that still counts.
        """
        counts_from_s = min(_LOOK_SHARE * self.timeout_s, _LATE_SHARE * self.timeout_s - self.silence_s)
        return self.look(still_s, still_s >= counts_from_s)


class Stillness:
    """Measures how long a rank has stood still, not counting time in which its process could not run.

    Attributes:
        still_s: time since the last progress, s.
        awake_s: time in which this process could run, s; excludes time frozen or suspended.
    """

    def __init__(self, now_s: float, most_s: float) -> None:
        """Begin to count.

        Args:
            now_s: current time by a monotonic clock, s.
            most_s: most time to count between two looks, s; of a longer gap the rest does not count.
        """
        self.still_s = self.awake_s = 0.0
        self._last_s, self._most_s, self._beats = now_s, most_s, -1

    def look(self, now_s: float, beats: int) -> float:
        """Return `still_s`, given the time and the number of signs of progress so far."""
        gap_s = min(now_s - self._last_s, self._most_s)
        self._last_s = now_s
        self.awake_s += gap_s
        self.still_s = self.still_s + gap_s if beats == self._beats else 0.0
        self._beats = beats
        return self.still_s


class Watchdog:
    """Watches this rank during its block; ends the process with `exit_codes.HUNG` if it hangs.

    Args:
        watch: what to watch.
        end: ends the process.
        print_line: writes to stderr.
    """

    def __init__(
        self,
        watch: Watch,
        *,
        end: Callable[[int], None] = os._exit,
        print_line: Callable[[str], None] | None = None,
    ) -> None:
        self._watch, self._end, self._print_line = watch, end, print_line or _write_stderr
        tick_s = min(1.0, watch.timeout_s / 20)
        self._tick_s = tick_s
        self._stillness = Stillness(time.monotonic(), 2 * tick_s)
        self._sightings: dict[int, Sighting] = {}
        self._looked_s: float | None = None
        self._called = False
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"speechdp-{name}", daemon=True)
            for target, name in ((self._run, "watchdog"), (self._exchange_status, "status"))
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
            thread.join(_PATIENCE_S)  # a hung disk may block the thread, but not the run

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
        """Return whether there was no progress for too long; a waiting rank counts others' progress, too."""
        # If another rank has declared the job hung, a shorter time is enough.
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
        # The first rank ends the job; the others show their stacks and wait to be ended, but not for ever.
        is_first = bounded(lambda: watch.folder.claim_end(line), default=False)
        bounded(watch.before_end, default=None)
        where = own.name.removeprefix("rank ")
        stacks = f"Stacks of rank {where}, {what}:\n{describe_stacks()}"
        bounded(lambda: self._print_line(stacks), default=None)
        if self._watch.others():
            time.sleep(_GRACE_S if is_first else FALLBACK_S)
        bounded(lambda: self._print_line(line), default=None)
        self._end(exit_codes.HUNG)

    def _late(self, own: RankStatus) -> str:
        """Return the part of the message that names the late ranks; "" for a single rank."""
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

    def _exchange_status(self) -> None:
        write_due_s = read_due_s = 0.0
        wait_s = 0.0
        while not self._done.wait(wait_s):
            now_s, still_s = time.monotonic(), self._stillness.still_s
            looks = self._looks(still_s)
            if not looks:
                self._sightings, self._looked_s, read_due_s = {}, None, 0.0
            with contextlib.suppress(OSError):  # training continues all the same; the next try may succeed
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
    """Write directly to the descriptor: a thread that hangs while printing holds the lock of sys.stderr."""
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(2, data) :]
