"""What is free in the heap goes back to the system, now and then."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from speechdp.process.heap import EVERY_S, HeapTrimmer, keep_few_kernels

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
    kept.append(libc.malloc(2048))  # there are no holes for so many of these elsewhere in the heap
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


def test_memory_is_given_back_now_and_then_only() -> None:
    now, given_back = [0.0], list[float]()
    trimmer = HeapTrimmer(lambda: given_back.append(now[0]), lambda: now[0])
    for second in range(1, 4 * round(EVERY_S)):
        now[0] = float(second)
        trimmer.before_backward()
    assert given_back == [EVERY_S, 2 * EVERY_S, 3 * EVERY_S]


#: Frees 40 MB of tensor-like pieces at the heap's end; prints how many kB the process gives back by that.
_KEEPING = """
import ctypes, re
from pathlib import Path
from speechdp.process.heap import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
keep_freed_memory(ENVIRON)
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
pieces = [libc.malloc(4_000_000) for _ in range(10)]
for piece in pieces:
    ctypes.memset(piece, 1, 4_000_000)
before = resident()
for piece in pieces:
    libc.free(piece)
print(before - resident())
"""


@pytest.mark.parametrize(("environ", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_what_is_freed_is_kept_unless_the_user_says_otherwise(environ: dict[str, str], is_kept: bool) -> None:
    program = f"ENVIRON = {environ!r}\n{_KEEPING}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert (int(done.stdout) < 2_000) is is_kept


_SHAPES = """
import os, ctypes
from speechdp.process.heap import keep_few_kernels
if FEW:
    keep_few_kernels(os.environ)
import torch
class Used(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Used
lstm = torch.nn.LSTM(4, 8)
def used(lengths):
    for length in lengths:
        lstm(torch.zeros(length, 2, 4))[0].sum().backward()
    return libc.mallinfo2().h
before = used(range(1, 81))
print(used(range(81, 301)) - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or newer")
def test_kernels_of_many_shapes_keep_little_memory() -> None:
    def grown(few: bool) -> int:
        program = [sys.executable, "-c", f"FEW = {few}" + _SHAPES]
        environment = {n: v for n, v in os.environ.items() if "PRIMITIVE_CACHE" not in n}
        return int(
            subprocess.run(program, env=environment, check=True, capture_output=True, text=True).stdout
        )

    few, many = grown(True), grown(False)
    assert few < many / 4 and many > 1_000_000


@pytest.mark.parametrize("name", ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"])
def test_how_many_kernels_the_user_wants_stays(name: str) -> None:
    environment = {name: "7"}
    keep_few_kernels(environment)
    assert environment == {name: "7"}
    keep_few_kernels(environment, new_shapes=True)
    assert environment == {name: "7"}
    nothing: dict[str, str] = {}
    keep_few_kernels(nothing)
    assert nothing == {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
