"""Communicators: how N equal ranks exchange tensors, behind one contract (`base.py`)."""

from speechdp.comm.base import Communicator, CompletedWork, ReduceOp, Work
from speechdp.comm.create import Choice, choose_backend, create_communicator

__all__ = [
    "Choice",
    "Communicator",
    "CompletedWork",
    "ReduceOp",
    "Work",
    "choose_backend",
    "create_communicator",
]
