"""Lack of memory or threads: recognise the errors by which libraries report it, unlike defects."""

from __future__ import annotations

import os
import resource

from speechdp import remedies
from speechdp.errors import lacks_memory, one_line

#: CUDA's message on a GPU filled by others, for which torch has no exception class.
_ON_GPU = "CUDA error: out of memory"
_LONGEST = 160  # characters of the library's message; after that comes CUDA's advice on its own settings
#: Message of Python's RuntimeError if the system allows this user or container no more threads.
_NO_THREAD = "can't start new thread"
#: Messages of oneDNN's RuntimeError if it gets no memory for a kernel or for a kernel's workspace; they give
#: no reason.  If oneDNN has no kernel for an operation, its message is longer.
_NO_KERNEL = ("could not create a primitive", "could not execute a primitive")


def shortage(error: BaseException) -> str | None:
    """Return one line on the resource that is short and the remedy; None: the error has another cause.

    An OSError is never one: its own message says what the system was asked for.

    Example:
        >>> shortage(MemoryError("Unable to allocate 7.45 GiB for an array"))
        'out of memory (Unable to allocate 7.45 GiB for an array); take smaller batches'
    """
    if isinstance(error, OSError):
        return None
    message = one_line(error)
    if isinstance(error, RuntimeError) and message == _NO_THREAD:
        fewer = "" if os.environ.get("OMP_NUM_THREADS") == "1" else ", or set OMP_NUM_THREADS=1"
        return (
            "out of threads: the system allows this user, job or container no more; raise the limit "
            f"(ulimit -u{' or -v' if _has_limit() else ''}){fewer}"
        )
    if isinstance(error, RuntimeError) and message in _NO_KERNEL:
        return f"out of memory, most likely (oneDNN {message}); {remedies.less_memory()}{_or_raise_limit()}"
    # torch.OutOfMemoryError by its name, to avoid importing torch.
    on_gpu = type(error).__name__ == "OutOfMemoryError" or _ON_GPU in message
    if not (on_gpu or lacks_memory(error)):
        return None
    begun = message.find("DefaultCPUAllocator")
    message = message[max(begun, 0) :][:_LONGEST]
    where = "GPU memory" if on_gpu else "memory"
    or_else = "" if on_gpu else _or_raise_limit()
    return f"out of {where} ({message or 'no more was available'}); {remedies.less_memory()}{or_else}"


def _or_raise_limit() -> str:
    """Return the remedy for a process with a memory limit, as the end of a list; "": it has no limit.

    With a limit, the libraries alone may need more than smaller batches can save.
    """
    return ", or raise the limit on memory (ulimit -v)" if _has_limit() else ""


def _has_limit() -> bool:
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
