"""Keep what tensors have freed for the next ones, and give it back to the system now and then.

Batches of different lengths make tensors of different sizes, and between them oneDNN keeps small pieces for
each of the last 1,024 kernels that it has made, one or more a shape.  What is free between those is too small
for the next batch, so glibc takes more from the system, and keeps all of it: a rank that has 0.4 GB in use
holds 1.2 GB after 50 epochs.  Shapes do not come again soon, so fewer kernels do.

Pages that come from the system are cleared by the kernel, a tenth of a CPU rank's time where each step gives
back what its tensors had and takes it again, as glibc lets it; more still where each large tensor has pages
of its own (M_MMAP_THRESHOLD).  So the heap keeps all until what is free is given back as a whole, seldom.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

#: Memory is looked at so often, s.
EVERY_S = 5.0
#: It is given back once it has grown by this factor over what it was after so many steps; what is used again
#: costs the kernel 0.05 to 0.3 s.
GROWTH, FEW_STEPS = 1.4, 4
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
    """Gives back what is free where much of it has gathered, so that memory follows what is in use.

    What every step uses is free between steps and no less needed: given back, the kernel clears it in the
    next step.  So memory is given back once more is held than a few steps have needed.  On batches of
    about one size that is seldom.

    Args:
        give_back: does it.
        clock: tells s.
        held: tells the bytes that are held; None: cannot be told, and nothing is given back.
    """

    def __init__(
        self,
        give_back: Callable[[], None] = give_back_free_heap,
        clock: Callable[[], float] = time.monotonic,
        held: Callable[[], int | None] = resident_bytes,
    ) -> None:
        self._give_back, self._clock, self._held = give_back, clock, held
        self._last = clock()
        #: Steps since memory was given back, or training began, as far as they count.
        self._steps = 0
        #: Bytes that were held after `FEW_STEPS` of them.
        self._level = 0

    def after_step(self) -> None:
        """Look, unless that was done lately, and give back what has gathered."""
        if self._steps < FEW_STEPS:
            self._steps += 1
            if self._steps == FEW_STEPS:
                self._level = self._held() or 0
            return
        now = self._clock()
        if now - self._last < EVERY_S:
            return
        self._last = now
        if (self._held() or 0) > GROWTH * self._level:
            self._give_back()
            self._steps = 0
