"""What the watchdog learns about a rank that trains."""

from __future__ import annotations

import contextlib
import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path

from speechdp.comm import environment
from speechdp.options.run import TrainOptions
from speechdp.parallel.run_files import utc_now
from speechdp.timing.timeline import Span
from speechdp.train.session import Session
from speechdp.train.trainer import Trainer
from speechdp.watchdog.stacks import innermost_module, is_anywhere_in
from speechdp.watchdog.status import RankStatus, StatusFolder
from speechdp.watchdog.watchdog import Watch, Watchdog


def watched(
    session: Session, options: TrainOptions, run_dir: Path, trainer: Trainer
) -> AbstractContextManager[object]:
    """Return a context manager that ends this rank if it hangs during the block.  Not collective.

    Call it in the thread that trains.
    """
    timeout_s = options.faults.hang_timeout
    if timeout_s == 0:
        return contextlib.nullcontext()
    observer = _Observer(session, trainer)
    watch = Watch(
        timeout_s,
        StatusFolder(run_dir),
        observer.look,
        observer.others,
        synchronous=trainer.parts.strategy.traits.synchronous,
        prefix="speechdp" if session.comm.size == 1 else f"speechdp: {observer.name}",
        before_end=session.reporter.end,
        fed_by=_feeders(session),
    )
    return Watchdog(watch)


def _feeders(session: Session) -> str:
    feeders = session.facts.get("feeders", {"ranks": [], "hosts": []})
    named = zip(feeders["ranks"], feeders["hosts"], strict=True)
    return ", ".join(f"rank {rank} on {host}" for rank, host in named)


class _Observer:
    """Looks at a trainer from the watchdog's threads."""

    def __init__(self, session: Session, trainer: Trainer) -> None:
        self._comm, self._trainer = session.comm, trainer
        self._hosts: list[str] = session.facts.get("hosts", [])
        self._thread = threading.get_ident()
        self._host = environment.host_name()
        launch = environment.announced()
        # In a job with feeders, messages number all ranks of the job; files number only those that train.
        rank = self._comm.rank if session.feeders is None or launch is None else launch.rank
        self.name = f"rank {rank} on {self._host}"

    def others(self) -> dict[int, str]:
        """Return the other ranks that are still expected to take part, and their names."""
        names = {rank: f"rank {rank}" for rank in self._comm.alive if rank != self._comm.rank}
        for rank, host in enumerate(self._hosts):
            if rank in names:
                names[rank] = f"rank {rank} on {host}"
        return names

    def look(self, still_s: float, finds_waits: bool) -> RankStatus:
        """Return what this rank is doing.

        Args:
            still_s: time without progress, as the watchdog counts it, s.
            finds_waits: whether to look in the stacks for a wait, which is safe while the rank stands still.
        """
        parts, counters = self._trainer.parts, self._trainer.counters
        doing, doing_s = parts.timeline.open_span() or (parts.pulse.part, still_s)
        return RankStatus(
            rank=self._comm.rank,
            name=self.name,
            host=self._host,
            pid=os.getpid(),
            epoch=counters.epoch,
            step=counters.step,
            doing=doing,
            doing_s=round(doing_s, 3),
            waits=finds_waits and self._comm.size > 1 and self._waits(doing),
            beats=parts.pulse.beats,
            still_s=round(still_s, 3),
            written=utc_now(),
        )

    def _waits(self, doing: str) -> bool:
        """Return whether this rank waits for others."""
        if doing == Span.COMM.value:
            return True
        if doing == Span.DATA_WAIT.value:
            # An asynchronous rank may have to wait until it is dealt a batch or a meeting.
            is_dealt = not self._trainer.parts.strategy.traits.synchronous
            return is_dealt and is_anywhere_in("dealing/batch_client.py", "assignments")
        if doing == Span.CHECKPOINT.value and is_anywhere_in("checkpoint/writer.py", "_collect"):
            return True  # rank 0's thread waits for the files of the others
        return innermost_module(self._thread).startswith("comm/")
