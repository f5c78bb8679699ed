"""What ranks as threads of one process share: who has failed, who has ended, and the clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from speechdp.errors import CommunicationError


class Vanished(SystemExit):
    """Raised by a rank in tests of losses, to vanish like a killed process."""


class ThreadJob:
    """The ranks of one `run_threads`, whatever groups they have split into.

    Attributes:
        changed: guards everything that the ranks share; notified whenever any of it changes.
        deadline: time.monotonic() at which ranks that wait for one another give up, s.
        failure: the first rank that failed, and its exception.
        ended: ranks that no longer take part in anything.
        lost: ranks that have vanished.
    """

    def __init__(self, timeout_s: float) -> None:
        self.changed = threading.Condition()
        self.deadline = time.monotonic() + timeout_s
        self.failure: tuple[int, BaseException] | None = None
        self.ended: set[int] = set()
        self.lost: set[int] = set()

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first failure and wake all ranks."""
        with self.changed:
            if self.failure is None:
                self.failure = (rank, error)
            self.changed.notify_all()

    def end(self, rank: int) -> None:
        """Record that `rank` no longer takes part in anything."""
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()

    def lose(self, rank: int) -> None:
        """Record that `rank` has vanished; its threads vanish in their next exchange."""
        with self.changed:
            self.lost.add(rank)
            self.changed.notify_all()

    def check_here(self, rank: int) -> None:
        """Raise Vanished if `rank` has vanished, in whichever of its threads calls this."""
        if rank in self.lost:
            raise Vanished

    def wait(self, what: str, rank: int, missing: Sequence[int], *, for_any: bool = False) -> None:
        """Sleep until something changes.  The caller must hold `changed`.

        Args:
            what: the call that waits, for the message.
            rank: the rank that waits.
            missing: the ranks it waits for.
            for_any: whether one of them is enough; else it needs all.

        Raises:
            CommunicationError: waiting is in vain.
            Vanished: this rank has vanished.
        """
        self.check_here(rank)
        if self.failure is not None:
            failed, error = self.failure
            raise CommunicationError(f"rank {failed} failed ({type(error).__name__}) before {what}")
        gone = [r for r in missing if r in self.ended]
        if gone and (not for_any or len(gone) == len(missing)):
            raise CommunicationError(f"rank {gone[0]} has ended; rank {rank} waits for it in {what}")
        if time.monotonic() >= self.deadline:
            raise CommunicationError(f"rank {rank} timed out in {what}, waiting for ranks {list(missing)}")
        self.changed.wait(max(0.0, self.deadline - time.monotonic()))
