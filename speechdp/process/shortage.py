"""Memory and threads that are not there: the errors by which libraries say so, told apart from defects."""

from __future__ import annotations

import os
import resource

from speechdp import remedies
from speechdp.errors import lacks_memory, one_line

#: What CUDA says on a GPU that others fill, for which torch has no class of its own.
_ON_GPU = "CUDA error: out of memory"
_LONGEST = 160  # letters of what the library says: CUDA's advice on its own settings follows
#: What Python says, in a RuntimeError, where the system lets this user or container have no more threads.
_NO_THREAD = "can't start new thread"
#: What oneDNN says, in a RuntimeError without its reason, where it gets no memory for a kernel or for what a
#: kernel works with.  For what it has no kernel it says more.
_NO_KERNEL = ("could not create a primitive", "could not execute a primitive")


def shortage(error: BaseException) -> str | None:
    """Return one line that says what was wanted of the computer and what helps; None: the error is another.

    One of the system, an OSError, is none: it is told with what was wanted of the system.

    Example:
        >>> shortage(MemoryError("Unable to allocate 7.45 GiB for an array"))
        'out of memory (Unable to allocate 7.45 GiB for an array); take smaller batches'
    """
    if isinstance(error, OSError):
        return None
    said = one_line(error)
    if isinstance(error, RuntimeError) and said == _NO_THREAD:
        fewer = "" if os.environ.get("OMP_NUM_THREADS") == "1" else ", or set OMP_NUM_THREADS=1"
        return (
            "out of threads: the system allows this user, job or container no more; raise the limit "
            f"(ulimit -u{' or -v' if _has_limit() else ''}){fewer}"
        )
    if isinstance(error, RuntimeError) and said in _NO_KERNEL:
        return f"out of memory, most likely (oneDNN {said}); {remedies.less_memory()}{_or_raise_limit()}"
    # torch.OutOfMemoryError by its name: where nothing has imported torch, it is not worth its import.
    on_gpu = type(error).__name__ == "OutOfMemoryError" or _ON_GPU in said
    if not (on_gpu or lacks_memory(error)):
        return None
    begun = said.find("DefaultCPUAllocator")
    said = said[max(begun, 0) :][:_LONGEST]
    where = "GPU memory" if on_gpu else "memory"
    or_else = "" if on_gpu else _or_raise_limit()
    return f"out of {where} ({said or 'no more was available'}); {remedies.less_memory()}{or_else}"


def _or_raise_limit() -> str:
    """Return the remedy where this process may not have all memory, as the end of a list; "": it may.

    Of libraries alone it needs more than smaller batches can save.
    """
    return ", or raise the limit on memory (ulimit -v)" if _has_limit() else ""


def _has_limit() -> bool:
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
