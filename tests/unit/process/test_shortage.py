"""Where memory or threads are lacking, one line says what was wanted and what helps; defects stay defects."""

from __future__ import annotations

import resource
import sys
import threading

import numpy as np
import pytest
import torch

from speechdp import exit_codes, remedies
from speechdp.cli import main
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.startup.failure import guard
from speechdp.process.shortage import shortage

NOBODY_HAS = 10**15  # bytes


def take_of_torch() -> object:
    return torch.empty(NOBODY_HAS, dtype=torch.uint8)


def take_of_numpy() -> object:
    return np.ones(NOBODY_HAS, dtype=np.uint8)


def raise_it(error: Exception) -> object:
    raise error


SHORTAGES = {
    "torch": (take_of_torch, "out of memory (DefaultCPUAllocator: can't allocate memory: you tried to "),
    "numpy": (take_of_numpy, "out of memory (Unable to allocate 909. TiB for an array with shape "),
    "python": (lambda: raise_it(MemoryError()), "out of memory (no more was available); "),
    "cuda": (
        lambda: raise_it(
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has")
        ),
        "out of GPU memory (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has); ",
    ),
    "a kernel": (
        lambda: raise_it(RuntimeError("could not create a primitive")),
        "out of memory, most likely (oneDNN could not create a primitive); ",
    ),
    "what a kernel works with": (
        lambda: raise_it(RuntimeError("could not execute a primitive")),
        "out of memory, most likely (oneDNN could not execute a primitive); ",
    ),
    "a full GPU": (
        lambda: raise_it(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be")),
        "out of GPU memory (CUDA error: out of memory CUDA kernel errors might be); ",
    ),
}


@pytest.mark.parametrize("kind", SHORTAGES)
def test_a_rank_says_it_in_one_line_with_the_options_of_its_command(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    take, begun = SHORTAGES[kind]

    def work(comm: Communicator) -> None:
        take()

    with remedies.of_command({"batch_size", "batch_frames", "epochs"}):
        assert guard(SerialCommunicator, work) == exit_codes.CRASHED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"speechdp: {begun}")
    assert line.endswith("); lower --batch-size or --batch-frames")


def test_a_script_is_shown_its_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    def work(comm: Communicator) -> None:
        take_of_torch()

    assert guard(SerialCommunicator, work) == exit_codes.CRASHED
    told = capsys.readouterr().err
    assert "in take_of_torch" in told
    assert told.endswith("); take smaller batches\n")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        RuntimeError("shapes do not fit"),
        OSError(12, "memory"),
        RuntimeError(
            "could not create a primitive descriptor for a convolution forward propagation primitive"
        ),
    ],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert shortage(error) is None


@pytest.mark.parametrize(
    ("threads", "remedy"),
    [("4", "raise the limit (ulimit -u), or set OMP_NUM_THREADS=1"), ("1", "raise the limit (ulimit -u)")],
)
def test_no_more_threads_is_no_defect(
    threads: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)

    def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")  # as Python where RLIMIT_NPROC is reached

    starts = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
    monkeypatch.setattr(threading, starts, refuses)

    def work(comm: Communicator) -> None:
        threading.Thread(target=print).start()

    with remedies.of_command({"epochs"}):
        assert guard(SerialCommunicator, work) == exit_codes.CRASHED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("speechdp: out of threads: ")
    assert line.endswith(f"; {remedy}")


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (
            RuntimeError("could not create a primitive"),
            "--batch-size, or raise the limit on memory (ulimit -v)",
        ),
        (MemoryError(), "--batch-size, or raise the limit on memory (ulimit -v)"),
        (RuntimeError("can't start new thread"), "(ulimit -u or -v)"),  # there is no room for its stack
        (RuntimeError("CUDA error: out of memory"), "--batch-size"),
    ],
)
def test_a_limit_on_memory_is_named_where_there_is_one(
    error: Exception, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with remedies.of_command({"batch_size"}):
        assert "-v" not in str(shortage(error))
        monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_AS: (2**30, 2**30)}[kind])
        assert str(shortage(error)).endswith(end)


def test_a_command_without_batches_says_it_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Command:
        def run(self) -> int:
            take_of_torch()
            return 0

    monkeypatch.setattr(main, "read_command", lambda name, arguments: Command())
    monkeypatch.setattr(main, "_options_of", lambda command: {"beam"})
    assert main.run(["transcribe"]) == exit_codes.CRASHED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("speechdp: out of memory (DefaultCPUAllocator")
    assert line.endswith("); free some memory, then run again")
