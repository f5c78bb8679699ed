"""RUN/status/: what each rank is doing, for the other ranks and for anybody (docs/run-directory.md).

A rank writes its own file in place, in one piece of fixed size: on network disks a reader that opens it gets
what was written last, while a new name might be seen only when a cached folder has expired.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Bytes of a status, padded by blanks, so that the next one covers the last.
STATUS_BYTES = 512
_HUNG = "hung.txt"


@dataclass(frozen=True)
class RankStatus:
    """What a rank says about itself.

    Attributes:
        rank: of training.
        name: as messages have it, e.g. `rank 3 on n4`.
        host: where it runs.
        pid: its process.
        epoch, step: done, as far as it knows.
        doing: the span that is open, else the part of the run.
        doing_s: for how long, s.
        waits: it is waiting for other ranks.
        beats: steps, evaluated batches and other signs of progress so far.
        still_s: since the last of them, s.
        written: when, ISO 8601, by its host's clock.
    """

    rank: int
    name: str
    host: str
    pid: int
    epoch: int
    step: int
    doing: str
    doing_s: float
    waits: bool
    beats: int
    still_s: float
    written: str


def _from_json(values: Any) -> RankStatus:
    """Raises ValueError, LookupError or TypeError where it is no status."""
    status = RankStatus(
        rank=int(values["rank"]),
        name=str(values["name"]),
        host=str(values["host"]),
        pid=int(values["pid"]),
        epoch=int(values["epoch"]),
        step=int(values["step"]),
        doing=str(values["doing"]),
        doing_s=float(values["doing_s"]),
        waits=bool(values["waits"]),
        beats=int(values["beats"]),
        still_s=float(values["still_s"]),
        written=str(values["written"]),
    )
    if not (status.name + status.doing).isprintable():  # they are shown on terminals
        raise ValueError(status.name)
    return status


def status_to_bytes(status: RankStatus) -> bytes:
    """Return a status as it is written: STATUS_BYTES of them."""
    return json.dumps(asdict(status)).encode().ljust(STATUS_BYTES - 1) + b"\n"


def status_from(content: bytes) -> RankStatus | None:
    """Return the status that was written; None where it is none, or only a part of one."""
    try:
        return _from_json(json.loads(content))
    except (ValueError, LookupError, TypeError, OverflowError):
        return None


class StatusFolder:
    """The folder RUN/status.  Nothing is cached; every method may block as long as the disk does."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "status"

    def write(self, status: RankStatus) -> None:
        """Write a rank's own file.  Raises OSError."""
        content = status_to_bytes(status)
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._file(status.rank), os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(descriptor, content, 0)
        finally:
            os.close(descriptor)

    def read(self, rank: int) -> RankStatus | None:
        """Return another rank's status; None where there is none, or only a part of one.  Raises OSError."""
        try:
            with self._file(rank).open("rb") as file:
                status = status_from(file.read(STATUS_BYTES))
        except FileNotFoundError:
            return None
        return status if status is not None and status.rank == rank else None

    def claim_end(self, text: str) -> bool:
        """Say that the job hangs; return whether this rank is the first and is to end it.  Raises OSError."""
        try:
            with (self.path / _HUNG).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True

    def is_ending(self) -> bool:
        """Tell whether a rank has said that the job hangs.  Raises OSError."""
        return (self.path / _HUNG).exists()

    def clear(self) -> None:
        """Take away what an earlier start of the run has left.  Called by one rank before any begins."""
        with contextlib.suppress(OSError):  # the run is not to fail for it
            for path in (self.path / _HUNG, *self.path.glob("rank-*.json")):
                path.unlink(missing_ok=True)

    def _file(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.json"
