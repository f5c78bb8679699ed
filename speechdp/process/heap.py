"""Keep what tensors have freed for the next ones, and give back to the system what none of them needs.

Batches of different lengths make tensors of different sizes, and between them oneDNN keeps small pieces for
each of the last 1,024 kernels that it has made, one or more a shape.  What is free between those is too small
for the next batch, so glibc takes more from the system, and keeps all of it: a rank that has 0.4 GB in use
holds 1.2 GB after 50 epochs.  Shapes do not come again soon, so fewer kernels do.

Pages that come from the system are cleared by the kernel, a tenth of a CPU rank's time where each step gives
back what its tensors had and takes it again, as glibc lets it; more still where each large tensor has pages
of its own (M_MMAP_THRESHOLD).  So the heap keeps all until what is free is given back as a whole,
seldom, and in the middle of a step: what the step works with is in use then and stays.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

#: Free memory is given back so often, s.  That takes some 20 ms.
EVERY_S = 5.0
#: Of glibc's mallopt: what may be free at the heap's end, and sizes from which on memory is no part of it.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
MOST_FREE, LARGEST_IN_HEAP = 1 << 30, (32 << 20) - 1  # glibc takes no more for the second
#: By these a user says how the heap is to be.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

#: Kernels that oneDNN keeps: some times those of a step, for training on chunks, whose shapes are the same.
_KERNELS = "64"
_KERNELS_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def keep_few_kernels(environ: MutableMapping[str, str]) -> None:
    """Let oneDNN keep few kernels, before it makes the first; not where the user has set how many."""
    if _KERNELS_VARIABLE.replace("ONEDNN", "DNNL") not in environ:  # the name that it had
        environ.setdefault(_KERNELS_VARIABLE, _KERNELS)


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Let the heap keep what is freed until it is given back; not where the user has set what it does."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None and not any(name in environ for name in _VARIABLES):
        option(_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        option(_TRIM_THRESHOLD, MOST_FREE)


def give_back_free_heap() -> None:
    """Give back what is free, in whole pages; nothing where the C library is not glibc."""
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident_bytes() -> int | None:
    """Return what this process holds in memory; None where Linux does not tell."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


class HeapTrimmer:
    """Gives back now and then what is free, so that memory follows what is in use.

    Args:
        give_back: does it.
        clock: tells s.
    """

    def __init__(
        self,
        give_back: Callable[[], None] = give_back_free_heap,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._give_back, self._clock = give_back, clock
        self._last = clock()

    def before_backward(self) -> None:
        """Give back, unless that was done lately.

        To be called where a step has most in use.  Between steps what the next one needs is free as well, and
        would be cleared for it: 3 % of the time where ranks fill the cores.
        """
        now = self._clock()
        if now - self._last >= EVERY_S:
            self._last = now
            self._give_back()
