"""Find, signal and adopt processes: what launching needs of /proc and prctl."""

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
    """Return what a child is to call first so that it gets SIGTERM when this process is killed outright."""
    prctl = load_prctl()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask


def kill_descendants(root: int, keep: frozenset[int]) -> None:
    """Kill every process below `root` (and `root`, unless it is this one), but those in `keep`.

    Ranks have process groups of their own, so killing the launcher's group would not reach them.

    Args:
        keep: also what these have started: a batch script's warning waits in a `sleep`, ever another one.
    """
    for pid in descendants(root, keep):
        kill(pid, signal.SIGKILL)
    if root != os.getpid():
        kill(root, signal.SIGKILL)


def kill(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a process that may be gone by now."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def descendants(root: int, without: frozenset[int] = frozenset()) -> list[int]:
    """Return the processes below `root`, parents before children, from /proc; empty where there is none.

    Args:
        without: processes to be left out, with all that is below them.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may hold blanks and brackets itself: read on after the last one.
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
    """Return the processes below `root` that have a variable in their environment, not those below these."""
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
    """Return the name of a process, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def load_prctl() -> Callable[[int, int], int]:
    """Return libc's prctl, or a stand-in that does nothing where there is none (macOS)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return lambda _option, _value: 0

    def call(option: int, value: int) -> int:
        return int(prctl(option, value, 0, 0, 0))

    return call


@contextmanager
def adopting_orphans() -> Iterator[frozenset[int]]:
    """Become the parent of ranks whose launcher was killed, so that they can be found and ended.

    Yields the processes that were below this one before: they are none of the job's.
    """
    prctl = load_prctl()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield frozenset(descendants(os.getpid()))
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
