"""End a script's job whose ranks wait for each other in vain, e.g. in a collective call that only one made.

A script runs its own code between its calls, and the watchdog does not know how long that may take.  So only
waits count: the job ends when a rank has been in a call, with no progress seen on any other rank, for longer
than the timeout.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

from speechdp import exit_codes
from speechdp.comm.base import Communicator
from speechdp.comm.calls import CALL_ALIKE, END_OF_MAIN, Calls
from speechdp.comm.environment import end_process_with
from speechdp.watchdog.host_board import HostBoard
from speechdp.watchdog.late_ranks import Sighting
from speechdp.watchdog.status import RankStatus
from speechdp.watchdog.watchdog import FALLBACK_S, Stillness

#: Variable that overrides the script's timeout, s.
HANG_TIMEOUT = "SPEECHDP_HANG_TIMEOUT"
#: Age of a rank's status, in watchdog ticks (of at least 1 s), from which the rank gives no sign of life.
_MISSED = 5
#: Share of the timeout after which a waiting rank looks at the others.
_LOOK_SHARE = 0.3
_MOST_NAMED = 8
_OWN_CODE = "the script's own code"


class ScriptWatchdog:
    """Watches this rank from `start` to `stop`; ends the process with `exit_codes.HUNG` if it waits in vain.

    Args:
        comm: the ranks.
        hosts: host of every rank.
        timeout_s: longest wait, s, above 0.
        calls: record of the call that this rank is in.
        board: statuses of the host's ranks.
        end: prints a line and ends the process.
    """

    def __init__(
        self,
        comm: Communicator,
        hosts: Sequence[str],
        timeout_s: float,
        calls: Calls,
        board: HostBoard,
        *,
        end: Callable[[str, int], object] = end_process_with,
    ) -> None:
        self._calls, self._board, self._timeout_s, self._end = calls, board, timeout_s, end
        self._rank, self._host = comm.rank, hosts[comm.rank]
        self._names = {rank: f"rank {rank} on {host}" for rank, host in enumerate(hosts)}
        self._tick_s = min(1.0, timeout_s / 20)
        self._stillness = Stillness(time.monotonic(), 2 * self._tick_s)
        self._sightings: dict[int, Sighting] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="speechdp-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._done.set()
        self._thread.join(2 * self._tick_s)
        if not self._thread.is_alive():
            self._board.close()

    def _run(self) -> None:
        while not self._done.wait(self._tick_s):
            at = self._calls.at  # before the beats: a call that begins in between must not seem long
            still_s = self._stillness.look(time.monotonic(), self._calls.beats)
            own = self._status(at, still_s)
            with contextlib.suppress(OSError):  # the watchdog works without it, too
                self._board.write(own)
            with contextlib.suppress(OSError):
                self._look_at_others(still_s)
            if self._is_due(own, still_s):
                self._end_job(own)
                return

    def _status(self, at: str, still_s: float) -> RankStatus:
        calls = self._calls
        elsewhere = END_OF_MAIN if calls.has_ended else f"{_OWN_CODE}, after {calls.last},"
        return RankStatus(
            rank=self._rank,
            name=self._names[self._rank],
            host=self._host,
            pid=os.getpid(),
            epoch=0,
            step=0,
            doing=at or elsewhere,
            doing_s=round(still_s, 3),
            waits=bool(at),
            beats=self._calls.beats,
            still_s=round(still_s, 3),
            written=datetime.now(timezone.utc).isoformat(),
        )

    def _look_at_others(self, still_s: float) -> None:
        if still_s < _LOOK_SHARE * self._timeout_s:
            self._sightings = {}
            return
        now_s = self._stillness.awake_s
        for rank in self._board.ranks:
            if rank != self._rank:
                sighting = self._sightings.setdefault(rank, Sighting(self._names[rank], now_s))
                sighting.note(self._board.read(rank), now_s)

    def _is_due(self, own: RankStatus, still_s: float) -> bool:
        """Return whether this rank has waited too long without progress on any other."""
        if not own.waits or still_s < self._timeout_s:
            return False
        if not self._calls.together and len(self._sightings) + 1 < len(self._names):
            return False  # a rank whose status is unknown may be running steps of its own
        moved = [s.moved_s for s in self._sightings.values() if s.moved_s is not None]
        return not moved or self._stillness.awake_s - max(moved) >= self._timeout_s

    def _end_job(self, own: RankStatus) -> None:
        # Only one rank per host claims the end, and rank 0's host goes first, so that the job prints one
        # line.
        line = self._line(own)
        is_first = self._board.claim_end() and (0 in self._board.ranks or self._rank == 0)
        if not is_first and self._done.wait(FALLBACK_S):
            return
        self._end(line, exit_codes.HUNG)

    def _line(self, own: RankStatus) -> str:
        with_it = [rank for rank, s in self._sightings.items() if s.status is not None and _is_with(own, s)]
        others = [s for rank, s in sorted(self._sightings.items()) if rank not in with_it]
        clauses = [f"{s.name} ({self._doing(s)})" for s in others[:_MOST_NAMED]]
        if len(others) > _MOST_NAMED:
            clauses.append(f"{len(others) - _MOST_NAMED} more")
        if with_it:
            more = f" and {len(with_it) - _MOST_NAMED} more" if len(with_it) > _MOST_NAMED else ""
            clauses.append("at the same call: rank " + ", ".join(map(str, with_it[:_MOST_NAMED])) + more)
        if len(self._sightings) + 1 < len(self._names):
            clauses.append("what ranks on other hosts do cannot be seen from here")
        return (
            f"speechdp: {own.name}: hung for {own.still_s:.0f} s at {own.doing}, waiting for other "
            f"ranks; {', '.join(clauses)}; {CALL_ALIKE}; if a rank may be so late, raise {HANG_TIMEOUT} or "
            "run_ranks(hang_timeout=...)\n"
        )

    def _doing(self, seen: Sighting) -> str:
        now_s, status = self._stillness.awake_s, seen.status
        silent_s = seen.silent_s(now_s)
        if status is None or silent_s >= _MISSED * max(self._tick_s, 1.0):
            return f"no sign of life for {silent_s:.0f} s"
        for_s = f"for {status.doing_s:.0f} s"
        return f"{'in' if status.doing.startswith(_OWN_CODE) else 'at'} {status.doing} {for_s}"


def _is_with(own: RankStatus, seen: Sighting) -> bool:
    return seen.status is not None and seen.status.waits and seen.status.doing == own.doing
