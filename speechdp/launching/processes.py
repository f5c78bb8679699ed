"""Find, signal and adopt processes, by means of /proc and prctl."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def at_our_death() -> Callable[[], None]:
    """Return a function that a child must call first, to get SIGTERM when this process is killed."""
    prctl, us = load_prctl(), os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != us:  # killed before the child has asked
            os._exit(128 + signal.SIGTERM)

    return ask


def kill_descendants(root: int, keep: frozenset[int]) -> None:
    """Kill every process below `root` (and `root`, unless it is this one), except those in `keep`.

    Ranks have process groups of their own, so killing the launcher's group would not reach them.

    Args:
        keep: processes to spare, with their descendants: a batch script's warning waits in ever new `sleep`s.
    """
    killed: set[int] = set()
    # Look again until there is none: one may have started another between the look and its end.
    while found := [pid for pid in descendants(root, keep) if pid not in killed]:
        for pid in found:
            kill(pid, signal.SIGKILL)
        killed.update(found)
    if root != os.getpid():
        kill(root, signal.SIGKILL)


def kill(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a process that may already be gone."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def descendants(root: int, without: frozenset[int] = frozenset()) -> list[int]:
    """Return the processes below `root` from /proc, parents before children; empty without /proc.

    Args:
        without: processes to leave out, with their descendants.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may itself contain blanks and brackets: parse after the last bracket.
            state, parent = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = [pid for pid in children.get(queue.pop(0), []) if pid not in without]
        found += below
        queue += below
    return found


def outermost_with(root: int, variable: str) -> list[int]:
    """Return the processes below `root` with a variable in their environment, without their descendants."""
    found: list[int] = []
    below: set[int] = set()
    for pid in descendants(root):  # parents before children
        if pid not in below and _has_variable(pid, variable):
            found.append(pid)
            below.update(descendants(pid))
    return found


def _has_variable(pid: int, variable: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended meanwhile, or is another user's
        return False
    return any(entry.startswith(f"{variable}=".encode()) for entry in environ.split(b"\0"))


def program_name(pid: int) -> str:
    """Return the name of a process; "": it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def load_prctl() -> Callable[[int, int], int]:
    """Return libc's prctl, or a stand-in that does nothing if there is none (macOS)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return lambda _option, _value: 0

    def call(option: int, value: int) -> int:
        return int(prctl(option, value, 0, 0, 0))

    return call


@contextmanager
def adopting_orphans() -> Iterator[frozenset[int]]:
    """Become the parent of ranks whose launcher was killed, so that they can be found and ended.

    Yields the processes that were below this one before and so do not belong to the job.
    """
    prctl = load_prctl()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield frozenset(descendants(os.getpid()))
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
