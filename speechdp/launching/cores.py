"""Count the cores this process may really use and the ranks a machine has room for, and share them."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

_CGROUP_V2_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V2_MEMORY = Path("/sys/fs/cgroup/memory.max")
#: Bytes: any program that has loaded Python and MPI takes as much, and a rank of ours four times that before
#: it has a model.
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
    """Return how many ranks, of whatever program, this machine's memory has room for at the very most.

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
        here: this rank's.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        # As `speechdp launch` has it on one machine: ranks share a host's cores instead of each taking all.
        torch = importlib.import_module("torch")  # counting cores must not cost a launcher this import
        torch.set_num_threads(max(1, available_cores() // hosts.count(here)))
