"""Stacks of the threads of a hung process, read from another thread.

Do not call this for a running process: CPython does not keep a thread's frames alive while another thread
reads them.  Python code that followed `f_back` hit a frame that had just been freed.  faulthandler, which
walks frames in C and holds the GIL, hit a thread that C code was creating without the GIL (both SIGSEGV,
CPython 3.11).

Frames are described only by file, line and function.  Showing source lines would read files, perhaps from the
very disk that hangs.
"""

from __future__ import annotations

import faulthandler
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

#: The package's folder, as faulthandler writes it.
_PACKAGE = f"{Path(__file__).resolve().parents[1]}/".encode("ascii", "backslashreplace").decode()
_DEEPEST = 60
#: Functions that every thread begins with.
_ENTRIES = {"run", "_bootstrap", "_bootstrap_inner"}
_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)\b.*:")
_CALL = re.compile(r'  File "(?P<file>.*)", line (?P<line>\S+) in (?P<function>.*)')


@dataclass(frozen=True)
class _Call:
    file: str
    line: str
    function: str

    @property
    def is_entry(self) -> bool:
        return self.file == threading.__file__ and self.function in _ENTRIES


def describe_stacks() -> str:
    """Return the stack of every thread but the caller's: the main thread's first, innermost calls first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = _stacks()
    stacks.pop(threading.get_ident(), None)
    first = threading.main_thread().ident
    texts = []
    for ident in sorted(stacks, key=lambda ident: ident != first):
        calls = [call for call in stacks[ident] if not call.is_entry][:_DEEPEST]
        lines = "".join(f'  File "{call.file}", line {call.line} in {call.function}\n' for call in calls)
        texts.append(f"Thread {names.get(ident, ident)} (most recent call first):\n{lines}")
    return "".join(texts)


def innermost_module(thread: int) -> str:
    """Return the file of this package that a thread is in, e.g. `comm/base.py`; "" if it is in none."""
    files = (call.file for call in _stacks().get(thread, []) if call.file.startswith(_PACKAGE))
    return next(files, "").removeprefix(_PACKAGE)


def is_anywhere_in(module: str, function: str) -> bool:
    """Return whether any thread is in this function of a module of the package, or in what it calls."""
    path = _PACKAGE + module
    return any(
        call.function == function and call.file == path for calls in _stacks().values() for call in calls
    )


def _stacks() -> dict[int, list[_Call]]:
    """Return the calls of every thread, innermost first; at most 100 threads with 100 calls each."""
    descriptor = os.memfd_create("speechdp-stacks")  # in memory, as a disk may be what hangs
    with os.fdopen(descriptor, "rb") as file:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    stacks: dict[int, list[_Call]] = {}
    calls: list[_Call] = []
    for line in text.splitlines():
        if thread := _THREAD.fullmatch(line):
            calls = stacks[int(thread["ident"], 16)] = []
        elif call := _CALL.fullmatch(line):
            calls.append(_Call(call["file"], call["line"], call["function"]))
    return stacks
