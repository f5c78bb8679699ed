"""Count the cores that this process may really use and the ranks that fit a machine, and share the cores."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

_CGROUP_V2_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V2_MEMORY = Path("/sys/fs/cgroup/memory.max")
#: Least memory of a rank, bytes: any program with Python and MPI loaded takes this much, and a rank of ours
#: four times as much before it has a model.
_LEAST_OF_A_RANK = 2**26


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


def room_for_ranks(limit_file: Path = _CGROUP_V2_MEMORY) -> int:
    """Return the largest number of ranks, of any program, for which this machine's memory may be enough.

    Args:
        limit_file: cgroup v2's `memory.max`, bytes, or "max".
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no such limit here
        memory = min(memory, int(limit_file.read_text(encoding="utf-8")))
    return max(1, memory // _LEAST_OF_A_RANK)


def share_cores(hosts: Sequence[str], here: str) -> None:
    """Limit torch to this rank's share of the host's cores, unless OMP_NUM_THREADS says how many.

    Args:
        hosts: host of every rank, feeders included.
        here: this rank's host.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        # As `speechdp launch` does on one machine: ranks share a host's cores instead of each taking all.
        torch = importlib.import_module("torch")  # counting cores must not cost a launcher this import
        torch.set_num_threads(max(1, available_cores() // hosts.count(here)))
