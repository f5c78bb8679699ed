"""RUN/status/: what each rank is doing, for other ranks and for users (docs/run-directory.md).

A rank writes its own file in place, in one piece of fixed size.  On a network disk, a reader that opens the
file gets the latest content; a new name might be seen only when the cached folder listing has expired.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speechdp.files import listed_anew

#: Bytes of a status, padded with blanks, so that each overwrites the previous one completely.
STATUS_BYTES = 512
_HUNG = "hung.txt"


@dataclass(frozen=True)
class RankStatus:
    """A rank's status, as written by the rank itself.

    Attributes:
        rank: rank in training.
        name: name in messages, e.g. `rank 3 on n4`.
        host: host of the rank.
        pid: process id.
        epoch, step: epochs and steps done, as far as the rank knows.
        doing: open span, or else the current part of the run.
        doing_s: time spent in `doing` so far, s.
        waits: whether the rank waits for other ranks.
        beats: number of steps, evaluated batches and other signs of progress so far.
        still_s: time since the last sign of progress, s.
        written: time of writing, ISO 8601, by the host's clock.
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
    """Return the status in `values`.  Raises ValueError, LookupError or TypeError if they are no status."""
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
    """Return a status as its STATUS_BYTES bytes in the file."""
    return json.dumps(asdict(status)).encode().ljust(STATUS_BYTES - 1) + b"\n"


def status_from(content: bytes) -> RankStatus | None:
    """Return the status in `content`; None if there is none, or only a part of one."""
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
        """Return another rank's status; None if there is none, or only a part of one.  Raises OSError."""
        try:
            with self._file(rank).open("rb") as file:
                status = status_from(file.read(STATUS_BYTES))
        except FileNotFoundError:
            return None
        return status if status is not None and status.rank == rank else None

    def claim_end(self, text: str) -> bool:
        """Declare the job hung; return whether this rank is the first, which ends it.  Raises OSError."""
        try:
            with (self.path / _HUNG).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True

    def is_ending(self) -> bool:
        """Return whether a rank has declared the job hung.  Raises OSError."""
        # Not by its name alone: a network disk remembers for long that there was no such file.
        return _HUNG in listed_anew(self.path)

    def read_end(self) -> str:
        """Return what the rank that declared the job hung said of it; "": none did.  Raises OSError."""
        try:
            return (self.path / _HUNG).read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return ""

    def clear(self) -> None:
        """Delete the files of an earlier start of the run.  Called by one rank before any rank begins."""
        with contextlib.suppress(OSError):  # the run must not fail because of this
            for path in (self.path / _HUNG, *self.path.glob("rank-*.json")):
                path.unlink(missing_ok=True)

    def _file(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.json"
