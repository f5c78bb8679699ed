"""What is free in the heap goes back to the system, now and then."""

from __future__ import annotations

import subprocess
import sys

from speechdp.process.heap import EVERY_S, HeapTrimmer

#: Frees 64 MB in pieces with something small, which is kept, behind each; prints how many kB are given back.
_PROGRAM = """
import ctypes, re
from pathlib import Path
from speechdp.process.heap import give_back_free_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
large, kept = [], []
for _ in range(1024):
    large.append(libc.malloc(65536))
    ctypes.memset(large[-1], 1, 65536)
    kept.append(libc.malloc(64))
for piece in large:
    libc.free(piece)
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = resident()
give_back_free_heap()
print(before - resident())
"""


def test_what_is_free_between_small_pieces_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(done.stdout) > 40_000  # kB of 65,536; the pages with the small pieces stay


def test_it_is_given_back_now_and_then_only() -> None:
    now, given = [0.0], list[float]()
    trimmer = HeapTrimmer(lambda: given.append(now[0]), lambda: now[0])
    for now[0] in (1.0, EVERY_S - 0.1, EVERY_S, EVERY_S + 1.0, 2.5 * EVERY_S):
        trimmer.after_step()
    assert given == [EVERY_S, 2.5 * EVERY_S]
