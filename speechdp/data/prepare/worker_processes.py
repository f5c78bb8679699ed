"""Processes that write shards end with the one that started them, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Start processes that Ctrl-C, which reaches all of a terminal, does not end: they inherit the mask."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextmanager
def workers_ended_on_failure() -> Iterator[None]:
    """End this process's workers when the block raises: nobody wants what they are at."""
    try:
        yield
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise


def end_with_parent() -> None:
    """Let this worker end when its parent is killed: the next `prepare` may write to the same folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
