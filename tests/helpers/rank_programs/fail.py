"""A job whose last rank fails while the others wait for it in an exchange: `fail.py HOW BACKEND`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch

from speechdp.comm.base import Communicator
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from speechdp.comm.startup.world import check_world
from speechdp.errors import ShardError


def fail_in_a_thread() -> None:
    threading.Thread(target=lambda: {}["a key"]).start()
    time.sleep(1000)


def user_error() -> None:
    raise ShardError("train-00003.h5 is truncated; prepare the data again")


def defect() -> None:
    raise ValueError("a defect")


FAILURES = {
    "user_error": user_error,
    "defect": defect,
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "thread": fail_in_a_thread,
}


def main(comm: Communicator) -> None:
    how = sys.argv[1]
    check_world(comm, {"seed": comm.rank if how == "seed" else 1})
    if comm.rank == comm.size - 1:
        FAILURES[how]()
    comm.allreduce(torch.ones(1000), name="never")
    time.sleep(1000)


sys.exit(guard(lambda: create_communicator(sys.argv[2]), main))
