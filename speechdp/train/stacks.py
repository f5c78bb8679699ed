"""What the threads of this process are doing, read from another thread.

Frames are described by file, line and function only: showing source lines would read files, from a disk that
may be what hangs.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_DEEPEST = 60
#: How every thread begins.
_ENTRIES = {"run", "_bootstrap", "_bootstrap_inner"}


def describe_stacks() -> str:
    """Return the stack of every thread but the caller's: the main thread's first, innermost calls first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    first = threading.main_thread().ident
    texts = []
    for ident in sorted(frames, key=lambda ident: ident != first):
        lines = "".join(f"{line}\n" for line in _describe(frames[ident]))
        texts.append(f"Thread {names.get(ident, ident)} (most recent call first):\n{lines}")
    return "".join(texts)


def _describe(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < _DEEPEST:
        code = frame.f_code
        if not (code.co_filename == threading.__file__ and code.co_name in _ENTRIES):
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return lines


def innermost_module(thread: int) -> str:
    """Return the file of this package that a thread is in, e.g. `comm/mpi.py`; "" if it is in none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return frame.f_code.co_filename.removeprefix(_PACKAGE)
        frame = frame.f_back
    return ""


def is_anywhere_in(module: str, function: str) -> bool:
    """Tell whether any thread is in this function of a module of the package, or in what it calls."""
    path = _PACKAGE + module
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_name == function and frame.f_code.co_filename == path:
                return True
            frame = frame.f_back
    return False
