"""Keep memory that tensors have freed for the next ones, and return to the system what none of them needs.

Batches of different lengths make tensors of different sizes.  Between them oneDNN keeps small pieces for each
of the last 1,024 kernels that it has made, one or more per shape.  The gaps between these are too small for
the next batch, so glibc takes more memory from the system, and keeps all of it: a rank that uses 0.4 GB holds
1.2 GB after 50 epochs.  Shapes do not recur soon, so fewer kernels are enough, and leave fewer gaps.

The kernel clears pages that come from the system.  That takes a tenth of a CPU rank's time if, as by glibc's
defaults, each step returns its tensors' memory and takes it again, and more if each large tensor has pages of
its own (M_MMAP_THRESHOLD).  So the heap keeps everything until all free memory is returned at once.  That is
done rarely, and in the middle of a step, when the step's working memory is in use and stays.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

#: Interval at which free memory is returned, s.  Returning it takes some 20 ms.
EVERY_S = 5.0
#: Parameters of glibc's mallopt: most free memory at the heap's end, and size from which on memory is mapped.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
MOST_FREE, LARGEST_IN_HEAP = 1 << 30, (32 << 20) - 1  # glibc accepts no more for the second
#: Variables by which users configure the heap.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

#: Kernels that oneDNN keeps: several times those of a step, for training on chunks, whose shapes are the
#: same.  An LSTM on whole utterances has new shapes in nearly every batch: no more than the 13 to 21 kernels
#: of a step are kept for it.
_KERNELS, _KERNELS_OF_NEW_SHAPES = "64", "24"
_KERNELS_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def keep_few_kernels(environ: MutableMapping[str, str], *, new_shapes: bool = False) -> None:
    """Let oneDNN keep few kernels, unless the user set their number; call it before it makes the first.

    Args:
        new_shapes: the model is an LSTM on whole utterances, which uses few kernels again in a later step.
    """
    if _KERNELS_VARIABLE.replace("ONEDNN", "DNNL") not in environ:  # the variable's former name
        environ.setdefault(_KERNELS_VARIABLE, _KERNELS_OF_NEW_SHAPES if new_shapes else _KERNELS)


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Let the heap keep freed memory until it is returned explicitly, unless the user configured the heap."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None and not any(name in environ for name in _VARIABLES):
        option(_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        option(_TRIM_THRESHOLD, MOST_FREE)


def give_back_free_heap() -> None:
    """Return free memory to the system, in whole pages; do nothing if the C library is not glibc."""
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident_bytes() -> int | None:
    """Return the resident memory of this process, bytes; None if Linux does not tell."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


class HeapTrimmer:
    """Returns free memory to the system now and then, so that the memory held follows the memory in use.

    Args:
        give_back: returns the memory.
        clock: returns the time, s.
    """

    def __init__(
        self,
        give_back: Callable[[], None] = give_back_free_heap,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._give_back, self._clock = give_back, clock
        self._last = clock()

    def before_backward(self) -> None:
        """Return free memory, unless that was done recently.

        Call it where a step uses the most memory.  Between steps the memory that the next step needs is free
        as well, and would have to be cleared for it: 3 % of the time if ranks fill the cores.
        """
        now = self._clock()
        if now - self._last >= EVERY_S:
            self._last = now
            self._give_back()
