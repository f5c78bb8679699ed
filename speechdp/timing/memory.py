"""Peak memory of a rank, and its balance over ranks."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import torch


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return this process's peak memory in bytes: `peak_rss_bytes`, on a GPU `gpu_peak_bytes` too.

    The latter is what torch's allocator gave to tensors, without its reserve, the driver and its libraries.
    """
    found = {"peak_rss_bytes": peak_rss_bytes()}
    if device.type == "cuda":
        found["gpu_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def peak_rss_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    try:
        # getrusage counts what the parent held when it started this process, which can be much more.
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        status = ""
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if peak is not None:
        return int(peak[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def memory_balance(ranks_bytes: Iterable[float]) -> float | None:
    """Return the largest over the smallest of the ranks' memory, 1 if all are equal; None without ranks."""
    amounts = [amount for amount in ranks_bytes if amount > 0]
    return max(amounts) / min(amounts) if amounts else None
