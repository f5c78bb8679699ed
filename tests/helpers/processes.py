"""Find out whether a process that the test did not start itself still runs."""

from __future__ import annotations

import psutil


def is_running(pid: int) -> bool:
    """Return whether a process runs; False for one that has ended, whether or not it was waited for."""
    try:
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False
