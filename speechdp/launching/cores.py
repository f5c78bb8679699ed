"""Count the cores this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_V2_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores(quota_file: Path = _CGROUP_V2_QUOTA) -> int:
    """Return the cores left by affinity (taskset, batch systems) and by a container's CPU quota, at least 1.

    Args:
        quota_file: cgroup v2's `cpu.max`, "<quota> <period>" in microseconds, or "max <period>".
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text(encoding="utf-8").split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):
        pass  # no such limit here
    return max(1, cores)
