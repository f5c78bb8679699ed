"""Peak memory of a rank, and its balance over ranks."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from speechdp.process.heap import give_back_free_heap, resident_bytes

if TYPE_CHECKING:
    import torch


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return this process's memory in bytes: `peak_rss_bytes`, `live_rss_bytes`, on a GPU `gpu_peak_bytes`.

    Live memory is what stays resident now, after the C library has returned free memory.  GPU peak memory is
    what torch's allocator gave to tensors, without its reserve, the driver and its libraries.
    """
    give_back_free_heap()
    found = {"peak_rss_bytes": peak_rss_bytes()}
    live = resident_bytes()
    if live is not None:
        found["live_rss_bytes"] = live
    if device.type == "cuda":
        import torch  # noqa: PLC0415 (reports, which compare memory, do without)

        found["gpu_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    with contextlib.suppress(OSError):  # only Linux has this file
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        if (match := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)) is not None:
            return int(match[1]) * 1024
    # Includes the parent's memory at the time it started this process, which can be much more.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def memory_balance(ranks_bytes: Iterable[float]) -> float | None:
    """Return the largest over the smallest of the ranks' memory, 1 if all are equal; None without ranks."""
    amounts = [amount for amount in ranks_bytes if amount > 0]
    return max(amounts) / min(amounts) if amounts else None
