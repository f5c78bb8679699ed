"""Which operations a command does on files, and what can go wrong with each: the points of a fault."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Errors that are tried, each with all operations that can give it (`CAN_FAIL`).
ERRORS = ("ENOSPC", "EIO", "ESTALE", "EINTR", "ENOENT", "EACCES", "EDQUOT", "EROFS", "EMFILE")

_BY_NAME = ("open", "create", "opendir", "rename", "link", "symlink", "unlink", "mkdir", "rmdir")
_ALL = (*_BY_NAME, "write", "truncate", "fsync", "fsyncdir", "close")
_FILLS = ("create", "write", "truncate", "fsync", "close", "rename", "link", "symlink", "mkdir")
#: Operations that can give an error, by their manual pages; NFS gives ESTALE to all.  As in iofault.c.
CAN_FAIL: dict[str, tuple[str, ...]] = {
    "ENOSPC": _FILLS,
    "EDQUOT": _FILLS,
    "EROFS": ("create", "truncate", "rename", "link", "symlink", "unlink", "mkdir", "rmdir"),
    "EMFILE": ("open", "create", "opendir"),
    "EIO": _ALL,
    "ESTALE": _ALL,
    "EINTR": ("open", "create", "write", "truncate", "fsync", "fsyncdir"),
    "ENOENT": _BY_NAME,
    "EACCES": _BY_NAME,
}

#: Parts of names that differ from run to run.
_VARYING = (
    (re.compile(r"\.[0-9a-f]+\.tmp$"), ".*.tmp"),
    (re.compile(r"#\d+ \(deleted\)$"), "#*"),  # files without a name
    (re.compile(r"\.scratch-[^/]+"), ".scratch-*"),
    (re.compile(r"\.[0-9a-f]{8}-(\d+)\."), r".*-\1."),
    (re.compile(r"\.[0-9a-f]{8}\.probe$"), ".*.probe"),
    (re.compile(r"tfevents\.[^/]*$"), "tfevents.*"),
    (re.compile(r"samples-[^/]*\.jsonl$"), "samples-*.jsonl"),
)


@dataclass(frozen=True, order=True)
class Operation:
    """What a process does to a file.

    Attributes:
        rank: that does it.
        kind: `fsync` and the like, as iofault.c names them.
        path: below the folder that is watched, a pattern: names that differ from run to run have stars.
        number: from 1, of those of this kind with this path.
    """

    rank: int
    kind: str
    path: str
    number: int


@dataclass(frozen=True, order=True)
class Point:
    """An operation that fails.

    Attributes:
        operation: the one.
        error: name of the error.
        lasts: from then on every operation fails that can fail so.
        is_late: it is done, and then reported as failed.
    """

    operation: Operation
    error: str
    lasts: bool = False
    is_late: bool = False

    def __str__(self) -> str:
        what = self.operation
        how = "on" if self.lasts else "late" if self.is_late else "once"
        return f"{what.rank} {what.kind} {what.path} {what.number} {self.error} {how}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """Undo `str`."""
        rank, kind, path, number, error, how = text.split()
        return cls(Operation(int(rank), kind, path, int(number)), error, how == "on", how == "late")

    def order(self, folder: Path, log: Path) -> str:
        """Return the order to the shim of the process that does it (iofault.c)."""
        what = self.operation
        return order(
            folder,
            log,
            op=what.kind,
            path=what.path,
            n=what.number,
            errno=getattr(errno, self.error),
            last=int(self.lasts),
            late=int(self.is_late),
        )


def reason_of(error: str) -> str:
    """Return what the system calls an error."""
    return os.strerror(getattr(errno, error))


def order(folder: Path, log: Path, **settings: Any) -> str:
    """Return an order to the shim; without settings it only writes its log."""
    return ";".join([f"folder={folder}", *(f"{k}={v}" for k, v in settings.items()), f"log={log}"])


def operations(rank: int, log: Path) -> Iterator[Operation]:
    """Return what a rank has done, from the log of a run in which nothing failed."""
    seen: Counter[tuple[str, str]] = Counter()
    for line in log.read_text().splitlines():
        _, _, kind, path = line.split(" ", 3)
        for varying, pattern in _VARYING:
            path = varying.sub(pattern, path)
        seen[kind, path] += 1
        yield Operation(rank, kind, path, seen[kind, path])


def has_failed(log: Path) -> bool:
    """Return whether an operation was made to fail."""
    return log.is_file() and any(line.endswith(" FAIL") for line in log.read_text().splitlines())


def points(done: Iterable[Operation]) -> Iterator[Point]:
    """Return all that can go wrong with these operations: each error, once and from then on.

    An interruption does not last; a rename and a folder that is made may be reported as failed though they
    have succeeded, as over NFS where the answer was lost.
    """
    for operation in done:
        for error in ERRORS:
            if operation.kind not in CAN_FAIL[error]:
                continue
            yield Point(operation, error)
            if error != "EINTR":
                yield Point(operation, error, lasts=True)
        if operation.kind in ("rename", "unlink", "mkdir", "rmdir", "link"):
            yield Point(operation, "EIO", is_late=True)
